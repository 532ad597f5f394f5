"""Reading transform codes on a GPU: numbers of a tile of tokens times the matrix of a stream, by matrix units.

A *number* is what a row of the matrix is multiplied by: a coordinate of a rotation, or a *digit* of a transform code less 3/2.
Whatever bits a direction has, a byte of codes is four digits to base 4: a code of 8 bits is four of them, with rows of the
matrix that are 1, 4, 16 and 64 times that of its direction, so ``code - (4**n - 1) / 2`` is what ``n`` digits come to. Numbers and
matrix are BF16, exactly what :mod:`quantwm_core.transform` multiplies, and the sum is FP32. Columns of the product stand
as :func:`quantwm_kernels.triton.rows.channel_of` says. Where codes lie is drawn in :mod:`quantwm_core.blocks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_core import allocation
from quantwm_kernels import recipe
from quantwm_kernels.recipe import WORDS_PER_STREAM, Field, Form, Place
from quantwm_kernels.triton.arithmetic import product
from quantwm_kernels.triton.clustered import bytes_at, halves_at, wide
from quantwm_kernels.triton.compensation import HIGH_HALF
from quantwm_kernels.triton.domain import MATRIX_DTYPE, to_bf16
from quantwm_kernels.triton.packing import CODE_BITS, CODES_PER_BYTE
from quantwm_kernels.triton.rows import WORDS_PER_PART, reordered

TRANSFORM: tl.constexpr = tl.constexpr(int(Form.TRANSFORM))
CODES: tl.constexpr = tl.constexpr(int(Field.CODES))
STEPS: tl.constexpr = tl.constexpr(int(Field.STEPS))
MEANS: tl.constexpr = tl.constexpr(int(Field.MEANS))
SCALES: tl.constexpr = tl.constexpr(int(Field.SCALES))
MINIMA: tl.constexpr = tl.constexpr(int(Field.ZERO_POINTS))
SHARED_BASIS: tl.constexpr = tl.constexpr(int(Field.SHARED_BASIS))
SHARED_BASIS_SCALES: tl.constexpr = tl.constexpr(int(Field.SHARED_BASIS_SCALES))
ORDER: tl.constexpr = tl.constexpr(int(Field.ORDER))
PLACES: tl.constexpr = tl.constexpr(int(Field.STAGES))
STREAM_WORDS: tl.constexpr = tl.constexpr(WORDS_PER_STREAM)
CODE_BYTE: tl.constexpr = tl.constexpr(int(Place.CODE_BYTE))
DIRECTION: tl.constexpr = tl.constexpr(int(Place.DIRECTION))
BASIS_ROW: tl.constexpr = tl.constexpr(int(Place.BASIS_ROW))
BASIS_ROWS: tl.constexpr = tl.constexpr(int(Place.BASIS_ROWS))
EIGHT: tl.constexpr = tl.constexpr(int(Place.EIGHT))
FOUR: tl.constexpr = tl.constexpr(int(Place.FOUR))
TWO: tl.constexpr = tl.constexpr(int(Place.TWO))
BLOCK: tl.constexpr = tl.constexpr(allocation.BLOCK)
FEWEST_DIGITS: tl.constexpr = tl.constexpr(recipe.FEWEST_DIGITS)
DIGITS_PER_WORD: tl.constexpr = tl.constexpr(16)
# BF16 numbers from 4 to 8 whose bits 5 and 6 are a digit are 4 more than that; two of them.
DIGIT_BITS: tl.constexpr = tl.constexpr(0x00600060)
# 2**23: a number that is as large and has the bits of an integer as its last is the larger by that.
LARGE_INTEGER: tl.constexpr = tl.constexpr(0x4B000000)
LARGE: tl.constexpr = tl.constexpr(2.0**23)
# Rows of a matrix that is too large to be kept are made again for each tile, as many at a time.
PART: tl.constexpr = tl.constexpr(64)
# No matrix unit multiplies fewer.
FEWEST_ROWS: tl.constexpr = tl.constexpr(16)


@triton.jit
def place(row, stream, WORD: tl.constexpr):
    """A word of those that say where a stream's parts lie."""
    return tl.load(row + PLACES + stream * STREAM_WORDS + WORD)


