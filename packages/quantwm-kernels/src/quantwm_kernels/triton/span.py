"""Reconstructing the tokens of a program, a tile at a time: what the launch of :mod:`quantwm_kernels.triton.reading` runs.

A program has tokens ``begin`` to ``stop`` of one unit and stream, and writes them from ``out``, whose token 0 is that of the unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.triton.arithmetic import product
from quantwm_kernels.triton.compensation import MOST, compensated, kept_directions
from quantwm_kernels.triton.domain import MATRIX_DTYPE, to_bf16
from quantwm_kernels.triton.grouped import asked, moved, summed
from quantwm_kernels.triton.rows import WORDS_PER_PART, channel_of, in_matrix_order, in_stored_order, stored_rows
from quantwm_kernels.triton.tile import TRANSFORM, opened, simple
from quantwm_kernels.triton.transform import (
    FEWEST_ROWS,
    codes_of,
    coordinates,
    in_columns,
    matrix_rows,
    means_of,
    numbers_of,
    packed_codes,
    three_rows,
    transformed,
)

# Channels of a tile that a thread can hold.
MOST_COLUMNS: tl.constexpr = tl.constexpr(128)
# Rows of a matrix operand; two of as many are kept.
MOST_ROWS: tl.constexpr = tl.constexpr(128)


@triton.jit
def write(
    out, number, near, stride, FIRST: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Store BF16 ``[tokens, PARTS, 4 * LANES]`` in stored order, channels from ``FIRST``; rows that repeat a token are not stored."""
    row = stored_rows(BLOCK_TOKENS)
    channel = tl.arange(0, PARTS)[None, :, None] * (WORDS_PER_PART * LANES) + FIRST
    channel += tl.arange(0, WORDS_PER_PART * LANES)[None, None, :]
    addresses = out + (row[:, None, None] * stride + channel)
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 1, 2 * LANES))
    tl.store(addresses, number, mask=(row == near)[:, None, None] & (channel < CHANNELS))


