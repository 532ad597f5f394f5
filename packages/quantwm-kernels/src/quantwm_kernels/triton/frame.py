"""The frame that distances are computed in, per stream: moved to the mean centroid, scaled by a power of two.

Why distances need one stands in :mod:`quantwm_core.codebook`. A codebook is prepared once for all tokens: with ``t`` the
centroid in the frame and ``v = M t`` its weighted copy in BF16, ``score = bias - 2 x v``. The bias is computed against
the *stored* ``v``, so that its rounding does not move a centroid: what remains is ``2 (x - c) (v - M t)``, small where
a token is near. Rounds of k-means take BF16 tokens as they are, and so does the ranking of a stream whose mean is small:
moving both sides changes no distance, only how exactly it is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.triton.arithmetic import (
    binary_exponent,
    magnitude_bits,
    power_of_two,
    scaled,
)
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.layer import of_pair, rows_of

UNIFORM: tl.constexpr = tl.constexpr(0)
DIAGONAL: tl.constexpr = tl.constexpr(1)
FULL: tl.constexpr = tl.constexpr(2)
# A smaller codebook is scaled as if it were larger: a token that is not in it may be.
SMALLEST_SHIFT: tl.constexpr = tl.constexpr(-60)
# How a stream is ranked, by products of BF16: tokens as they are, with centroids that are exact or in two parts; or both
# moved to the mean centroid and in two parts. The latter is needed where the square of that mean is more than FAR times
# the mean square of what is left without it: sums of FP32 would lose what tells centroids apart.
ONE_PRODUCT: tl.constexpr = tl.constexpr(1)
TWO_PRODUCTS: tl.constexpr = tl.constexpr(2)
THREE_PRODUCTS: tl.constexpr = tl.constexpr(3)
FAR: tl.constexpr = tl.constexpr(4.0)


@kernel(do_not_specialize=["tokens", "per_piece"])
def magnitude_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, magnitudes, tokens, per_piece,
    CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of a piece of a stream's tokens, as bits, NaN above all."""
    stream, piece = tl.program_id(0), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    channel = tl.arange(0, BLOCK_D)[None, :]
    largest = tl.zeros((TILE, BLOCK_D), tl.int32)
    for start in range(piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece), TILE):
        token = start + tl.arange(0, TILE)[:, None]
        inside = (token < tokens) & (channel < CHANNELS)
        number = tl.load(rows + token.to(tl.int64) * token_stride + channel, mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(number.to(tl.float32)))
    tl.store(magnitudes + stream * tl.num_programs(1) + piece, tl.max(largest))


