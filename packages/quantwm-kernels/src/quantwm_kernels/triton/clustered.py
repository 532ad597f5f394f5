"""Reading residual codes and centroids on a GPU: device functions, a tile of tokens x words x lanes at a time.

A *word* is what one thread decodes at once: ``LANES`` consecutive channels, 4 (one byte of codes) or 8 (two bytes);
``word`` holds the numbers of a tile's words. Pointers lead to the begin of one stream; formulas stand in
:mod:`quantwm_core.clustered`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_core import integer_table
from quantwm_kernels.recipe import WORDS_PER_STAGE, Field
from quantwm_kernels.triton.domain import MATRIX_DTYPE
from quantwm_kernels.triton.packing import CODE_BITS, CODES_PER_BYTE
from quantwm_kernels.triton.scales import e4m3_number, step_of

CODES: tl.constexpr = tl.constexpr(int(Field.CODES))
SCALES: tl.constexpr = tl.constexpr(int(Field.SCALES))
ZERO_POINTS: tl.constexpr = tl.constexpr(int(Field.ZERO_POINTS))
SUPER_SCALE: tl.constexpr = tl.constexpr(int(Field.SUPER_SCALE))
STAGE_FIELDS: tl.constexpr = tl.constexpr(int(Field.STAGES))
STAGE_WORDS: tl.constexpr = tl.constexpr(WORDS_PER_STAGE)
# Word of a stage that leads to the scales of its table.
TABLE_SCALES: tl.constexpr = tl.constexpr(3)
EXACT_BITS: tl.constexpr = tl.constexpr(integer_table.EXACT_BITS)
# In FP32 between 4 and 8 the two highest bits of the mantissa count ones: a code that is moved there needs no conversion.
# The bits of 4 come as an argument: two constants in one expression would cost an instruction more for each code.
FOUR_BITS = 0x40800000
COUNTING_MASK: tl.constexpr = tl.constexpr(3 << 21)
COUNTING_SHIFT: tl.constexpr = tl.constexpr(21)
NIBBLE_PAIR: tl.constexpr = tl.constexpr(0x000F000F)
# Two BF16 numbers 136 = 128 + 8, which turns a nibble's sign, less two of 4.
LARGE_PAIR: tl.constexpr = tl.constexpr(0x43084308 - 0x40804080)


@triton.jit
def bytes_at(address, offset):
    """uint8 pointer to a byte behind an address."""
    return address.to(tl.pointer_type(tl.uint8)) + offset


@triton.jit
def halves_at(address, offset):
    """uint16 pointer to a number of two bytes behind an address."""
    return address.to(tl.pointer_type(tl.uint16)) + offset


@triton.jit
def wide(bits):
    """FP32 numbers of BF16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def halves(pairs, TOKENS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr):
    """FP32 numbers ``[tokens, parts, 4, lanes]`` of two BF16 in each int32 ``[tokens, parts, 4, lanes / 2]``."""
    low, high = pairs << 16, pairs & -65536
    return tl.reshape(tl.join(low, high).to(tl.float32, bitcast=True), (TOKENS, PARTS, 4, LANES))


@triton.jit
def four_plus(packed, position, four):
    """FP32 ``4 + code`` of the code at ``position`` of an int32 that holds packed codes in order."""
    moved = (packed << (position * -CODE_BITS + COUNTING_SHIFT)) & COUNTING_MASK
    return (moved | four).to(tl.float32, bitcast=True)