@triton.jit
def write_rows(
    out, number, local, left, stride, CHANNELS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Store BF16 ``[tokens, WIDE]`` as they lie in memory."""
    channel = tl.arange(0, WIDE)
    addresses = out + (local[:, None] * stride + channel[None, :])
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 2 * LANES))
    tl.store(addresses, number, mask=(local < left)[:, None] & (channel < CHANNELS)[None, :])


@triton.jit
def read_columns(
    row, begin, stop, stream, tokens, out, stride, four, FIRST: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr,
    GROUP: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct channels from ``FIRST`` of tokens ``begin`` to ``stop`` of a transform code or a rotation.

    Codes are asked for a tile ahead. The mean is a product too, of ones: that takes no register of a thread.
    """
    WIDE: tl.constexpr = PARTS * WORDS_PER_PART * LANES
    ROWS: tl.constexpr = min(RANK, MOST_ROWS)
    keeps: tl.constexpr = RANK <= 2 * MOST_ROWS
    out += begin * stride
    left = (stop - begin).to(tl.int32)
    near, natural = tl.minimum(stored_rows(BLOCK_TOKENS), left - 1), tl.minimum(tl.arange(0, BLOCK_TOKENS), left - 1)
    last = tl.maximum(left - BLOCK_TOKENS, 0)
    kept, other, means, ahead, behind, address, size = near, near, near, near, near, begin, 0
    ones = tl.full((BLOCK_TOKENS, FEWEST_ROWS), 1.0, MATRIX_DTYPE)
    if FORM == TRANSFORM:
        address, size = codes_of(row, stream)
        address += begin * size
        means = three_rows(means_of(row, stream, channel_of(tl.arange(0, WIDE), LANES) + FIRST, CHANNELS))
    if keeps:
        matrix = matrix_rows(row, stream, 0, FIRST, FORM, CHANNELS, ROWS, WIDE, ALIGNED)
        kept = in_columns(matrix, ROWS, WIDE, LANES)
        if RANK > ROWS:
            matrix = matrix_rows(row, stream, ROWS, FIRST, FORM, CHANNELS, ROWS, WIDE, ALIGNED)
            other = in_columns(matrix, ROWS, WIDE, LANES)
    if keeps and FORM == TRANSFORM:
        ahead = packed_codes(address, size, 0, 0, near, GROUP, ROWS)
        if RANK > ROWS:
            behind = packed_codes(address, size, ROWS, 0, near, GROUP, ROWS)
    for tile in range(0, left, BLOCK_TOKENS):
        first = tl.minimum(tile, last)
        following = tl.minimum(tile + BLOCK_TOKENS, last)
        total = tl.zeros((BLOCK_TOKENS, WIDE), tl.float32)
        if keeps and FORM == TRANSFORM:
            number = numbers_of(ahead, four, ROWS, BLOCK_TOKENS)
            ahead = packed_codes(address, size, 0, following, near, GROUP, ROWS)
            total = product(number, kept, product(ones, means, total))
            if RANK > ROWS:
                number = numbers_of(behind, four, ROWS, BLOCK_TOKENS)
                behind = packed_codes(address, size, ROWS, following, near, GROUP, ROWS)
                total = product(number, other, total)
        elif keeps:
            direction = tl.arange(0, ROWS)
            number = coordinates(row, stream, tokens, begin + first, natural, direction, CHANNELS, GROUP)
            total = product(number, kept, total)
            if RANK > ROWS:
                direction += ROWS
                number = coordinates(row, stream, tokens, begin + first, natural, direction, CHANNELS, GROUP)
                total = product(number, other, total)
        else:
            total = transformed(
                row, stream, tokens, begin + first, natural, four, FIRST, FORM, CHANNELS, GROUP, RANK, WIDE, LANES, ALIGNED,
                BLOCK_TOKENS,
            )  # fmt: skip
            if FORM == TRANSFORM:
                total = product(ones, means, total)
        number = in_stored_order(to_bf16(total), PARTS, LANES, BLOCK_TOKENS)
        write(out + first * stride, number, near, stride, FIRST, CHANNELS, PARTS, LANES, ALIGNED, BLOCK_TOKENS)


@triton.jit
def read_products(
    row, begin, stop, stream, tokens, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens ``begin`` to ``stop`` of a transform code or a rotation, so many channels at a time that a matrix is kept."""
    WIDE: tl.constexpr = min(WORDS * LANES, MOST_COLUMNS)
    for side in tl.static_range((CHANNELS + WIDE - 1) // WIDE):
        read_columns(
            row, begin, stop, stream, tokens, out, stride, four, side * WIDE, FORM, CHANNELS, GROUP, RANK,
            WIDE // (WORDS_PER_PART * LANES), LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip


@triton.jit
def read_groups(
    row, begin, stop, stream, tokens, out, stride, four, codes, scales, zeros, super_scale, index, table, last_row, flag,
    dense, bitmap, counts, values, size, FIRST: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, TABLE_BITS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct channels from ``FIRST`` of tokens that have scales by groups; what is packed is asked for a tile ahead.

    The last tile ends where the tokens do, and rows repeat the last token where there are fewer than a tile has: no load needs a
    mask.
    """
    WIDE: tl.constexpr = PARTS * WORDS_PER_PART * LANES
    kept = row
    if RANK and RANK <= MOST:
        kept = kept_directions(row, stream, True, FIRST, CHANNELS, RANK, SPARSE, WIDE, LANES, ALIGNED)
    codes, scales, zeros, skew, index, dense = moved(
        codes, scales, zeros, index, dense, begin, CHANNELS, GROUP, RANK, SPARSE, LANES
    )
    out += begin * stride
    left = (stop - begin).to(tl.int32)
    near, natural = tl.minimum(stored_rows(BLOCK_TOKENS), left - 1), tl.minimum(tl.arange(0, BLOCK_TOKENS), left - 1)
    last = tl.maximum(left - BLOCK_TOKENS, 0)
    packed, scale, zero, chosen, steps = asked(
        codes, scales, zeros, skew, index, last_row, dense, True, 0, near, FIRST, FORM, CHANNELS, GROUP, STAGES, RANK, SPARSE,
        PARTS, LANES, ALIGNED,
    )  # fmt: skip
    for tile in range(0, left, BLOCK_TOKENS):
        now, own, lows, places, factors = packed, scale, zero, chosen, steps
        first = tl.minimum(tile, last)
        following = tl.minimum(tile + BLOCK_TOKENS, last)
        packed, scale, zero, chosen, steps = asked(
            codes, scales, zeros, skew, index, last_row, dense, True, following, near, FIRST, FORM, CHANNELS, GROUP, STAGES, RANK,
            SPARSE, PARTS, LANES, ALIGNED,
        )  # fmt: skip
        total = summed(
            now, own, lows, places, row, stream, tokens, begin, scales, zeros, skew, super_scale, table, four, first, near,
            FIRST, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, PARTS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
        total = in_matrix_order(total, PARTS, LANES, BLOCK_TOKENS)
        if RANK:
            total = compensated(
                total, factors, row, stream, kept, dense, bitmap, counts, values, size, flag, begin, first, natural, FIRST,
                CHANNELS, RANK, SPARSE, WIDE, LANES, ALIGNED, BLOCK_TOKENS,
            )  # fmt: skip
        number = in_stored_order(to_bf16(total), PARTS, LANES, BLOCK_TOKENS)
        write(out + first * stride, number, near, stride, FIRST, CHANNELS, PARTS, LANES, ALIGNED, BLOCK_TOKENS)


@triton.jit
def read_grouped(
    row, begin, stop, stream, tokens, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, TABLE_BITS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens ``begin`` to ``stop`` that have scales by groups, compensated or not, so many channels at a time as a thread can hold."""
    WIDE: tl.constexpr = min(WORDS * LANES, MOST_COLUMNS)
    (
        codes, scales, zeros, super_scale, index, table, last_row, present, flag, dense, bitmap, counts, values, size,
    ) = opened(row, stream, tokens, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, SPARSE, LANES)  # fmt: skip
    for side in tl.static_range((CHANNELS + WIDE - 1) // WIDE):
        if RANK and present:
            read_groups(
                row, begin, stop, stream, tokens, out, stride, four, codes, scales, zeros, super_scale, index, table,
                last_row, flag, dense, bitmap, counts, values, size, side * WIDE, FORM, CHANNELS, GROUP, STAGES,
                TABLE_BITS, RANK, SPARSE, WIDE // (WORDS_PER_PART * LANES), LANES, ALIGNED, BLOCK_TOKENS,
            )  # fmt: skip
        else:
            read_groups(
                row, begin, stop, stream, tokens, out, stride, four, codes, scales, zeros, super_scale, index, table,
                last_row, flag, dense, bitmap, counts, values, size, side * WIDE, FORM, CHANNELS, GROUP, STAGES,
                TABLE_BITS, 0, SPARSE, WIDE // (WORDS_PER_PART * LANES), LANES, ALIGNED, BLOCK_TOKENS,
            )  # fmt: skip


@triton.jit
def read_simple(
    row, begin, stop, stream, tokens, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens ``begin`` to ``stop`` of any other form."""
    codes, scales, zeros, super_scale = opened(row, stream, tokens, FORM, CHANNELS, GROUP, 0, 0, 0, 0, LANES)[:4]
    local = tl.arange(0, BLOCK_TOKENS)
    for first in range(begin, stop, BLOCK_TOKENS):
        number = simple(
            codes, scales, zeros, super_scale, four, first, local, local < stop - first, tokens,
            FORM, CHANNELS, GROUP, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
        write_rows(out + first * stride, number, local, stop - first, stride, CHANNELS, LANES, ALIGNED, WORDS * LANES)