@triton.jit
def first_rows(rows, own, token_stride, tokens, centroids, start, FROM_TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
               BLOCK_D: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Rows of the first codebook, where they belong, and which of them there are."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    row = start + tl.arange(0, ROWS)[:, None]
    inside = (row < centroids) & (channel < CHANNELS)
    place = own + row * CHANNELS + channel
    if FROM_TOKENS:
        token = (2 * row + 1).to(tl.int64) * tokens // (2 * centroids)
        number = tl.load(rows + token * token_stride + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        number = tl.load(place, mask=inside, other=0.0)
    return number, place, inside


@kernel(do_not_specialize=["tokens", "centroids"])
def frame_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, table, metric, offset, exponent, products,
    tokens, centroids,
    FROM_TOKENS: tl.constexpr, METRIC: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Offset and exponent of a stream, how exactly it is ranked, and its first codebook where that comes from tokens."""
    stream = tl.program_id(0).to(tl.int64)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    own = table + stream * centroids * CHANNELS
    bits = tl.zeros((), tl.int32)
    for start in range(0, centroids, ROWS):
        number, _, _ = first_rows(
            rows, own, token_stride, tokens, centroids, start, FROM_TOKENS, CHANNELS, BLOCK_D, ROWS
        )
        bits = tl.maximum(bits, tl.max(magnitude_bits(number)))
    shift = tl.maximum(binary_exponent(bits), SMALLEST_SHIFT)
    total = tl.zeros((BLOCK_D,), tl.float32)
    square = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, centroids, ROWS):
        number, place, inside = first_rows(
            rows, own, token_stride, tokens, centroids, start, FROM_TOKENS, CHANNELS, BLOCK_D, ROWS
        )
        if FROM_TOKENS:
            tl.store(place, number, mask=inside)
        number = scaled(number, -shift)
        total += tl.sum(number, axis=0)
        square += tl.sum(number * number, axis=0)
    mean = to_bf16(total / centroids).to(tl.float32)
    channel = tl.arange(0, BLOCK_D)
    tl.store(offset + stream * CHANNELS + channel, scaled(mean, shift), mask=channel < CHANNELS)
    tl.store(exponent + stream, shift)
    how = tl.full((), THREE_PRODUCTS, tl.int32)
    if METRIC != FULL:
        weight = tl.full((BLOCK_D,), 1.0, tl.float32)
        if METRIC == DIAGONAL:
            weight = tl.load(metric + stream * CHANNELS + channel, mask=channel < CHANNELS, other=1.0)
        far = tl.sum(weight * mean * mean)
        near = far <= (tl.sum(weight * (square / centroids)) - far) * FAR
        how = tl.where(near, tl.where(tl.max(tl.abs(weight - 1.0)) == 0, ONE_PRODUCT, TWO_PRODUCTS), how)
    tl.store(products + stream, how)


@triton.jit
def weighted_fully(table, matrix, middle, shift, row, centroids, FINAL: tl.constexpr, CHANNELS: tl.constexpr,
                   BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """``M t`` of a block of rows under a full matrix, read from memory in slices of ``BLOCK_K`` channels."""
    channel = tl.arange(0, BLOCK_D)
    weighted = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(0, CHANNELS, BLOCK_K):
        other = start + tl.arange(0, BLOCK_K)
        inside = (row[:, None] < centroids) & (other[None, :] < CHANNELS)
        number = tl.load(table + row[:, None] * CHANNELS + other[None, :], mask=inside, other=0.0)
        if FINAL:
            number = to_bf16(number).to(tl.float32)
        origin = tl.load(middle + other, mask=other < CHANNELS, other=0.0)[None, :]
        centred = tl.where(inside, scaled(number - origin, -shift), 0.0)
        known = (other[:, None] < CHANNELS) & (channel[None, :] < CHANNELS)
        block = tl.load(matrix + other[:, None] * CHANNELS + channel[None, :], mask=known, other=0.0)
        weighted += tl.dot(centred, block, input_precision="ieee")
    return weighted


@kernel(do_not_specialize=["centroids", "pieces"])
def table_kernel(
    table, offset, exponent, products, metric, sums, counts, high, low, bias, first_stored, second_stored, per_tensor, centroids,
    pieces,
    UPDATE: tl.constexpr, FINAL: tl.constexpr, METRIC: tl.constexpr, CENTRED: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, RELAXATION: tl.constexpr,
):  # fmt: skip
    """New centroids of a block of rows, and their weighted copy and bias for the next assignment."""
    stream = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_D)
    place = row[:, None] * CHANNELS + channel[None, :]
    inside = (row[:, None] < centroids) & (channel[None, :] < CHANNELS)
    block = stream * centroids * CHANNELS
    number = tl.load(table + block + place, mask=inside, other=0.0)
    if UPDATE:
        total = tl.zeros((ROWS, BLOCK_D), tl.float32)
        count = tl.zeros((ROWS,), tl.float32)
        for piece in range(pieces):
            part = stream * pieces + piece
            total += tl.load(sums + part * centroids * CHANNELS + place, mask=inside, other=0.0)
            count += tl.load(counts + part * centroids + row, mask=row < centroids, other=0.0)
        some = tl.broadcast_to(tl.maximum(count, 1.0)[:, None], (ROWS, BLOCK_D))
        mean = tl.where(count[:, None] > 0, tl.div_rn(total, some), number)
        number = mean if RELAXATION == 1 else number + RELAXATION * (mean - number)
        tl.store(table + block + place, number, mask=inside)
    if FINAL:
        exact = to_bf16(number)
        stored = of_pair(first_stored, second_stored, stream, per_tensor)
        tl.store(stored + stream % per_tensor * centroids * CHANNELS + place, exact, mask=inside)
        number = exact.to(tl.float32)
    shift = tl.load(exponent + stream)
    middle = tl.load(offset + stream * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    lift = tl.zeros((), tl.int32) if CENTRED or (METRIC == FULL and FINAL) else -shift
    if FINAL and not CENTRED and METRIC != FULL:
        plain = tl.load(products + stream) != THREE_PRODUCTS
        middle = tl.where(plain, 0.0, middle)
        lift = tl.where(plain, lift, 0)
    centred = tl.where(inside, scaled(number - middle, -shift), 0.0)
    if METRIC == UNIFORM:
        weighted = centred
    elif METRIC == DIAGONAL:
        weight = tl.load(metric + stream * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        weighted = centred * weight[None, :]
    else:
        weighted = weighted_fully(
            table + block, metric + stream * CHANNELS * CHANNELS, offset + stream * CHANNELS, shift, row, centroids,
            FINAL, CHANNELS, BLOCK_D, ROWS, BLOCK_K,
        )  # fmt: skip
    near = to_bf16(weighted)
    kept = near.to(tl.float32)
    if FINAL:
        rest = to_bf16(weighted - kept).to(tl.float32)
        tl.store(low + block + place, (rest * -2.0 * power_of_two(lift)).to(tl.bfloat16), mask=inside)
        kept += rest
    seen = centred
    if not FINAL and not CENTRED:
        seen = tl.where(inside, scaled(number, -shift), 0.0)
    constant = 2.0 * tl.sum(seen * kept, axis=1) - tl.sum(centred * weighted, axis=1)
    tl.store(high + block + place, (near.to(tl.float32) * -2.0 * power_of_two(lift)).to(tl.bfloat16), mask=inside)
    tl.store(bias + stream * centroids + row, constant, mask=row < centroids)