@triton.jit
def directions_at(row, stream, WORD: tl.constexpr):
    """Directions of as many blocks as a word says."""
    return place(row, stream, WORD).to(tl.int32) * BLOCK


@triton.jit
def digit_of(column, COUNT: tl.constexpr):
    """Position of a column of numbers among as many digits of a token.

    Thread ``q`` of four has columns ``2q`` and ``2q + 1`` of every eight of a matrix operand. So that nothing is exchanged, it
    has a quarter of the bytes, in words of 16 digits: column ``64w + 8s + 2q + e`` is digit ``s + 8e`` of its word ``w``.
    """
    word = column // 2 % 4 * (COUNT // FEWEST_DIGITS) + column // FEWEST_DIGITS
    return word * DIGITS_PER_WORD + column // 8 % 8 + column % 2 * 8


@triton.jit
def transform_rows(row, stream, digit):
    """Which digits belong to a code, what their direction's row of the basis is multiplied by, and where it is."""
    eight, four, two = (
        directions_at(row, stream, EIGHT),
        directions_at(row, stream, FOUR),
        directions_at(row, stream, TWO),
    )
    byte, part = digit // CODES_PER_BYTE, digit % CODES_PER_BYTE
    behind_eight = byte - eight
    behind = behind_eight - four // 2
    is_eight, is_four = behind_eight < 0, behind < 0
    direction = tl.where(is_four, eight + 2 * behind_eight + part // 2, eight + four + 4 * behind + part)
    direction = tl.where(is_eight, byte, direction)
    power = tl.where(is_eight, part, tl.where(is_four, part % 2, 0))
    known = direction < eight + four + two
    begin = place(row, stream, DIRECTION)
    order = bytes_at(tl.load(row + ORDER), begin)
    own = tl.load(order + direction, mask=known, other=0).to(tl.int64)
    own = place(row, stream, BASIS_ROW) + tl.minimum(own, place(row, stream, BASIS_ROWS) - 1)
    step = wide(tl.load(halves_at(tl.load(row + STEPS), begin) + direction, mask=known, other=0))
    scale = wide(tl.load(halves_at(tl.load(row + SHARED_BASIS_SCALES), 0) + own, mask=known, other=0))
    return known, step * scale * (1 << 2 * power).to(tl.float32), own


@triton.jit
def rotation_rows(row, stream, direction, CHANNELS: tl.constexpr):
    """Likewise of a rotation."""
    known = direction < CHANNELS
    begin = stream * CHANNELS
    scale = wide(tl.load(halves_at(tl.load(row + SHARED_BASIS_SCALES), begin) + direction, mask=known, other=0))
    return known, scale, begin + direction


@triton.jit
def matrix_rows(
    row, stream, begin, FIRST: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[COUNT, WIDE]`` of the directions or digits from ``begin``, zero beyond the last; channels from ``FIRST``."""
    column = tl.arange(0, COUNT)
    if FORM == TRANSFORM:
        known, factor, own = transform_rows(row, stream, begin + digit_of(column, COUNT))
    else:
        known, factor, own = rotation_rows(row, stream, begin + column, CHANNELS)
    channel = tl.arange(0, WIDE) + FIRST
    addresses = bytes_at(tl.load(row + SHARED_BASIS), 0) + (own[:, None] * CHANNELS + channel[None, :])
    if ALIGNED:
        # Rows begin where their length allows, all of them where the longest load may.
        addresses = tl.multiple_of(addresses, (1, 8 if CHANNELS % 16 else 16))
    entry = tl.load(addresses, mask=known[:, None] & (channel < CHANNELS)[None, :], other=0).to(tl.int32)
    signed = ((entry ^ 128) | LARGE_INTEGER).to(tl.float32, bitcast=True) - (LARGE + 128.0)
    return to_bf16(factor[:, None] * signed).to(MATRIX_DTYPE)


@triton.jit
def in_columns(matrix, COUNT: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr):
    """Channels of a matrix put in the order of :func:`quantwm_kernels.triton.rows.channel_of`."""
    words = tl.reshape(matrix, (COUNT, WIDE // (WORDS_PER_PART * LANES), WORDS_PER_PART, LANES // 2, 2))
    return tl.reshape(tl.permute(words, (0, 1, 3, 2, 4)), (COUNT, WIDE))


@triton.jit
def codes_of(row, stream):
    """Address of a stream's codes, and the bytes of a token."""
    four, two = directions_at(row, stream, FOUR), directions_at(row, stream, TWO)
    size = directions_at(row, stream, EIGHT) + four // 2 + two // 4
    return tl.load(row + CODES) + place(row, stream, CODE_BYTE), size


@triton.jit
def packed_codes(address, size, begin, first, near, GROUP: tl.constexpr, COUNT: tl.constexpr):
    """int32 ``[4, tokens, words]`` with ``COUNT`` digits of each token from ``begin``, a quarter for each of four threads.

    ``GROUP`` bytes can be read at once, at least 2.
    """
    WORDS: tl.constexpr = COUNT // FEWEST_DIGITS
    word = tl.arange(0, 4)[:, None, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    left = size - begin // CODES_PER_BYTE
    # What is read at once exists as a whole or not at all.
    inside = (word if GROUP < 4 * WORDS else tl.arange(0, 4)[:, None, None] * WORDS) * 4 < left
    start = address + (first * size + begin // CODES_PER_BYTE)
    if GROUP >= 4:
        words = start.to(tl.pointer_type(tl.int32)) + (near[None, :, None] * (size // 4) + word)
        packed = tl.load(tl.multiple_of(words, (1, 1, min(GROUP, 4 * WORDS))), mask=inside, other=0)
    else:
        halves = halves_at(start, 0) + (near[None, :, None] * (size // 2) + 2 * word)
        low = tl.load(halves, mask=inside, other=0).to(tl.int32)
        packed = low | tl.load(halves + 1, mask=inside & (4 * word + 2 < left), other=0).to(tl.int32) << 16
    return packed


@triton.jit
def numbers_of(packed, four, COUNT: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Matrix operand ``[tokens, COUNT]`` of what :func:`packed_codes` asked for in the order of :func:`stored_rows`.

    A number is a digit less 1.5. A BF16 number between 4 and 8 whose last bits but five are a digit is 4 more than that.
    """
    WORDS: tl.constexpr = COUNT // FEWEST_DIGITS
    shift = 5 - 2 * tl.arange(0, 8)
    word = packed[:, :, :, None]
    moved = tl.where(shift > 0, word << tl.maximum(shift, 0), word >> tl.maximum(-shift, 0))
    pairs = (moved & DIGIT_BITS) | (four | four >> 16)
    low, high = (
        pairs.to(tl.int16).to(tl.bfloat16, bitcast=True),
        (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
    )
    number = tl.join(low, high).to(MATRIX_DTYPE) - 5.5
    number = tl.reshape(number, (4, 2, BLOCK_TOKENS // 16, 8, WORDS, 8, 2))
    return tl.reshape(tl.permute(number, (2, 1, 3, 4, 5, 0, 6)), (BLOCK_TOKENS, COUNT))


@triton.jit
def coordinates(
    row, stream, tokens, first, near, direction, CHANNELS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Matrix operand ``[tokens, directions]``: ``minimum + code * s'`` in BF16."""
    groups: tl.constexpr = (CHANNELS + GROUP - 1) // GROUP
    size: tl.constexpr = (CHANNELS + CODES_PER_BYTE - 1) // CODES_PER_BYTE
    inside = (direction < CHANNELS)[None, :]
    codes = bytes_at(tl.load(row + CODES), (stream * tokens + first) * size)
    packed = tl.load(codes + (near[:, None] * size + (direction // CODES_PER_BYTE)[None, :]), mask=inside, other=0)
    code = (packed.to(tl.int32) >> (direction % CODES_PER_BYTE * CODE_BITS)[None, :]) & 3
    begin = (stream * tokens + first) * groups
    offset = near[:, None] * groups + (direction // GROUP)[None, :]
    step = wide(tl.load(halves_at(tl.load(row + SCALES), begin) + offset, mask=inside, other=0))
    low = wide(tl.load(halves_at(tl.load(row + MINIMA), begin) + offset, mask=inside, other=0))
    return to_bf16(low + code.to(tl.float32) * step).to(MATRIX_DTYPE)


@triton.jit
def transformed(
    row, stream, tokens, first, near, four, FIRST: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr,
    GROUP: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """FP32 ``[tokens, WIDE]``, channels from ``FIRST``: numbers times matrix, which is made in parts; no mean is added."""
    address, size, stored = first, 0, near
    if FORM == TRANSFORM:
        address, size = codes_of(row, stream)
        stored = reordered(near, BLOCK_TOKENS)
    total = tl.zeros((BLOCK_TOKENS, WIDE), tl.float32)
    COUNT: tl.constexpr = min(RANK, PART)
    for begin in range(0, RANK, COUNT):
        if FORM == TRANSFORM:
            packed = packed_codes(address, size, begin, first, stored, GROUP, COUNT)
            number = numbers_of(packed, four, COUNT, BLOCK_TOKENS)
        else:
            direction = begin + tl.arange(0, COUNT)
            number = coordinates(row, stream, tokens, first, near, direction, CHANNELS, GROUP)
        matrix = matrix_rows(row, stream, begin, FIRST, FORM, CHANNELS, COUNT, WIDE, ALIGNED)
        total = product(number, in_columns(matrix, COUNT, WIDE, LANES), total)
    return total


@triton.jit
def means_of(row, stream, channel, CHANNELS: tl.constexpr):
    """FP32: what is added to channels of all tokens of a transform code.

    That is the mean, less half a step of every direction of 8 bits: the numbers of its four digits come to as much too much.
    """
    means = halves_at(tl.load(row + MEANS), stream * CHANNELS)
    mean = wide(tl.load(means + channel, mask=channel < CHANNELS, other=0))
    begin = place(row, stream, DIRECTION)
    order = bytes_at(tl.load(row + ORDER), begin)
    steps = halves_at(tl.load(row + STEPS), begin)
    scales = halves_at(tl.load(row + SHARED_BASIS_SCALES), 0)
    basis = bytes_at(tl.load(row + SHARED_BASIS), 0)
    for first in range(0, directions_at(row, stream, EIGHT), BLOCK):
        direction = first + tl.arange(0, BLOCK)
        own = tl.minimum(tl.load(order + direction).to(tl.int64), place(row, stream, BASIS_ROWS) - 1)
        own += place(row, stream, BASIS_ROW)
        factor = wide(tl.load(steps + direction)) * wide(tl.load(scales + own))
        inside = (channel < CHANNELS)[None, :]
        entry = tl.load(basis + (own[:, None] * CHANNELS + channel[None, :]), mask=inside, other=0)
        step = to_bf16(factor[:, None] * entry.to(tl.int8, bitcast=True).to(tl.float32)).to(tl.float32)
        mean -= 0.5 * tl.sum(step, axis=0)
    return mean


@triton.jit
def three_rows(number):
    """Matrix operand ``[FEWEST_ROWS, WIDE]`` whose columns sum up to FP32 numbers ``[WIDE]``: three BF16 hold each exactly."""
    high = (number.to(tl.int32, bitcast=True) & HIGH_HALF).to(tl.float32, bitcast=True)
    middle = ((number - high).to(tl.int32, bitcast=True) & HIGH_HALF).to(tl.float32, bitcast=True)
    low = number - high - middle
    row = tl.arange(0, FEWEST_ROWS)[:, None]
    rows = tl.where(row == 0, high[None, :], tl.where(row == 1, middle[None, :], tl.where(row == 2, low[None, :], 0.0)))
    return rows.to(MATRIX_DTYPE)


@triton.jit
def rotated_queries(
    row, stream, asked, CHANNELS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[ROWS, RANK]`` of queries in the basis of a stream, and FP32 ``[ROWS]``: what its mean adds to logits."""
    matrix = matrix_rows(row, stream, 0, 0, TRANSFORM, CHANNELS, RANK, WIDE, ALIGNED)
    rotated = product(asked, tl.trans(matrix), tl.zeros((ROWS, RANK), tl.float32))
    mean = means_of(row, stream, tl.arange(0, WIDE), CHANNELS)
    return to_bf16(rotated).to(MATRIX_DTYPE), tl.sum(asked.to(tl.float32) * mean[None, :], axis=1)
