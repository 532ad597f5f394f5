"""Which centroid a token is nearest to, and what the tokens of a centroid sum to: kernels of k-means.

Codebooks come prepared, as :mod:`quantwm_kernels.triton.frame` says: ``score = bias - 2 x v``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_core import codebook as core
from quantwm_kernels.triton.arithmetic import product, scaled
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.frame import ONE_PRODUCT, THREE_PRODUCTS, TWO_PRODUCTS
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.layer import rows_of

RANKS_PER_WORD = 4
INDEX_BITS: tl.constexpr = tl.constexpr(core.MAX_CENTROIDS - 1)
DISTANCE_BITS: tl.constexpr = tl.constexpr(-core.MAX_CENTROIDS)
COUNTED: tl.constexpr = tl.constexpr(2048)


@triton.jit
def weighted_block(weighted, centroids, start, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr):
    """Channels ``start`` and on of a weighted codebook, ``[BLOCK_K, BLOCK_C]``."""
    channel = start + tl.arange(0, BLOCK_K)[:, None]
    row = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < centroids) & (channel < CHANNELS)
    return tl.load(weighted + row * CHANNELS + channel, mask=inside, other=0.0)


@triton.jit
def token_block(rows, token, tokens, token_stride, start, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Channels ``start`` and on of a tile of tokens, ``[TILE, BLOCK_K]``."""
    channel = start + tl.arange(0, BLOCK_K)
    inside = (token[:, None] < tokens) & (channel[None, :] < CHANNELS)
    return tl.load(rows + token[:, None].to(tl.int64) * token_stride + channel[None, :], mask=inside, other=0.0)


@triton.jit
def into_frame(number, offset, shift, start, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tokens moved and scaled, FP32."""
    channel = start + tl.arange(0, BLOCK_K)
    middle = tl.load(offset + channel, mask=channel < CHANNELS, other=0.0)
    return scaled(number.to(tl.float32) - middle[None, :], -shift)


@triton.jit
def exact_product(centred, coarse, fine, scores):
    """Product of FP32 tokens and of a codebook in two BF16 parts, all but the smallest of four terms."""
    near = to_bf16(centred)
    rest = to_bf16(centred - near.to(tl.float32))
    scores = product(rest, coarse, scores)
    scores = product(near, fine, scores)
    return product(near, coarse, scores)


@triton.jit
def lowest(scores, column, BLOCK_C: tl.constexpr):
    """Smallest score of each row and its column, the first of several."""
    best = tl.min(scores, axis=1)
    found = tl.min(tl.where(scores == best[:, None], column, BLOCK_C), axis=1)
    return best, found


@kernel(do_not_specialize=["tokens", "centroids", "per_piece"])
def assign_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, offset, exponent, high, bias, index,
    tokens, centroids, per_piece,
    CENTRED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Nearest centroid of every token of a piece, as close as one BF16 product tells."""
    stream, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    column = tl.arange(0, BLOCK_C)[None, :]
    constant = tl.load(bias + stream * centroids + column, mask=column < centroids, other=float("inf"))
    own = high + stream * centroids * CHANNELS
    middle = offset + stream * CHANNELS
    shift = tl.load(exponent + stream)
    if BLOCK_K == BLOCK_D:
        resident = weighted_block(own, centroids, 0, CHANNELS, BLOCK_C, BLOCK_K)
    for start in range(piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece), TILE):
        token = start + tl.arange(0, TILE)
        scores = tl.zeros((TILE, BLOCK_C), tl.float32)
        if BLOCK_K == BLOCK_D:
            number = token_block(rows, token, tokens, token_stride, 0, CHANNELS, BLOCK_K)
            if CENTRED:
                number = to_bf16(into_frame(number, middle, shift, 0, CHANNELS, BLOCK_K))
            scores = product(number, resident, scores)
        else:
            for begin in range(0, BLOCK_D, BLOCK_K):
                number = token_block(rows, token, tokens, token_stride, begin, CHANNELS, BLOCK_K)
                if CENTRED:
                    number = to_bf16(into_frame(number, middle, shift, begin, CHANNELS, BLOCK_K))
                block = weighted_block(own, centroids, begin, CHANNELS, BLOCK_C, BLOCK_K)
                scores = product(number, block, scores)
        _, found = lowest(scores + constant, column, BLOCK_C)
        place = index + stream * tokens + token
        tl.store(place, tl.minimum(found, centroids - 1).to(tl.uint8), mask=token < tokens)


