"""Reconstructing a tile of tokens of a sealed tensor on a GPU: what a read and attention have in common.

:func:`opened` finds what is the same for every tile of a stream. Tokens of a tile are ``first + local``, those that
``exists`` holds; a row of the table is described in :mod:`quantwm_kernels.recipe`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.recipe import Form
from quantwm_kernels.triton.clustered import (
    CODES,
    bytes_at,
    channel_residual,
    codes_at,
    halves_at,
    scales_at,
    stage_at,
)
from quantwm_kernels.triton.compensation import MOST, compensated, kept_directions, place_of, steps_at
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.grouped import asked, summed
from quantwm_kernels.triton.minmax import minima_at, minmax
from quantwm_kernels.triton.rows import WORDS_PER_PART, channel_of, in_matrix_order, in_memory_order, reordered
from quantwm_kernels.triton.transform import means_of, transformed

EXACT: tl.constexpr = tl.constexpr(int(Form.EXACT))
AFFINE: tl.constexpr = tl.constexpr(int(Form.AFFINE))
SYMMETRIC: tl.constexpr = tl.constexpr(int(Form.SYMMETRIC))
CHANNEL_AFFINE: tl.constexpr = tl.constexpr(int(Form.CHANNEL_AFFINE))
CHANNEL_MINMAX: tl.constexpr = tl.constexpr(int(Form.CHANNEL_MINMAX))
TRANSFORM: tl.constexpr = tl.constexpr(int(Form.TRANSFORM))
ROTATED: tl.constexpr = tl.constexpr(int(Form.ROTATED))


@triton.jit
def opened(
    row, stream, tokens, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    TABLE_BITS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """All that is the same for every tile of a stream; what a form lacks is 0, or something else's pointer.

    Pointers to codes, scales and zero-points (or minima), and the super-scale; index and centroids of the first stage,
    and the last row of these; whether the stream is compensated, and where its steps are.
    """
    super_scale = 1.0
    if FORM == EXACT:
        codes = halves_at(tl.load(row + CODES), stream * tokens * CHANNELS)
        scales, zeros = codes, codes
    elif FORM == TRANSFORM or FORM == ROTATED:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
        codes = bytes_at(tl.load(row + CODES), 0)
        scales, zeros = codes, codes
    else:
        codes = codes_at(row, stream, tokens, CHANNELS, LANES)
        if FORM == AFFINE or FORM == SYMMETRIC:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
            scales, zeros, super_scale = scales_at(row, stream, tokens, CHANNELS, GROUP, False, FORM == SYMMETRIC)
        elif FORM == CHANNEL_AFFINE:
            scales, zeros, super_scale = scales_at(row, stream, tokens, CHANNELS, GROUP, True, False)
        else:
            scales, zeros = minima_at(row, stream, tokens, CHANNELS, GROUP, FORM == CHANNEL_MINMAX)
    index, table, last_row = codes, codes, 0
    if STAGES:
        index, table, last_row = stage_at(row, stream, tokens, 0, CHANNELS, TABLE_BITS)
    flag, dense, bitmap, counts, values, size, present = 0, codes, 0, 0, 0, 0, False
    if RANK and FORM != TRANSFORM and FORM != ROTATED:  # noqa: PLR1714 - Triton compiles no membership test
        flag, place, present = place_of(row, stream, SPARSE)
        dense, bitmap, counts, values, size = steps_at(row, place, tokens, RANK, SPARSE)
    return (
        codes, scales, zeros, super_scale, index, table, last_row,
        present, flag, dense, bitmap, counts, values, size,
    )  # fmt: skip


@triton.jit
def exact(
    values, first, local, exists,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, WIDE]`` as stored."""
    channel = tl.arange(0, WIDE)
    addresses = values + first * CHANNELS + (local[:, None] * CHANNELS + channel[None, :])
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 2 * LANES))
    inside = exists[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(addresses, mask=inside).to(tl.bfloat16, bitcast=True)


@triton.jit
def simple(
    codes, scales, zeros, super_scale, four, first, local, exists, tokens, FORM: tl.constexpr, CHANNELS: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, WIDE]`` of tokens that are stored exactly, or whose scales are found channel by channel."""
    word = tl.arange(0, WORDS)
    inside = exists[:, None, None] & (word < (CHANNELS + LANES - 1) // LANES)[None, :, None]
    if FORM == EXACT:
        number = exact(codes, first, local, exists, CHANNELS, LANES, ALIGNED, WORDS * LANES)
    elif FORM == CHANNEL_AFFINE:
        total = channel_residual(
            codes, scales, zeros, super_scale, four, first, local, word, inside, CHANNELS, GROUP, LANES
        )
        number = tl.reshape(to_bf16(total), (BLOCK_TOKENS, WORDS * LANES))
    else:
        total = minmax(
            codes, scales, zeros, four, first, local, word, inside, tokens,
            CHANNELS, GROUP, FORM == CHANNEL_MINMAX, LANES,
        )  # fmt: skip
        number = tl.reshape(to_bf16(total), (BLOCK_TOKENS, WORDS * LANES))
    return number


@triton.jit
def kept_operand(
    row, stream, present, FORM: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """What compensation keeps for all tiles of a stream; 0 where it keeps nothing."""
    kept = 0
    if FORM != TRANSFORM and FORM != ROTATED and RANK and RANK <= MOST:  # noqa: PLR1714 - Triton compiles no membership test
        kept = kept_directions(row, stream, present, 0, CHANNELS, RANK, SPARSE, WORDS * LANES, LANES, ALIGNED)
    return kept


@triton.jit
def reconstructed(
    row, stream, tokens, codes, scales, zeros, super_scale, index, table, last_row,
    present, flag, dense, bitmap, counts, values, size, kept, four, first, local,
    FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, TABLE_BITS: tl.constexpr,
    RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, WIDE]`` of a tile that exists as a whole, zero beyond the channels: what a read would write.

    Takes what :func:`opened` returned, and the operand that compensation keeps.
    """
    PARTS: tl.constexpr = WORDS // WORDS_PER_PART
    exists = tl.full((BLOCK_TOKENS,), 1, tl.int1)
    if FORM == AFFINE or FORM == SYMMETRIC:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
        near = reordered(local, BLOCK_TOKENS)
        packed, scale, zero, chosen, steps = asked(
            codes, scales, zeros, 0, index, last_row, dense, present, first, near, 0, FORM, CHANNELS, GROUP, STAGES, RANK, SPARSE, PARTS,
            LANES, ALIGNED,
        )  # fmt: skip
        total = summed(
            packed, scale, zero, chosen, row, stream, tokens, 0, scales, zeros, 0, super_scale, table, four, first, near,
            0, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, PARTS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
        total = in_matrix_order(total, PARTS, LANES, BLOCK_TOKENS)
        if RANK and present:
            total = compensated(
                total, steps, row, stream, kept, dense, bitmap, counts, values, size, flag, 0, first, local, 0,
                CHANNELS, RANK, SPARSE, WORDS * LANES, LANES, ALIGNED, BLOCK_TOKENS,
            )  # fmt: skip
        number = in_memory_order(to_bf16(total), PARTS, LANES, BLOCK_TOKENS)
    elif FORM == TRANSFORM or FORM == ROTATED:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
        total = transformed(
            row, stream, tokens, first, local, four, 0,
            FORM, CHANNELS, GROUP, RANK, WORDS * LANES, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
        if FORM == TRANSFORM:
            channel = channel_of(tl.arange(0, WORDS * LANES), LANES)
            total += means_of(row, stream, channel, CHANNELS)[None, :]
        number = in_memory_order(to_bf16(total), PARTS, LANES, BLOCK_TOKENS)
    else:
        number = simple(
            codes, scales, zeros, super_scale, four, first, local, exists, tokens,
            FORM, CHANNELS, GROUP, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    if WORDS * LANES > CHANNELS:
        number = tl.where((tl.arange(0, WORDS * LANES) < CHANNELS)[None, :], number, 0.0)
    return number
