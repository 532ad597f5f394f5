"""Reading transform codes on a GPU: numbers of a tile of tokens times the matrix of a stream, by matrix units.

A *number* is what a direction of a token is multiplied by: the level of a code, or a coordinate of a rotation. Both and
the matrix are BF16 exactly as :mod:`quantwm_core.transform` rounds them, and the sum is FP32. Columns of the product
stand as :func:`quantwm_kernels.triton.compensation.channel_of` says. Where codes lie is drawn in :mod:`quantwm_core.blocks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_core import allocation
from quantwm_kernels.recipe import WORDS_PER_STREAM, Field, Form, Place
from quantwm_kernels.triton.arithmetic import product
from quantwm_kernels.triton.clustered import bytes_at, halves_at, wide
from quantwm_kernels.triton.compensation import WORDS_PER_PART, channel_of, part_of
from quantwm_kernels.triton.domain import MATRIX_DTYPE, to_bf16
from quantwm_kernels.triton.packing import CODE_BITS, CODES_PER_BYTE

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
# Elements of a matrix that is kept for all tiles; a larger one is made again for each, in parts of as many directions.
MOST_KEPT: tl.constexpr = tl.constexpr(128 * 128)
PART: tl.constexpr = tl.constexpr(32)


@triton.jit
def place(row, stream, WORD: tl.constexpr):
    """A word of those that say where a stream's parts lie."""
    return tl.load(row + PLACES + stream * STREAM_WORDS + WORD)


@triton.jit
def directions_at(row, stream, WORD: tl.constexpr):
    """Directions of as many blocks as a word says."""
    return place(row, stream, WORD).to(tl.int32) * BLOCK


@triton.jit
def transform_rows(row, stream, direction, channel, CHANNELS: tl.constexpr):
    """BF16 ``[directions, channels]``: rows of the directions that get bits, times their steps."""
    known = direction < directions_at(row, stream, EIGHT) + directions_at(row, stream, FOUR) + directions_at(
        row, stream, TWO
    )
    begin = place(row, stream, DIRECTION)
    order = bytes_at(tl.load(row + ORDER), begin)
    own = tl.load(order + direction, mask=known, other=0).to(tl.int64)
    own = place(row, stream, BASIS_ROW) + tl.minimum(own, place(row, stream, BASIS_ROWS) - 1)
    step = wide(tl.load(halves_at(tl.load(row + STEPS), begin) + direction, mask=known, other=0))
    scale = wide(tl.load(halves_at(tl.load(row + SHARED_BASIS_SCALES), 0) + own, mask=known, other=0))
    basis = tl.load(row + SHARED_BASIS).to(tl.pointer_type(tl.int8))
    exists = known[:, None] & (channel < CHANNELS)[None, :]
    entry = tl.load(basis + own[:, None] * CHANNELS + channel[None, :], mask=exists, other=0)
    return to_bf16((step * scale)[:, None] * entry.to(tl.float32)).to(MATRIX_DTYPE)


@triton.jit
def rotation_rows(row, stream, direction, channel, CHANNELS: tl.constexpr):
    """BF16 ``[directions, channels]`` of a rotation."""
    known = direction < CHANNELS
    begin = stream * CHANNELS
    scale = wide(tl.load(halves_at(tl.load(row + SHARED_BASIS_SCALES), begin) + direction, mask=known, other=0))
    basis = tl.load(row + SHARED_BASIS).to(tl.pointer_type(tl.int8)) + begin * CHANNELS
    exists = known[:, None] & (channel < CHANNELS)[None, :]
    entry = tl.load(basis + direction[:, None] * CHANNELS + channel[None, :], mask=exists, other=0)
    return to_bf16(scale[:, None] * entry.to(tl.float32)).to(MATRIX_DTYPE)


