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
    EXACT_BITS,
    bytes_at,
    centroid,
    centroid_rows,
    channel_residual,
    codes_at,
    four_plus_codes,
    group_steps,
    halves_at,
    integer_centroid,
    scales_at,
    stage_at,
)
from quantwm_kernels.triton.compensation import (
    WORDS_PER_PART,
    correction,
    kept_directions,
    part_of,
    place_of,
    steps_at,
)
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.minmax import minima_at, minmax
from quantwm_kernels.triton.transform import means_of, transformed, transformed_part

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
    TABLE_BITS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """All that is the same for every tile of a stream; what a form lacks is 0, or something else's pointer.

    Pointers to codes, scales and zero-points (or minima), and the super-scale; index and centroids of the first stage,
    and the last row of these; whether the stream is compensated, with which operand, and where its steps are.
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
    compensated, kept, flag, dense, bitmap, counts, values, size = 0, 0, 0, 0, 0, 0, 0, 0
    if RANK and FORM != TRANSFORM and FORM != ROTATED:  # noqa: PLR1714 - Triton compiles no membership test
        flag, place, compensated = place_of(row, stream, SPARSE)
        dense, bitmap, counts, values, size = steps_at(row, place, tokens, RANK, SPARSE)
        kept = kept_directions(row, stream, compensated, CHANNELS, RANK, WORDS * LANES, LANES)
    return (
        codes, scales, zeros, super_scale, index, table, last_row,
        compensated, kept, flag, dense, bitmap, counts, values, size,
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
def compensation(
    row, stream, compensated, kept, flag, dense, bitmap, counts, values, size, first, local, exists,
    CHANNELS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, SPARSE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """FP32 ``[tokens, WIDE]`` that PSAC adds, columns as :func:`quantwm_kernels.triton.compensation.channel_of` says."""
    product = tl.full((BLOCK_TOKENS, WIDE), -0.0, tl.float32)  # adding this changes no bit
    if compensated:
        product = correction(
            row, stream, kept, dense, bitmap, counts, values, size, flag, first, local, exists,
            CHANNELS, RANK, WIDE, LANES, SPARSE, BLOCK_TOKENS,
        )  # fmt: skip
    return product


@triton.jit
def clustered(
    row, stream, tokens, codes, step, zero, table, chosen, product, four, first, local, exists, word, inside,
    PART: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr, TABLE_BITS: tl.constexpr, RANK: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, 4 * LANES]`` of a part: residual, centroids and compensation, summed in the reference's order.

    Channels are taken in parts of four words, as the product with the basis has them.
    """
    width: tl.constexpr = WORDS_PER_PART * LANES
    total = (four_plus_codes(codes, four, first, local, word, inside, CHANNELS, LANES) - zero) * step
    for later in tl.static_range(STAGES - 1):
        i, t, n = stage_at(row, stream, tokens, STAGES - 1 - later, CHANNELS, TABLE_BITS)
        rows = centroid_rows(i, n, first, local, exists)
        total += centroid(t, rows, exists, PART * width, CHANNELS, LANES, ALIGNED, BLOCK_TOKENS, WORDS_PER_PART)
    if STAGES and TABLE_BITS == EXACT_BITS:
        total += centroid(table, chosen, exists, PART * width, CHANNELS, LANES, ALIGNED, BLOCK_TOKENS, WORDS_PER_PART)
    elif STAGES:
        total += integer_centroid(
            row, stream, table, chosen, exists, PART * width, TABLE_BITS, CHANNELS, LANES, BLOCK_TOKENS, WORDS_PER_PART
        )
    if RANK:
        total += part_of(product, PART, WORDS // WORDS_PER_PART, LANES, BLOCK_TOKENS)
    return tl.reshape(to_bf16(total), (BLOCK_TOKENS, width))


@triton.jit
def part_steps(
    scales, zeros, super_scale, four, first, local, exists, word, inside, PART: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """FP32 ``s'`` and ``4 + z`` of a part's words; one of each for all of them where a group holds the part."""
    width: tl.constexpr = WORDS_PER_PART * LANES
    groups: tl.constexpr = CHANNELS // GROUP
    if width * (GROUP // width) != GROUP:
        group = (word * LANES // GROUP)[None, :, None]
        step, zero = group_steps(scales, zeros, super_scale, four, first, local, group, inside, groups, SYMMETRIC)
    else:
        group = width * PART // GROUP
        step, zero = group_steps(
            scales, zeros, super_scale, four, first, local, group, exists[:, None, None], groups, SYMMETRIC
        )
    return step, zero


@triton.jit
def beside(left, right, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """``[tokens, 2 * WIDTH]``: the columns of ``left``, then those of ``right``, without moving a number."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (TOKENS, 2 * WIDTH))


@triton.jit
def parts(
    row, stream, tokens, codes, scales, zeros, super_scale, table, chosen, product, four, first, local, exists,
    PART: tl.constexpr, COUNT: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, TABLE_BITS: tl.constexpr, RANK: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, COUNT * 4 * LANES]`` of ``COUNT`` parts, a power of two, from part ``PART``."""
    width: tl.constexpr = WORDS_PER_PART * LANES
    if COUNT > 1:
        left = parts(
            row, stream, tokens, codes, scales, zeros, super_scale, table, chosen, product, four, first, local, exists,
            PART, COUNT // 2, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
        right = parts(
            row, stream, tokens, codes, scales, zeros, super_scale, table, chosen, product, four, first, local, exists,
            PART + COUNT // 2, COUNT // 2, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
        number = beside(left, right, BLOCK_TOKENS, width * (COUNT // 2))
    elif width * PART < CHANNELS:
        word = tl.arange(0, WORDS_PER_PART) + PART * WORDS_PER_PART
        inside = exists[:, None, None] & (word < CHANNELS // LANES)[None, :, None]
        step, zero = part_steps(
            scales, zeros, super_scale, four, first, local, exists, word, inside, PART,
            CHANNELS, GROUP, LANES, FORM == SYMMETRIC,
        )  # fmt: skip
        number = clustered(
            row, stream, tokens, codes, step, zero, table, chosen, product, four, first, local, exists, word, inside,
            PART, CHANNELS, STAGES, TABLE_BITS, RANK, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    else:
        number = tl.zeros((BLOCK_TOKENS, width), tl.bfloat16)
    return number


@triton.jit
def transformed_parts(
    total, PART: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):  # fmt: skip
    """BF16 ``[tokens, COUNT * 4 * LANES]`` of ``COUNT`` parts of a product, a power of two, from part ``PART``."""
    if COUNT > 1:
        left = transformed_parts(total, PART, COUNT // 2, WORDS, LANES, BLOCK_TOKENS)
        right = transformed_parts(total, PART + COUNT // 2, COUNT // 2, WORDS, LANES, BLOCK_TOKENS)
        number = beside(left, right, BLOCK_TOKENS, WORDS_PER_PART * LANES * (COUNT // 2))
    else:
        number = transformed_part(total, PART, WORDS, LANES, BLOCK_TOKENS)
    return number


@triton.jit
def reconstructed(
    row, stream, tokens, codes, scales, zeros, super_scale, index, table, last_row,
    compensated, kept, flag, dense, bitmap, counts, values, size, four, first, local,
    FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, TABLE_BITS: tl.constexpr,
    RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, WIDE]`` of a tile that exists as a whole, zero beyond the channels: what a read would write.

    Takes what :func:`opened` returned.
    """
    exists = tl.full((BLOCK_TOKENS,), 1, tl.int1)
    if FORM == AFFINE or FORM == SYMMETRIC:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
        chosen, product = local, local
        if STAGES:
            chosen = centroid_rows(index, last_row, first, local, exists)
        if RANK:
            product = compensation(
                row, stream, compensated, kept, flag, dense, bitmap, counts, values, size, first, local, exists,
                CHANNELS, RANK, WORDS * LANES, LANES, SPARSE, BLOCK_TOKENS,
            )  # fmt: skip
        number = parts(
            row, stream, tokens, codes, scales, zeros, super_scale, table, chosen, product, four, first, local, exists,
            0, WORDS // WORDS_PER_PART, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    elif FORM == TRANSFORM or FORM == ROTATED:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
        total = transformed(
            row, stream, tokens, first, local, exists,
            FORM, CHANNELS, GROUP, RANK, WORDS * LANES, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
        total += means_of(row, stream, FORM, CHANNELS, WORDS * LANES, LANES)[None, :]
        number = transformed_parts(total, 0, WORDS // WORDS_PER_PART, WORDS, LANES, BLOCK_TOKENS)
    else:
        number = simple(
            codes, scales, zeros, super_scale, four, first, local, exists, tokens,
            FORM, CHANNELS, GROUP, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    if WORDS * LANES > CHANNELS:
        number = tl.where((tl.arange(0, WORDS * LANES) < CHANNELS)[None, :], number, 0.0)
    return number
