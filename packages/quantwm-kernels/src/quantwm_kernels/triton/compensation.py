"""Reading PSAC on a GPU: ``A^ U^T`` of a tile of tokens, by matrix units. Layouts are drawn in :mod:`quantwm_core.psac`.

Columns of the product stand in the order in which a thread of a matrix unit holds them, so that each thread ends up with
whole words of channels and nothing is exchanged: see :func:`channel_of`.

The scale of a direction is folded into the basis: ``a_i U_ji`` has 16 bits of mantissa, which two BF16 numbers hold
exactly, and an INT8 step is exact in BF16. So ``steps [steps] @ [high; low]`` is the FP32 product, summed in FP32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_core import psac
from quantwm_kernels.recipe import Field, Steps
from quantwm_kernels.triton.clustered import bytes_at, halves_at, wide
from quantwm_kernels.triton.domain import MATRIX_DTYPE
from quantwm_kernels.triton.rows import channel_of

BASIS: tl.constexpr = tl.constexpr(int(Field.BASIS))
COEFFICIENT_SCALES: tl.constexpr = tl.constexpr(int(Field.COEFFICIENT_SCALES))
COEFFICIENTS: tl.constexpr = tl.constexpr(int(Field.COEFFICIENTS))
LAYOUT: tl.constexpr = tl.constexpr(int(Field.LAYOUT))
BITMAP: tl.constexpr = tl.constexpr(int(Field.BITMAP))
SPARSE_VALUES: tl.constexpr = tl.constexpr(int(Field.SPARSE_VALUES))
SPARSE_COUNTS: tl.constexpr = tl.constexpr(int(Field.SPARSE_COUNTS))
DENSE_STREAMS: tl.constexpr = tl.constexpr(int(Field.DENSE_STREAMS))
SPARSE_STREAMS: tl.constexpr = tl.constexpr(int(Field.SPARSE_STREAMS))
SPARSE_SIZE: tl.constexpr = tl.constexpr(int(Field.SPARSE_SIZE))
TOKENS_PER_COUNT: tl.constexpr = tl.constexpr(psac.TOKENS_PER_COUNT)
HIGH_HALF: tl.constexpr = tl.constexpr(-65536)
FLAGS: tl.constexpr = tl.constexpr(64)
# What the argument SPARSE says.
DENSE: tl.constexpr = tl.constexpr(int(Steps.DENSE))
EITHER: tl.constexpr = tl.constexpr(int(Steps.EITHER))
NIBBLES: tl.constexpr = tl.constexpr(int(Steps.NIBBLES))
# Directions of a matrix operand; more than MOST are taken in parts of as many, and no operand is kept.
FEW: tl.constexpr = tl.constexpr(8)
MOST: tl.constexpr = tl.constexpr(16)
# Bytes of a token's steps that four threads can take two each of.
QUICK_NBYTES: tl.constexpr = tl.constexpr(8)


@triton.jit
def directions(
    row, stream, direction, present, FIRST: tl.constexpr,
    CHANNELS: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[2 * PADDED, WIDE]``: high and low parts of ``a_i U_ji`` for directions; channels from ``FIRST``."""
    channel = channel_of(tl.arange(0, WIDE), LANES) + FIRST
    known = present & (direction < RANK)
    basis = halves_at(tl.load(row + BASIS), stream * CHANNELS * RANK)
    exists = known[:, None] & (channel < CHANNELS)[None, :]
    entry = wide(tl.load(basis + channel[None, :] * RANK + direction[:, None], mask=exists, other=0))
    scales = halves_at(tl.load(row + COEFFICIENT_SCALES), stream * RANK)
    scaled = entry * wide(tl.load(scales + direction, mask=known, other=0))[:, None]
    high = (scaled.to(tl.int32, bitcast=True) & HIGH_HALF).to(tl.float32, bitcast=True)
    is_high = (tl.arange(0, 2 * PADDED) < PADDED)[:, None]
    return tl.where(is_high, high, scaled - high).to(MATRIX_DTYPE)