@triton.jit
def matrix_rows(
    row, stream, begin, FORM: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[COUNT, WIDE]`` of the directions from ``begin``, zero beyond the last."""
    direction = begin + tl.arange(0, COUNT)
    channel = channel_of(tl.arange(0, WIDE), LANES)
    if FORM == TRANSFORM:
        matrix = transform_rows(row, stream, direction, channel, CHANNELS)
    else:
        matrix = rotation_rows(row, stream, direction, channel, CHANNELS)
    return matrix


@triton.jit
def levels(row, stream, first, local, exists, direction):
    """Matrix operand ``[tokens, directions]``: ``code - 2**(w-1) + offset``, zero for a direction without bits."""
    eight, four, two = (
        directions_at(row, stream, EIGHT),
        directions_at(row, stream, FOUR),
        directions_at(row, stream, TWO),
    )
    size = eight + four // 2 + two // 4
    in_four, in_two = direction - eight, direction - eight - four
    is_eight, is_four = in_four < 0, in_two < 0
    byte = tl.where(is_eight, direction, eight + tl.where(is_four, in_four // 2, four // 2 + in_two // 4))
    shift = tl.where(is_eight, 0, tl.where(is_four, in_four % 2 * 4, in_two % 4 * 2))
    mask = tl.where(is_eight, 255, tl.where(is_four, 15, 3))
    middle = tl.where(is_eight, 128.0, tl.where(is_four, 7.5, 1.5))
    known = direction < eight + four + two
    inside = exists[:, None] & known[None, :]
    codes = bytes_at(tl.load(row + CODES), place(row, stream, CODE_BYTE) + first * size)
    packed = tl.load(codes + (local[:, None] * size + byte[None, :]), mask=inside, other=0).to(tl.int32)
    level = ((packed >> shift[None, :]) & mask[None, :]).to(tl.float32) - middle[None, :]
    return tl.where(inside, level, 0.0).to(MATRIX_DTYPE)


@triton.jit
def coordinates(
    row, stream, tokens, first, local, exists, direction, CHANNELS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Matrix operand ``[tokens, directions]``: ``minimum + code * s'`` in BF16."""
    groups: tl.constexpr = (CHANNELS + GROUP - 1) // GROUP
    size: tl.constexpr = (CHANNELS + CODES_PER_BYTE - 1) // CODES_PER_BYTE
    inside = exists[:, None] & (direction < CHANNELS)[None, :]
    codes = bytes_at(tl.load(row + CODES), (stream * tokens + first) * size)
    packed = tl.load(codes + (local[:, None] * size + (direction // CODES_PER_BYTE)[None, :]), mask=inside, other=0)
    code = (packed.to(tl.int32) >> (direction % CODES_PER_BYTE * CODE_BITS)[None, :]) & 3
    begin = (stream * tokens + first) * groups
    offset = local[:, None] * groups + (direction // GROUP)[None, :]
    step = wide(tl.load(halves_at(tl.load(row + SCALES), begin) + offset, mask=inside, other=0))
    low = wide(tl.load(halves_at(tl.load(row + MINIMA), begin) + offset, mask=inside, other=0))
    return to_bf16(low + code.to(tl.float32) * step).to(MATRIX_DTYPE)


@triton.jit
def numbers(
    row, stream, tokens, first, local, exists, begin,
    FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[tokens, COUNT]`` of the directions from ``begin``."""
    direction = begin + tl.arange(0, COUNT)
    if FORM == TRANSFORM:
        number = levels(row, stream, first, local, exists, direction)
    else:
        number = coordinates(row, stream, tokens, first, local, exists, direction, CHANNELS, GROUP)
    return number


@triton.jit
def transformed(
    row, stream, tokens, kept, first, local, exists, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, KEEPS: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """FP32 ``[tokens, WIDE]``: numbers times matrix, without the mean; the matrix is ``kept``, or made in parts."""
    total = tl.zeros((BLOCK_TOKENS, WIDE), tl.float32)
    if KEEPS:
        number = numbers(row, stream, tokens, first, local, exists, 0, FORM, CHANNELS, GROUP, RANK)
        total = product(number, kept, total)
    else:
        COUNT: tl.constexpr = min(RANK, PART)
        for begin in range(0, RANK, COUNT):
            number = numbers(row, stream, tokens, first, local, exists, begin, FORM, CHANNELS, GROUP, COUNT)
            total = product(number, matrix_rows(row, stream, begin, FORM, CHANNELS, COUNT, WIDE, LANES), total)
    return total


@triton.jit
def transformed_part(
    row, stream, total, part: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, 4 * LANES]`` of a part of the product's channels, with the mean."""
    number = part_of(total, part, WORDS // WORDS_PER_PART, LANES, BLOCK_TOKENS)
    if FORM == TRANSFORM:
        word = tl.arange(0, WORDS_PER_PART) + part * WORDS_PER_PART
        channel = word[:, None] * LANES + tl.arange(0, LANES)[None, :]
        means = halves_at(tl.load(row + MEANS), stream * CHANNELS)
        number += wide(tl.load(means + channel, mask=channel < CHANNELS, other=0))[None, :, :]
    return tl.reshape(to_bf16(number), (BLOCK_TOKENS, WORDS_PER_PART * LANES))
