"""Reconstructing a tile of tokens whose channels share scales in groups: residual, centroids, compensation.

A tile is read in two steps, so that what lies far away can be asked for a tile ahead: :func:`asked` loads what is packed,
:func:`summed` makes numbers of it. Rows of a tile stand as :func:`stored_rows` says, channels in *parts* of four words:
``[tokens, parts, 4, lanes]``. Thread ``q`` of four has word ``q`` of each part. A matrix unit wants both in another order, and
going there and back moves nothing: :func:`in_matrix_order`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.recipe import Form
from quantwm_kernels.triton.clustered import (
    EXACT_BITS,
    centroid,
    centroid_rows,
    four_plus,
    group_steps,
    integer_centroid,
    stage_at,
)
from quantwm_kernels.triton.compensation import NIBBLES, quick_steps
from quantwm_kernels.triton.packing import CODES_PER_BYTE
from quantwm_kernels.triton.rows import WORDS_PER_PART
from quantwm_kernels.triton.scales import e4m3_number, step_of

SYMMETRIC: tl.constexpr = tl.constexpr(int(Form.SYMMETRIC))
# Of a position, those that say which of a byte's codes; a shift is one instruction where a division by four is several.
POSITION_BITS: tl.constexpr = tl.constexpr(2)


@triton.jit
def code_words(
    codes, first, near, FIRST: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr
):
    """Packed codes ``[tokens, parts, 4]``, a word each; zero beyond the channels."""
    width: tl.constexpr = CHANNELS // LANES
    place = (tl.arange(0, PARTS) * WORDS_PER_PART)[None, :, None] + FIRST // LANES
    place += tl.arange(0, WORDS_PER_PART)[None, None, :]
    addresses = codes + first * width + (near[:, None, None] * width + place)
    if FIRST + PARTS * WORDS_PER_PART * LANES > CHANNELS:
        packed = tl.load(addresses, mask=place < width, other=0)
    else:
        packed = tl.load(addresses)
    return packed


@triton.jit
def scale_words(scales, zeros, skew, first, near, GROUPS: tl.constexpr, FORM: tl.constexpr):
    """int32 ``[tokens]`` each: the scales of a token, and the byte that has its zero-points."""
    if GROUPS == 1:
        words = scales + first
    elif GROUPS == 2:
        words = scales.to(tl.pointer_type(tl.uint16)) + first
    else:
        words = scales.to(tl.pointer_type(tl.uint32)) + first
    scale = tl.load(words + near).to(tl.int32)
    zero = scale
    if FORM != SYMMETRIC:
        position = near * GROUPS + (first * GROUPS + skew)
        zero = tl.load(zeros + (position >> POSITION_BITS)).to(tl.int32)
    return scale, zero


@triton.jit
def word_steps(
    scale, zero, super_scale, four, skew, first, near, FIRST: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """FP32 ``s'`` and ``4 + z`` ``[tokens, parts]`` of what :func:`scale_words` found."""
    group = (tl.arange(0, PARTS) * (WORDS_PER_PART * LANES) + FIRST) // GROUP
    byte = (scale[:, None] >> (8 * group)[None, :]) & 255
    if FORM == SYMMETRIC:
        step, low = e4m3_number(byte), tl.full(byte.shape, 5.0, tl.float32)  # the stored code is level + 1
    else:
        position = (near * GROUPS + (first * GROUPS + skew)).to(tl.int32) & (CODES_PER_BYTE - 1)
        step = step_of(byte, super_scale)
        low = four_plus(zero[:, None], position[:, None] + group[None, :], four)
    return step, low


@triton.jit
def moved(
    codes, scales, zeros, index, dense, begin, CHANNELS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr,
    SPARSE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Pointers that :func:`opened` found, moved to token ``begin``, and how many of a byte's zero-points belong to those before.

    Tokens can be counted from there in 32 bits.
    """
    GROUPS: tl.constexpr = CHANNELS // GROUP
    steps: tl.constexpr = (RANK + 1) // 2 if SPARSE == NIBBLES else RANK
    codes += begin * (CHANNELS // LANES)
    scales += begin * GROUPS
    zeros += begin * GROUPS // CODES_PER_BYTE
    skew = (begin * GROUPS % CODES_PER_BYTE).to(tl.int32)
    return codes, scales, zeros, skew, index + begin, dense + begin * steps


@triton.jit
def asked(
    codes, scales, zeros, skew, index, last_row, dense, present, first, near, FIRST: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """What a tile of tokens has packed: codes, scales, zero-points, rows of the centroids, steps; pointers are those of :func:`opened`.

    ``near`` are tokens behind ``first`` that exist, ``skew`` zero-points before the first in its byte. What is found later is ``near`` here.
    """
    GROUPS: tl.constexpr = CHANNELS // GROUP
    width: tl.constexpr = WORDS_PER_PART * LANES
    TOGETHER: tl.constexpr = ALIGNED and (width * (GROUP // width) == GROUP) and (GROUPS * (4 // GROUPS) == 4)
    packed = code_words(codes, first, near, FIRST, CHANNELS, PARTS, LANES)
    scale, zero, chosen, steps = near, near, near, near
    if TOGETHER:
        scale, zero = scale_words(scales, zeros, skew, first, near, GROUPS, FORM)
    if STAGES:
        chosen = centroid_rows(index, last_row, first, near)
    if RANK:
        steps = quick_steps(dense, present, first, near, RANK, SPARSE, ALIGNED)
    return packed, scale, zero, chosen, steps


@triton.jit
def summed(
    packed, scale, zero, chosen, row, stream, tokens, origin, scales, zeros, skew, super_scale, table, four, first, near,
    FIRST: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    TABLE_BITS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """FP32 ``[tokens, parts, 4, lanes]`` of what was asked: residual and centroids, summed in the reference's order."""
    GROUPS: tl.constexpr = CHANNELS // GROUP
    width: tl.constexpr = WORDS_PER_PART * LANES
    TOGETHER: tl.constexpr = ALIGNED and (width * (GROUP // width) == GROUP) and (GROUPS * (4 // GROUPS) == 4)
    total = four_plus(packed[:, :, :, None].to(tl.int32), tl.arange(0, LANES)[None, None, None, :], four)
    if TOGETHER:
        step, low = word_steps(
            scale, zero, super_scale, four, skew, first, near, FIRST, FORM, GROUP, GROUPS, PARTS, LANES
        )
        total = (total - low[:, :, None, None]) * step[:, :, None, None]
    else:
        word = (tl.arange(0, PARTS) * WORDS_PER_PART)[None, :, None] + tl.arange(0, WORDS_PER_PART)[None, None, :]
        group = (word * LANES + FIRST) // GROUP
        step, low = group_steps(scales, zeros, skew, super_scale, four, first, near, group, GROUPS, FORM == SYMMETRIC)
        total = (total - low[:, :, :, None]) * step[:, :, :, None]
    for later in tl.static_range(STAGES - 1):
        i, t, n = stage_at(row, stream, tokens, STAGES - 1 - later, CHANNELS, TABLE_BITS)
        total += centroid(
            t, centroid_rows(i, n, origin + first, near), FIRST, CHANNELS, LANES, ALIGNED, BLOCK_TOKENS, PARTS
        )
    if STAGES and TABLE_BITS == EXACT_BITS:
        total += centroid(table, chosen, FIRST, CHANNELS, LANES, ALIGNED, BLOCK_TOKENS, PARTS)
    elif STAGES:
        total += integer_centroid(
            row, stream, table, chosen, four, FIRST, TABLE_BITS, CHANNELS, LANES, ALIGNED, BLOCK_TOKENS, PARTS
        )
    return total