@triton.jit
def members(index, start, end, TILE: tl.constexpr):
    """int32 centroid of every token of a tile, -1 for those from ``end``; asked for a tile ahead, it has come in time."""
    token = start + tl.arange(0, TILE)
    nearest = tl.load(index + token, mask=token < end, other=0).to(tl.int32)
    return tl.where(token < end, nearest, -1)


@triton.jit
def store_counts(counts, index, begin, end, centroids):
    """Store how many tokens of a piece each centroid has."""
    row = tl.arange(0, INDEX_BITS + 1)
    count = tl.zeros((INDEX_BITS + 1,), tl.int32)
    for start in range(begin, end, COUNTED):
        token = start + tl.arange(0, COUNTED)
        inside = token < end
        count += tl.histogram(tl.load(index + token, mask=inside, other=0).to(tl.int32), INDEX_BITS + 1)
        count -= tl.where(row == 0, tl.sum((token >= end).to(tl.int32)), 0)  # what stands for tokens that there are not
    tl.store(counts + row, count.to(tl.float32), mask=row < centroids)


@kernel(do_not_specialize=["tokens", "centroids", "per_piece"])
def sum_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, index, sums, counts, tokens, centroids,
    per_piece,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr, CHANNEL_BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Sum and number of a piece's tokens for a block of centroids and of channels; FP32 tokens as a sum of BF16 parts."""
    stream, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    row = tl.program_id(2) // CHANNEL_BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = tl.program_id(2) % CHANNEL_BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_C, BLOCK_K), tl.float32)
    begin, end = piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece)
    following = members(index + stream * tokens, begin, end, TILE)
    for start in range(begin, end, TILE):
        nearest, following = following, members(index + stream * tokens, start + TILE, end, TILE)
        token = start + tl.arange(0, TILE)
        inside = token < end
        member = (row[:, None] == nearest[None, :]).to(tl.float32).to(tl.bfloat16)
        place = token[:, None].to(tl.int64) * token_stride + channel[None, :]
        number = tl.load(rows + place, mask=inside[:, None] & (channel[None, :] < CHANNELS), other=0.0)
        if PARTS == 1:
            total = product(member, number, total)
        else:
            rest = number.to(tl.float32)
            for _ in tl.static_range(PARTS):
                part = to_bf16(rest)
                total = product(member, part, total)
                rest -= part.to(tl.float32)
    part = (stream * tl.num_programs(1) + piece) * centroids
    inside = (row[:, None] < centroids) & (channel[None, :] < CHANNELS)
    tl.store(sums + (part + row[:, None]) * CHANNELS + channel[None, :], total, mask=inside)
    if tl.program_id(2) == 0:
        store_counts(counts + part, index + stream * tokens, begin, end, centroids)


@triton.jit
def scored(number, coarse, fine, middle, shift, start, PRODUCTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr,
           scores):  # fmt: skip
    """``scores`` and the product of a block of tokens and of weighted centroids; see :mod:`quantwm_kernels.triton.frame`."""
    if PRODUCTS == THREE_PRODUCTS:
        scores = exact_product(into_frame(number, middle, shift, start, CHANNELS, BLOCK_K), coarse, fine, scores)
    else:
        if PRODUCTS == TWO_PRODUCTS:
            scores = product(number, fine, scores)
        scores = product(number, coarse, scores)
    return scores


