"""Reading transform codes on a GPU: numbers of a tile of tokens times the matrix of a stream, by matrix units.

A *number* is what a direction of a token is multiplied by: the level of a code, or a coordinate of a rotation. Both and
the matrix are BF16 exactly as :mod:`quantwm_core.transform` rounds them, and the sum is FP32. Columns of the product
stand as :func:`quantwm_kernels.triton.compensation.channel_of` says. Where codes lie is drawn in :mod:`quantwm_core.blocks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_core import allocation
from quantwm_kernels import recipe
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
DIRECTIONS_PER_WORD: tl.constexpr = tl.constexpr(recipe.DIRECTIONS_PER_WORD)
# 2**23 and 2**22: a number that is as large and has the bits of a code as its last is the larger by that code, or half of it.
LARGE_INTEGER: tl.constexpr = tl.constexpr(0x4B000000)
LARGE_HALF: tl.constexpr = tl.constexpr(0x4A800000)
LARGE: tl.constexpr = tl.constexpr(2.0**23)
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
def transform_rows(row, stream, direction):
    """Which directions get bits, what their rows of the basis are multiplied by, and where these are."""
    known = direction < directions_at(row, stream, EIGHT) + directions_at(row, stream, FOUR) + directions_at(
        row, stream, TWO
    )
    begin = place(row, stream, DIRECTION)
    order = bytes_at(tl.load(row + ORDER), begin)
    own = tl.load(order + direction, mask=known, other=0).to(tl.int64)
    own = place(row, stream, BASIS_ROW) + tl.minimum(own, place(row, stream, BASIS_ROWS) - 1)
    step = wide(tl.load(halves_at(tl.load(row + STEPS), begin) + direction, mask=known, other=0))
    scale = wide(tl.load(halves_at(tl.load(row + SHARED_BASIS_SCALES), 0) + own, mask=known, other=0))
    return known, step * scale, own


@triton.jit
def rotation_rows(row, stream, direction, CHANNELS: tl.constexpr):
    """Likewise of a rotation."""
    known = direction < CHANNELS
    begin = stream * CHANNELS
    scale = wide(tl.load(halves_at(tl.load(row + SHARED_BASIS_SCALES), begin) + direction, mask=known, other=0))
    return known, scale, begin + direction


@triton.jit
def matrix_rows(
    row, stream, begin, FORM: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[COUNT, WIDE]`` of the directions from ``begin``, zero beyond the last, channels in their order."""
    direction = begin + tl.arange(0, COUNT)
    if FORM == TRANSFORM:
        known, factor, own = transform_rows(row, stream, direction)
    else:
        known, factor, own = rotation_rows(row, stream, direction, CHANNELS)
    channel = tl.arange(0, WIDE)
    addresses = bytes_at(tl.load(row + SHARED_BASIS), 0) + (own[:, None] * CHANNELS + channel[None, :])
    if ALIGNED:
        # Rows begin where their length allows, all of them where the longest load may.
        addresses = tl.multiple_of(addresses, (1, 8 if CHANNELS % 16 else 16))
    entry = tl.load(addresses, mask=known[:, None] & (channel < CHANNELS)[None, :], other=0).to(tl.int32)
    signed = ((entry ^ 128) | LARGE_INTEGER).to(tl.float32, bitcast=True) - (LARGE + 128.0)
    return to_bf16(factor[:, None] * signed).to(MATRIX_DTYPE)


