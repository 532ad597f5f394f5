"""Order of tokens and channels in a tile: as they are loaded and stored, and as a matrix unit has them.

A thread loads and stores words of consecutive channels. A warp has eight tokens of each sixteen at a time, the first eight of
all warps come first: rows stand in *stored order*, channels as they lie in memory, ``[tokens, parts, 4, lanes]``. In a product
thread ``q`` of four has columns ``2q`` and ``2q + 1`` of every eight, and rows stand as they lie in memory.
Between the two no number leaves its thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Words of a part, which four threads have one each of.
WORDS_PER_PART: tl.constexpr = tl.constexpr(4)


@triton.jit
def channel_of(column, LANES: tl.constexpr):
    """Channel of a column of a product.

    A part of the tile is four words: column ``8j + 2q + e`` of a part is lane ``2j + e`` of word ``q``.
    """
    part, inside = column // (WORDS_PER_PART * LANES), column % (WORDS_PER_PART * LANES)
    word, lane = inside % 8 // 2, inside // 8 * 2 + inside % 2
    return (part * WORDS_PER_PART + word) * LANES + lane


@triton.jit
def stored_rows(BLOCK_TOKENS: tl.constexpr):
    """Row of a tile that stands in each row in stored order."""
    row = tl.arange(0, BLOCK_TOKENS)
    half: tl.constexpr = BLOCK_TOKENS // 2
    return row % half // 8 * 16 + row // half * 8 + row % 8


@triton.jit
def reordered(rows, BLOCK_TOKENS: tl.constexpr):
    """Something of each row of a tile, put into stored order."""
    return tl.reshape(tl.permute(tl.reshape(rows, (BLOCK_TOKENS // 16, 2, 8)), (1, 0, 2)), (BLOCK_TOKENS,))


@triton.jit
def in_matrix_order(total, PARTS: tl.constexpr, LANES: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """``[tokens, parts, 4, lanes]`` in stored order as ``[tokens, columns]`` of a product."""
    words = tl.reshape(total, (2, BLOCK_TOKENS // 16, 8, PARTS, WORDS_PER_PART, LANES // 2, 2))
    return tl.reshape(tl.permute(words, (1, 0, 2, 3, 5, 4, 6)), (BLOCK_TOKENS, PARTS * WORDS_PER_PART * LANES))


@triton.jit
def in_stored_order(product, PARTS: tl.constexpr, LANES: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Inverse of :func:`in_matrix_order`, a part's channels along one axis: ``[tokens, parts, 4 * lanes]``."""
    words = tl.reshape(product, (BLOCK_TOKENS // 16, 2, 8, PARTS, LANES // 2, WORDS_PER_PART, 2))
    return tl.reshape(tl.permute(words, (1, 0, 2, 3, 5, 4, 6)), (BLOCK_TOKENS, PARTS, WORDS_PER_PART * LANES))


@triton.jit
def in_memory_order(product, PARTS: tl.constexpr, LANES: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """``[tokens, channels]`` of a product, both as they lie in memory."""
    words = tl.reshape(product, (BLOCK_TOKENS, PARTS, LANES // 2, WORDS_PER_PART, 2))
    return tl.reshape(tl.permute(words, (0, 1, 3, 2, 4)), (BLOCK_TOKENS, PARTS * WORDS_PER_PART * LANES))
