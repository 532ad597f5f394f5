"""The frame that distances are computed in, per stream: moved to the mean centroid, scaled by a power of two.

Why distances need one stands in :mod:`quantwm_core.codebook`. A codebook is prepared once for all tokens: with ``t`` the
centroid in the frame and ``v = M t`` its weighted copy in BF16, ``score = bias - 2 x v``. The bias is computed against
the *stored* ``v``, so that its rounding does not move a centroid: what remains is ``2 (x - c) (v - M t)``, small where
a token is near.
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
# Tokens stay as they are in the rounds of k-means; the scale of both sides stands in the codebook, in BF16's range.
LARGEST_LIFT: tl.constexpr = tl.constexpr(60)


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


@kernel(do_not_specialize=["tokens", "centroids", "pieces"])
def frame_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, magnitudes, table, offset, exponent,
    largest, tokens, centroids, pieces,
    FROM_TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Offset and exponent of a stream, and its first codebook where that comes from tokens."""
    stream = tl.program_id(0).to(tl.int64)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    channel = tl.arange(0, BLOCK_D)
    piece = tl.arange(0, PIECES)
    bits = tl.max(tl.load(magnitudes + stream * pieces + piece, mask=piece < pieces, other=0))
    tl.store(largest + stream, bits)
    own = table + stream * centroids * CHANNELS
    for start in range(0, centroids, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < centroids) & (channel[None, :] < CHANNELS)
        if FROM_TOKENS:
            token = (2 * row + 1).to(tl.int64) * tokens // (2 * centroids)
            number = tl.load(rows + token * token_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(own + row * CHANNELS + channel[None, :], number, mask=inside)
        else:
            number = tl.load(own + row * CHANNELS + channel[None, :], mask=inside, other=0.0)
            bits = tl.maximum(bits, tl.max(magnitude_bits(number)))
    shift = binary_exponent(bits)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, centroids, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < centroids) & (channel[None, :] < CHANNELS)
        if FROM_TOKENS:
            token = (2 * row + 1).to(tl.int64) * tokens // (2 * centroids)
            number = tl.load(rows + token * token_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        else:
            number = tl.load(own + row * CHANNELS + channel[None, :], mask=inside, other=0.0)
        total += tl.sum(scaled(number, -shift), axis=0)
    mean = to_bf16(total / centroids).to(tl.float32)
    tl.store(offset + stream * CHANNELS + channel, scaled(mean, shift), mask=channel < CHANNELS)
    tl.store(exponent + stream, shift)


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
    table, offset, exponent, metric, sums, counts, high, low, bias, first_stored, second_stored, per_tensor, centroids,
    pieces,
    UPDATE: tl.constexpr, FINAL: tl.constexpr, METRIC: tl.constexpr, CENTRED: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
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
        number = tl.where(count[:, None] > 0, tl.div_rn(total, some), number)
        tl.store(table + block + place, number, mask=inside)
    if FINAL:
        exact = to_bf16(number)
        stored = of_pair(first_stored, second_stored, stream, per_tensor)
        tl.store(stored + stream % per_tensor * centroids * CHANNELS + place, exact, mask=inside)
        number = exact.to(tl.float32)
    shift = tl.load(exponent + stream)
    middle = tl.load(offset + stream * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)[None, :]
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
        tl.store(low + block + place, (rest * -2.0).to(tl.bfloat16), mask=inside)
        kept += rest
    seen = centred
    lift = 0
    if not CENTRED:
        seen = tl.where(inside, scaled(number, -shift), 0.0)
        lift = tl.minimum(-shift, LARGEST_LIFT)
    constant = 2.0 * tl.sum(seen * kept, axis=1) - tl.sum(centred * weighted, axis=1)
    if not CENTRED:
        constant = constant * power_of_two(shift + lift)
    tl.store(high + block + place, (near.to(tl.float32) * -2.0 * power_of_two(lift)).to(tl.bfloat16), mask=inside)
    tl.store(bias + stream * centroids + row, constant, mask=row < centroids)