@triton.jit
def kept_directions(
    row, stream, present, FIRST: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The operand that serves all tokens of a stream, where the directions are few enough to keep it."""
    PADDED: tl.constexpr = FEW if RANK <= FEW else MOST
    order = tl.arange(0, 2 * PADDED) % PADDED
    if ALIGNED and (RANK == 16 and SPARSE == NIBBLES):  # as :func:`quick_operand` has them
        order = order % 8 // 2 * 4 + order // 8 * 2 + order % 2
    return directions(row, stream, order, present, FIRST, CHANNELS, RANK, PADDED, WIDE, LANES)


@triton.jit
def place_of(row, stream, SPARSE: tl.constexpr):
    """Whether a stream's coefficients are sparse, its place among the streams of its kind, and whether it has any."""
    flag = tl.zeros((), tl.int32)
    place = stream
    compensated = tl.load(row + BASIS) != 0
    if SPARSE == EITHER:
        layout = tl.load(row + LAYOUT)
        if layout != 0:
            flags = bytes_at(layout, 0)
            flag = (tl.load(flags + stream) != 0).to(tl.int32)
            place = tl.zeros((), tl.int64)
            for begin in range(0, stream.to(tl.int32), FLAGS):
                other = begin + tl.arange(0, FLAGS)
                kind = (tl.load(flags + other, mask=other < stream, other=0) != 0).to(tl.int32)
                place += tl.sum(((kind == flag) & (other < stream)).to(tl.int32)).to(tl.int64)
            streams = tl.load(row + tl.where(flag != 0, SPARSE_STREAMS, DENSE_STREAMS))
            compensated = compensated & (place < streams)
    return flag, place, compensated


@triton.jit
def steps_at(row, place, tokens, RANK: tl.constexpr, SPARSE: tl.constexpr):
    """Pointers to a stream's dense steps, or to its bitmap, counts and values, and how many values there are."""
    width: tl.constexpr = (RANK + 1) // 2 if SPARSE == NIBBLES else RANK
    dense = bytes_at(tl.load(row + COEFFICIENTS), place * tokens * width)
    bitmap, counts, values, size = 0, 0, 0, 0
    if SPARSE == EITHER:
        bitmap = bytes_at(tl.load(row + BITMAP), place * ((tokens * RANK + 7) // 8))
        counts = tl.load(row + SPARSE_COUNTS).to(tl.pointer_type(tl.int32))
        counts += place * ((tokens + TOKENS_PER_COUNT - 1) // TOKENS_PER_COUNT)
        values = tl.load(row + SPARSE_VALUES).to(tl.pointer_type(tl.int8))
        size = tl.load(row + SPARSE_SIZE)
    return dense, bitmap, counts, values, size


@triton.jit
def dense_steps(dense, first, local, exists, direction, RANK: tl.constexpr, SPARSE: tl.constexpr):
    """FP32 coefficient steps ``[tokens, directions]``, INT4 or INT8."""
    inside = exists[:, None] & (direction < RANK)[None, :]
    if SPARSE == NIBBLES:
        width: tl.constexpr = (RANK + 1) // 2
        byte = tl.load(dense + first * width + (local[:, None] * width + direction[None, :] // 2), mask=inside, other=0)
        step = (byte.to(tl.int32) << (28 - direction % 2 * 4)[None, :]) >> 28
    else:
        byte = tl.load(dense + first * RANK + (local[:, None] * RANK + direction[None, :]), mask=inside, other=0)
        step = byte.to(tl.int8, bitcast=True)
    return step.to(tl.float32)


@triton.jit
def bits_of(bitmap, token, exists, direction, RANK: tl.constexpr):
    """int32 ``[tokens, directions]``: 1 where a coefficient is stored."""
    bit = token[:, None] * RANK + direction[None, :]
    inside = exists[:, None] & (direction < RANK)[None, :]
    byte = tl.load(bitmap + bit // 8, mask=inside, other=0).to(tl.int32)
    return (byte >> (bit % 8).to(tl.int32)) & 1


@triton.jit
def sparse_steps(
    bitmap, counts, values, size, first, local, exists, begin,
    RANK: tl.constexpr, PADDED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """FP32 coefficient steps ``[tokens, PADDED]`` of a sparse stream, for the directions from ``begin``.

    A value's position is the count of its block of tokens and the bits that are set between that block's begin and it.
    """
    every = tl.arange(0, ALL)
    block = first // TOKENS_PER_COUNT
    passed = block * TOKENS_PER_COUNT + tl.arange(0, TOKENS_PER_COUNT)
    position = tl.load(counts + block) + tl.sum(bits_of(bitmap, passed, passed < first, every, RANK))
    bits = bits_of(bitmap, first + local, exists, every, RANK)
    per_token = tl.sum(bits, axis=1)
    lower = tl.sum(bits * (every < begin)[None, :].to(tl.int32), axis=1)
    own = bits_of(bitmap, first + local, exists, begin + tl.arange(0, PADDED), RANK)
    earlier = position + tl.cumsum(per_token, axis=0) - per_token + lower
    position = earlier[:, None] + tl.cumsum(own, axis=1) - own
    stored = (own != 0) & (position >= 0) & (position < size)
    return tl.load(values + position, mask=stored, other=0).to(tl.float32)


@triton.jit
def steps_operand(
    dense, bitmap, counts, values, size, flag, origin, first, near, begin,
    RANK: tl.constexpr, PADDED: tl.constexpr, ALL: tl.constexpr, SPARSE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Matrix operand ``[tokens, 2 * PADDED]``: the steps of directions from ``begin``, twice."""
    local, exists = tl.arange(0, BLOCK_TOKENS), near == tl.arange(0, BLOCK_TOKENS)
    direction = begin + tl.arange(0, 2 * PADDED) % PADDED
    if SPARSE == EITHER:
        if flag != 0:
            once = sparse_steps(bitmap, counts, values, size, origin + first, local, exists, begin, RANK, PADDED, ALL)
            steps = tl.reshape(tl.permute(tl.join(once, once), (0, 2, 1)), (BLOCK_TOKENS, 2 * PADDED))
        else:
            steps = dense_steps(dense, first, local, exists, direction, RANK, SPARSE)
    else:
        steps = dense_steps(dense, first, local, exists, direction, RANK, SPARSE)
    return steps.to(MATRIX_DTYPE)


@triton.jit
def quick_steps(dense, present, first, near, RANK: tl.constexpr, SPARSE: tl.constexpr, ALIGNED: tl.constexpr):
    """int32 ``[tokens, 4]``: the steps of a token, two bytes for each of four threads; ``near`` where that is not how they lie."""
    if ALIGNED and ((RANK == 8 and SPARSE == DENSE) or (RANK == 16 and SPARSE == NIBBLES)):
        words = dense.to(tl.pointer_type(tl.uint16)) + first * (QUICK_NBYTES // 2)
        words += near[:, None] * (QUICK_NBYTES // 2) + tl.arange(0, 4)[None, :]
        steps = tl.load(words, mask=present, other=0).to(tl.int32)
    else:
        steps = near
    return steps


@triton.jit
def quick_operand(steps, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Matrix operand ``[tokens, 2 * RANK]`` of :func:`quick_steps`, rows in natural order: every step, twice."""
    PARTS: tl.constexpr = RANK // 8
    bits: tl.constexpr = 8 // PARTS
    lane = tl.arange(0, 2 * PARTS)[None, None, :]
    step = ((steps[:, :, None] << (32 - bits - lane * bits)) >> (32 - bits)).to(tl.float32).to(MATRIX_DTYPE)
    step = tl.permute(tl.reshape(step, (2, BLOCK_TOKENS // 16, 8, 4, PARTS, 2)), (1, 0, 2, 4, 3, 5))
    twice = tl.join(step, step)
    return tl.reshape(tl.permute(twice, (0, 1, 2, 6, 3, 4, 5)), (BLOCK_TOKENS, 2 * RANK))


@triton.jit
def compensated(
    total, steps, row, stream, kept, dense, bitmap, counts, values, size, flag, origin, first, near, FIRST: tl.constexpr,
    CHANNELS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Add to FP32 ``[tokens, WIDE]`` in matrix order what PSAC adds; ``near`` are tokens in natural order.

    Tokens are counted from ``origin``, where ``dense`` points.
    """
    PADDED: tl.constexpr = FEW if RANK <= FEW else MOST
    if ALIGNED and ((RANK == 8 and SPARSE == DENSE) or (RANK == 16 and SPARSE == NIBBLES)):
        total = tl.dot(quick_operand(steps, RANK, BLOCK_TOKENS), kept, total, input_precision="ieee")
    elif RANK <= MOST:
        operand = steps_operand(
            dense, bitmap, counts, values, size, flag, origin, first, near, 0, RANK, PADDED, PADDED, SPARSE, BLOCK_TOKENS
        )  # fmt: skip
        total = tl.dot(operand, kept, total, input_precision="ieee")
    else:
        for begin in range(0, RANK, PADDED):
            operand = steps_operand(
                dense, bitmap, counts, values, size, flag, origin, first, near, begin,
                RANK, PADDED, WIDE, SPARSE, BLOCK_TOKENS,
            )  # fmt: skip
            direction = begin + tl.arange(0, 2 * PADDED) % PADDED
            part = directions(row, stream, direction, True, FIRST, CHANNELS, RANK, PADDED, WIDE, LANES)
            total = tl.dot(operand, part, total, input_precision="ieee")
    return total