@triton.jit
def store_ranks(scores, column, place, inside, centroids, wanted):
    """Store the columns of the smallest scores of each row, in order, the lowest of equals first, four in a word.

    They are told apart by how much larger they are than the smallest, 15 bits of mantissa of it, and by their column.
    """
    farther = (scores - tl.min(scores, axis=1)[:, None]).to(tl.int32, bitcast=True)
    key = (farther & DISTANCE_BITS) | column
    last = tl.min(key, axis=1)
    word = tl.minimum(last & INDEX_BITS, centroids - 1)
    for rank in range(1, wanted):
        if rank % 4 == 0:
            tl.store(place + rank // 4 - 1, word, mask=inside)
            word = tl.zeros_like(word)
        above = (key - (last + 1)[:, None]).to(tl.uint32, bitcast=True)  # what is not above wraps around
        last += 1 + tl.min(above, axis=1).to(tl.int32, bitcast=True)
        word |= tl.minimum(last & INDEX_BITS, centroids - 1) << (rank % 4 * 8)
    tl.store(place + (wanted - 1) // 4, word, mask=inside)


@triton.jit
def rank_piece(
    rows, found, begin, end, token_stride, coarse_rows, fine_rows, constant, middle, shift, centroids, wanted, words,
    PRODUCTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The nearest centroids of the tokens from ``begin`` to ``end`` of a stream."""
    column = tl.arange(0, BLOCK_C)[None, :]
    if BLOCK_K == BLOCK_D:
        coarse = weighted_block(coarse_rows, centroids, 0, CHANNELS, BLOCK_C, BLOCK_K)
        fine = weighted_block(fine_rows, centroids, 0, CHANNELS, BLOCK_C, BLOCK_K)
        following = token_block(rows, begin + tl.arange(0, TILE), end, token_stride, 0, CHANNELS, BLOCK_K)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        scores = tl.zeros((TILE, BLOCK_C), tl.float32)
        if BLOCK_K == BLOCK_D:
            number, following = following, token_block(rows, token + TILE, end, token_stride, 0, CHANNELS, BLOCK_K)
            scores = scored(number, coarse, fine, middle, shift, 0, PRODUCTS, CHANNELS, BLOCK_K, scores)
        else:
            for channel in range(0, BLOCK_D, BLOCK_K):
                number = token_block(rows, token, end, token_stride, channel, CHANNELS, BLOCK_K)
                coarse_block = weighted_block(coarse_rows, centroids, channel, CHANNELS, BLOCK_C, BLOCK_K)
                fine_block = weighted_block(fine_rows, centroids, channel, CHANNELS, BLOCK_C, BLOCK_K)
                scores = scored(
                    number, coarse_block, fine_block, middle, shift, channel, PRODUCTS, CHANNELS, BLOCK_K, scores
                )
        store_ranks(scores + constant, column, found + token.to(tl.int64) * words, token < end, centroids, wanted)


@kernel(do_not_specialize=["tokens", "centroids", "per_piece", "first_ranks", "second_ranks"])
def nearest_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, offset, exponent, products, high, low, bias,
    ranked, tokens, centroids, per_piece, first_ranks, second_ranks, words,
    PLAIN: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The nearest centroids of every token of a piece, exact but for roundings of FP32."""
    stream, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    column = tl.arange(0, BLOCK_C)[None, :]
    constant = tl.load(bias + stream * centroids + column, mask=column < centroids, other=float("inf"))
    coarse_rows, fine_rows = high + stream * centroids * CHANNELS, low + stream * centroids * CHANNELS
    own, middle = ranked + stream * tokens * words, offset + stream * CHANNELS
    shift = tl.load(exponent + stream)
    wanted = tl.where(stream < per_tensor, first_ranks, second_ranks)
    begin, end = piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece)
    if PLAIN:
        how = tl.load(products + stream)
        if how == ONE_PRODUCT:
            rank_piece(
                rows, own, begin, end, token_stride, coarse_rows, fine_rows, constant, middle, shift, centroids, wanted,
                words, ONE_PRODUCT, CHANNELS, BLOCK_D, BLOCK_C, BLOCK_K, TILE,
            )  # fmt: skip
        elif how == TWO_PRODUCTS:
            rank_piece(
                rows, own, begin, end, token_stride, coarse_rows, fine_rows, constant, middle, shift, centroids, wanted,
                words, TWO_PRODUCTS, CHANNELS, BLOCK_D, BLOCK_C, BLOCK_K, TILE,
            )  # fmt: skip
        else:
            rank_piece(
                rows, own, begin, end, token_stride, coarse_rows, fine_rows, constant, middle, shift, centroids, wanted,
                words, THREE_PRODUCTS, CHANNELS, BLOCK_D, BLOCK_C, BLOCK_K, TILE,
            )  # fmt: skip
    else:  # what is no BF16 cannot be multiplied as it is
        rank_piece(
            rows, own, begin, end, token_stride, coarse_rows, fine_rows, constant, middle, shift, centroids, wanted, words,
            THREE_PRODUCTS, CHANNELS, BLOCK_D, BLOCK_C, BLOCK_K, TILE,
        )  # fmt: skip