@triton.jit
def codes_at(row, stream, tokens, CHANNELS: tl.constexpr, LANES: tl.constexpr):
    """Pointer to a stream's packed codes, a word at a time."""
    begin = stream * tokens * ((CHANNELS + LANES - 1) // LANES)
    address = tl.load(row + CODES)
    return bytes_at(address, begin) if LANES == CODES_PER_BYTE else halves_at(address, begin)


@triton.jit
def four_plus_codes(codes, four, first, local, word, inside, CHANNELS: tl.constexpr, LANES: tl.constexpr):
    """FP32 ``4 + code`` ``[tokens, words, lanes]``."""
    width: tl.constexpr = (CHANNELS + LANES - 1) // LANES
    offset = local[:, None, None] * width + word[None, :, None]
    packed = tl.load(codes + first * width + offset, mask=inside).to(tl.int32)
    return four_plus(packed, tl.arange(0, LANES)[None, None, :], four)


@triton.jit
def scales_at(
    row, stream, tokens, CHANNELS: tl.constexpr, GROUP: tl.constexpr, BY_CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr
):
    """Pointers to a stream's scales and zero-points, and its super-scale; what is symmetric has neither of these."""
    count = (tokens + GROUP - 1) // GROUP * CHANNELS if BY_CHANNEL else tokens * (CHANNELS // GROUP)
    scales = bytes_at(tl.load(row + SCALES), stream * count)
    zero_points, super_scale = scales, 1.0
    if not SYMMETRIC:
        zero_points = bytes_at(tl.load(row + ZERO_POINTS), stream * ((count + CODES_PER_BYTE - 1) // CODES_PER_BYTE))
        super_scale = tl.load(tl.load(row + SUPER_SCALE).to(tl.pointer_type(tl.float32)) + stream)
    return scales, zero_points, super_scale


@triton.jit
def four_plus_zero_points(zero_points, four, begin, offset, inside):
    """FP32 ``4 + z`` of the zero-points at positions ``begin + offset``."""
    position = (begin % CODES_PER_BYTE).to(tl.int32) + offset
    byte = tl.load(zero_points + begin // CODES_PER_BYTE + position // CODES_PER_BYTE, mask=inside)
    return four_plus(byte.to(tl.int32), (position % CODES_PER_BYTE).to(tl.int32), four)


@triton.jit
def group_steps(
    scales, zero_points, skew, super_scale, four, first, near, group, GROUPS: tl.constexpr, SYMMETRIC: tl.constexpr
):  # fmt: skip
    """FP32 ``s'`` and ``4 + z`` of groups of channels, for ``near`` tokens and ``group`` ``[1, ., .]``."""
    begin = first * GROUPS
    offset = near[:, None, None] * GROUPS + group
    inside = (group < GROUPS) & (offset >= 0)
    scale = tl.load(scales + begin + offset, mask=inside, other=0)
    if SYMMETRIC:
        step = e4m3_number(scale)
        zero = tl.full(step.shape, 5.0, tl.float32)  # the stored code is level + 1
    else:
        step = step_of(scale, super_scale)
        zero = four_plus_zero_points(zero_points, four, begin + skew, offset, inside)
    return step, zero


@triton.jit
def channel_residual(
    codes, scales, zero_points, super_scale, four, first, local, word, inside,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """FP32 ``(code - z) * s'`` where ``GROUP`` consecutive tokens of a channel share a scale."""
    channel = word[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    exists = inside & (channel < CHANNELS)
    offset = ((first + local) // GROUP)[:, None, None] * CHANNELS + channel
    step = step_of(tl.load(scales + offset, mask=exists), super_scale)
    zero = four_plus_zero_points(zero_points, four, tl.zeros((), tl.int64), offset, exists)
    return (four_plus_codes(codes, four, first, local, word, inside, CHANNELS, LANES) - zero) * step


@triton.jit
def stage_at(row, stream, tokens, STAGE: tl.constexpr, CHANNELS: tl.constexpr, TABLE_BITS: tl.constexpr):
    """Pointers to a stream's index and centroids of a stage, and the last row of the latter."""
    field = row + STAGE_FIELDS + STAGE * STAGE_WORDS
    rows = tl.load(field + 2)
    index = bytes_at(tl.load(field), stream * tokens)
    address = tl.load(field + 1)
    if TABLE_BITS == EXACT_BITS:
        table = halves_at(address, stream * rows * CHANNELS)
    else:
        table = bytes_at(address, stream * rows * (CHANNELS * TABLE_BITS // 8))
    return index, table, (rows - 1).to(tl.int32)


@triton.jit
def centroid_rows(index, last_row, first, near):
    """int32 row of each token's centroid; an index beyond the table gives its last row."""
    return tl.minimum(tl.load(index + first + near).to(tl.int32), last_row)


@triton.jit
def centroid(
    table, chosen, FIRST: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """FP32 centroids ``[tokens, parts, 4, lanes]`` of the rows ``chosen``, from channel ``FIRST``."""
    part = tl.arange(0, PARTS)[None, :, None] * (4 * LANES) + FIRST
    if ALIGNED:
        pair = part // 2 + tl.arange(0, 2 * LANES)[None, None, :]
        both = table.to(tl.pointer_type(tl.int32)) + (chosen[:, None, None] * (CHANNELS // 2) + pair)
        both = tl.multiple_of(both, (1, 1, 2 * LANES))
        loaded = tl.load(both, mask=pair < CHANNELS // 2) if FIRST + PARTS * 4 * LANES > CHANNELS else tl.load(both)
        number = halves(tl.reshape(loaded, (TOKENS, PARTS, 4, LANES // 2)), TOKENS, PARTS, LANES)
    else:
        channel = part + tl.arange(0, 4 * LANES)[None, None, :]
        loaded = tl.load(table + (chosen[:, None, None] * CHANNELS + channel), mask=channel < CHANNELS, other=0)
        number = tl.reshape(wide(loaded), (TOKENS, PARTS, 4, LANES))
    return number


@triton.jit
def nibbles(words, four, TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """Small integers ``[tokens, parts, 4, 8]`` of words of eight nibbles each, exact.

    A BF16 number between 128 and 256 whose last four bits are a nibble is as much larger than 128; two are made at once.
    """
    pairs = (words[:, :, :, None] >> (tl.arange(0, 4) * 4)[None, None, None, :]) & NIBBLE_PAIR
    pairs ^= (four | four >> 16) + LARGE_PAIR
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    number = tl.permute(tl.join(low, high).to(MATRIX_DTYPE) - 136.0, (0, 1, 2, 4, 3))
    return tl.reshape(number, (TOKENS, PARTS, 4, 8))


@triton.jit
def integer_centroid(
    row, stream, table, chosen, four, FIRST: tl.constexpr, TABLE_BITS: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The same of a table of small integers, which has a scale per channel; the product is exact, as BF16 too."""
    channel = tl.arange(0, PARTS)[None, :, None] * (4 * LANES) + tl.arange(0, 4 * LANES)[None, None, :] + FIRST
    inside = channel < CHANNELS
    # Of every second token, so that each thread has those of its words, once.
    scales = halves_at(tl.load(row + STAGE_FIELDS + TABLE_SCALES), stream * CHANNELS)
    addresses = scales + (channel + tl.arange(0, TOKENS // 2)[:, None, None] * 0)
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 1, 2 * LANES))
    scale = tl.load(addresses, mask=inside, other=0)[None, :, :, :]
    scale = tl.reshape(tl.broadcast_to(scale, (2, TOKENS // 2, PARTS, 4 * LANES)), (TOKENS, PARTS, 4, LANES))
    if TABLE_BITS == 4 and LANES == 8:
        word = (tl.arange(0, PARTS) * 4)[None, :, None] + tl.arange(0, 4)[None, None, :] + FIRST // 8
        words = table.to(tl.pointer_type(tl.int32)) + (chosen[:, None, None] * (CHANNELS // 8) + word)
        code = nibbles(tl.load(words, mask=word < CHANNELS // 8, other=0), four, TOKENS, PARTS)
        number = (code * scale.to(tl.bfloat16, bitcast=True).to(MATRIX_DTYPE)).to(tl.float32)
    else:
        if TABLE_BITS == 4:
            byte = tl.load(table + (chosen[:, None, None] * (CHANNELS // 2) + channel // 2), mask=inside, other=0)
            code = (byte.to(tl.int32) << (28 - channel % 2 * 4)) >> 28
        else:
            code = tl.load(table + (chosen[:, None, None] * CHANNELS + channel), mask=inside, other=0)
            code = code.to(tl.int8, bitcast=True)
        number = tl.reshape(code.to(tl.float32), (TOKENS, PARTS, 4, LANES)) * wide(scale)
    return number