@triton.jit
def in_columns(matrix, COUNT: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr):
    """Channels of a matrix put in the order of :func:`quantwm_kernels.triton.compensation.channel_of`."""
    words = tl.reshape(matrix, (COUNT, WIDE // (WORDS_PER_PART * LANES), WORDS_PER_PART, LANES // 2, 2))
    return tl.reshape(tl.permute(words, (0, 1, 3, 2, 4)), (COUNT, WIDE))


@triton.jit
def laid_out(row, stream, begin, COUNT: tl.constexpr):
    """Of each four directions from ``begin``, which have the same width: first byte in a token, and bits of a direction.

    Beside them the address of a stream's codes and the bytes of a token. A direction without bits has width 0.
    """
    eight, four, two = (
        directions_at(row, stream, EIGHT),
        directions_at(row, stream, FOUR),
        directions_at(row, stream, TWO),
    )
    direction = begin + tl.arange(0, COUNT // DIRECTIONS_PER_WORD) * DIRECTIONS_PER_WORD
    in_four, in_two = direction - eight, direction - eight - four
    is_eight, is_four = in_four < 0, in_two < 0
    byte = tl.where(is_eight, direction, eight + tl.where(is_four, in_four // 2, four // 2 + in_two // 4))
    width = tl.where(is_eight, 8, tl.where(is_four, 4, 2))
    address = tl.load(row + CODES) + place(row, stream, CODE_BYTE)
    return address, eight + four // 2 + two // 4, byte, tl.where(in_two < two, width, 0)


@triton.jit
def packed_codes(address, size, byte, width, first, local, exists, GROUP: tl.constexpr):
    """int32 ``[tokens, words]`` as they lie in memory, with the codes of four directions each; see :func:`levels`.

    Blocks of 8 bits come first, then those of 4: four codes never straddle a word, where tokens are whole words (``GROUP``).
    Otherwise a word is put together, its codes lowest.
    """
    inside = exists[:, None] & (width > 0)[None, :]
    begin = address + first * size
    if GROUP == DIRECTIONS_PER_WORD:
        words = begin.to(tl.pointer_type(tl.int32))
        offset = local[:, None] * (size // 4) + (byte // 4)[None, :]
        # Of another shape than what is stored, as which Triton would arrange it: a thread is to have tokens of one word.
        word = tl.load(words + offset[:, :, None], mask=inside[:, :, None], other=0)
        packed = tl.reshape(word, (local.shape[0], byte.shape[0]))
    else:
        packed = tl.zeros((local.shape[0], byte.shape[0]), tl.int32)
        for part in tl.static_range(4):
            own = inside & (2 * part < width)[None, :]
            code = tl.load(bytes_at(begin, part) + (local[:, None] * size + byte[None, :]), mask=own, other=0)
            packed |= code.to(tl.int32) << (8 * part)
    return packed


@triton.jit
def level(packed, width, direction: tl.constexpr):
    """FP32 ``code - 2**(w-1) + offset`` of one of four directions; zero where they have no bits.

    A code is put among the last bits of a large number whose last bit counts 1, or a half where levels lie between integers.
    """
    half = (width != 8).to(tl.int32)
    large = tl.where(width == 8, LARGE_INTEGER, LARGE_HALF)
    middle = tl.where(width == 8, 128.0, tl.where(width == 4, 7.5, tl.where(width == 2, 1.5, 0.0)))
    offset = large.to(tl.float32, bitcast=True) + middle
    mask = ((1 << width) - 1) << half
    code = ((packed << half[None, :]) >> (direction * width)[None, :]) & mask[None, :]
    return (code | large[None, :]).to(tl.float32, bitcast=True) - offset[None, :]


@triton.jit
def levels(packed, byte, width, GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, COUNT: tl.constexpr):
    """Matrix operand ``[tokens, COUNT]`` of what :func:`packed_codes` asked for: nothing waits for it before this does."""
    if GROUP == DIRECTIONS_PER_WORD:
        packed = packed >> (byte % 4 * 8)[None, :]
    even = tl.join(level(packed, width, 0), level(packed, width, 2))
    odd = tl.join(level(packed, width, 1), level(packed, width, 3))
    return tl.reshape(tl.join(even, odd), (BLOCK_TOKENS, COUNT)).to(MATRIX_DTYPE)


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
    FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[tokens, COUNT]`` of the directions from ``begin``."""
    if FORM == TRANSFORM:
        address, size, byte, width = laid_out(row, stream, begin, COUNT)
        packed = packed_codes(address, size, byte, width, first, local, exists, GROUP)
        number = levels(packed, byte, width, GROUP, BLOCK_TOKENS, COUNT)
    else:
        direction = begin + tl.arange(0, COUNT)
        number = coordinates(row, stream, tokens, first, local, exists, direction, CHANNELS, GROUP)
    return number


@triton.jit
def transformed(
    row, stream, tokens, first, local, exists, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """FP32 ``[tokens, WIDE]``: numbers times matrix, which is made in parts."""
    total = tl.zeros((BLOCK_TOKENS, WIDE), tl.float32)
    COUNT: tl.constexpr = min(RANK, PART)
    for begin in range(0, RANK, COUNT):
        number = numbers(
            row, stream, tokens, first, local, exists, begin, FORM, CHANNELS, GROUP, COUNT, BLOCK_TOKENS
        )  # fmt: skip
        matrix = matrix_rows(row, stream, begin, FORM, CHANNELS, COUNT, WIDE, ALIGNED)
        total = product(number, in_columns(matrix, COUNT, WIDE, LANES), total)
    return total


@triton.jit
def means_of(row, stream, FORM: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr):
    """FP32 ``[WIDE]``, columns as those of the product: what is added to all tokens of a stream."""
    if FORM == TRANSFORM:
        channel = channel_of(tl.arange(0, WIDE), LANES)
        means = halves_at(tl.load(row + MEANS), stream * CHANNELS)
        mean = wide(tl.load(means + channel, mask=channel < CHANNELS, other=0))
    else:
        mean = tl.full((WIDE,), -0.0, tl.float32)  # adding this changes no bit
    return mean


@triton.jit
def rotated_queries(
    row, stream, asked, CHANNELS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[ROWS, RANK]`` of queries in the basis of a stream, and FP32 ``[ROWS]``: what its mean adds to logits."""
    matrix = matrix_rows(row, stream, 0, TRANSFORM, CHANNELS, RANK, WIDE, ALIGNED)
    rotated = product(asked, tl.trans(matrix), tl.zeros((ROWS, RANK), tl.float32))
    channel = tl.arange(0, WIDE)
    means = halves_at(tl.load(row + MEANS), stream * CHANNELS)
    mean = wide(tl.load(means + channel, mask=channel < CHANNELS, other=0))
    return to_bf16(rotated).to(MATRIX_DTYPE), tl.sum(asked.to(tl.float32) * mean[None, :], axis=1)


@triton.jit
def stored_rows(BLOCK_TOKENS: tl.constexpr):
    """Row of a tile that stands in each row of :func:`in_stored_rows`."""
    row = tl.arange(0, BLOCK_TOKENS)
    half: tl.constexpr = BLOCK_TOKENS // 2
    return row % half // 8 * 16 + row // half * 8 + row % 8


@triton.jit
def in_stored_rows(number, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Rows in the order in which warps store them, so that none is exchanged: of its 16, a warp stores the first 8 of all, then the rest."""
    rows = tl.reshape(number, (BLOCK_TOKENS // 16, 2, 8, WIDTH))
    return tl.reshape(tl.permute(rows, (1, 0, 2, 3)), (BLOCK_TOKENS, WIDTH))


@triton.jit
def transformed_part(
    total, part: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):  # fmt: skip
    """BF16 ``[tokens, 4 * LANES]`` of a part of the channels of what was summed."""
    number = part_of(total, part, WORDS // WORDS_PER_PART, LANES, BLOCK_TOKENS)
    return tl.reshape(to_bf16(number), (BLOCK_TOKENS, WORDS_PER_PART * LANES))
