"""Reading residual codes and centroids on a GPU: device functions, a tile of tokens x words x lanes at a time.

A *word* is what one thread decodes at once: ``LANES`` consecutive channels, 4 (one byte of codes) or 8 (two bytes).
Addresses come as int64 from a row of :mod:`quantwm_kernels.recipe`; formulas stand in :mod:`quantwm_core.clustered`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.recipe import WORDS_PER_STAGE, Field
from quantwm_kernels.triton.packing import CODES_PER_BYTE, code_in
from quantwm_kernels.triton.scales import e4m3_number, step_of

CODES: tl.constexpr = tl.constexpr(int(Field.CODES))
SCALES: tl.constexpr = tl.constexpr(int(Field.SCALES))
ZERO_POINTS: tl.constexpr = tl.constexpr(int(Field.ZERO_POINTS))
SUPER_SCALE: tl.constexpr = tl.constexpr(int(Field.SUPER_SCALE))
STAGE_FIELDS: tl.constexpr = tl.constexpr(int(Field.STAGES))
STAGE_WORDS: tl.constexpr = tl.constexpr(WORDS_PER_STAGE)
# FP32 with this exponent counts in ones: or-ing a small integer into its bits adds it, which spares a conversion.
COUNTING_BITS: tl.constexpr = tl.constexpr(0x4B000000)


@triton.jit
def counting(small):
    """FP32 ``2**23 + small`` for an integer of 0 to 3."""
    return (small | COUNTING_BITS).to(tl.float32, bitcast=True)


@triton.jit
def packed_words(
    row, first, local, inside, tokens, stream, CHANNELS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr
):
    """int32 ``[tokens, words, 1]`` with the packed codes of each word."""
    width: tl.constexpr = (CHANNELS + LANES - 1) // LANES
    offset = local[:, None, None] * width + tl.arange(0, WORDS)[None, :, None]
    address = tl.load(row + CODES)
    begin = (stream * tokens + first) * width
    if LANES == CODES_PER_BYTE:
        codes = address.to(tl.pointer_type(tl.uint8)) + begin
    else:
        codes = address.to(tl.pointer_type(tl.uint16)) + begin
    return tl.load(codes + offset, mask=inside, other=0).to(tl.int32)


@triton.jit
def counted_codes(words, LANES: tl.constexpr):
    """FP32 ``2**23 + code`` ``[tokens, words, lanes]``."""
    return counting(code_in(words, tl.arange(0, LANES)[None, None, :]))


@triton.jit
def residual(
    row, first, local, inside, tokens, stream,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """FP32 residual ``[tokens, words, lanes]`` of groups of channels: ``(code - z) * s'``."""
    groups: tl.constexpr = CHANNELS // GROUP
    words = packed_words(row, first, local, inside, tokens, stream, CHANNELS, LANES, WORDS)
    offset = local[:, None, None] * groups + (tl.arange(0, WORDS) * LANES // GROUP)[None, :, None]
    begin = first * groups
    scales = tl.load(row + SCALES).to(tl.pointer_type(tl.uint8)) + (stream * tokens * groups + begin)
    scale = tl.load(scales + offset, mask=inside, other=0)
    if SYMMETRIC:
        step = e4m3_number(scale)
        zero = counting(tl.full(offset.shape, 1, tl.int32))
    else:
        step = step_of(scale, tl.load(tl.load(row + SUPER_SCALE).to(tl.pointer_type(tl.float32)) + stream))
        zero = counting(zero_point(row, begin, offset, inside, tokens * groups, stream))
    return (counted_codes(words, LANES) - zero) * step


@triton.jit
def zero_point(row, begin, offset, inside, per_stream, stream):
    """int32 zero-points at positions ``begin + offset`` of a stream that has ``per_stream``."""
    nbytes = (per_stream + CODES_PER_BYTE - 1) // CODES_PER_BYTE
    packed = tl.load(row + ZERO_POINTS).to(tl.pointer_type(tl.uint8)) + stream * nbytes
    position = (begin % CODES_PER_BYTE).to(tl.int32) + offset
    byte = tl.load(packed + begin // CODES_PER_BYTE + position // CODES_PER_BYTE, mask=inside, other=0)
    return code_in(byte.to(tl.int32), position % CODES_PER_BYTE)


@triton.jit
def channel_residual(
    row, first, local, inside, tokens, stream,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The same where ``GROUP`` consecutive tokens of a channel share a scale."""
    words = packed_words(row, first, local, inside, tokens, stream, CHANNELS, LANES, WORDS)
    channel = tl.arange(0, WORDS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    block = (first + local) // GROUP
    exists = inside & (channel < CHANNELS)
    offset = block[:, None, None] * CHANNELS + channel
    per_stream = (tokens + GROUP - 1) // GROUP * CHANNELS
    scales = tl.load(row + SCALES).to(tl.pointer_type(tl.uint8)) + stream * per_stream
    super_scale = tl.load(tl.load(row + SUPER_SCALE).to(tl.pointer_type(tl.float32)) + stream)
    step = step_of(tl.load(scales + offset, mask=exists, other=0), super_scale)
    zero = zero_point(row, tl.zeros((), tl.int64), offset, exists, per_stream, stream)
    return (counted_codes(words, LANES) - counting(zero)) * step


@triton.jit
def centroid(
    row, first, local, exists, inside, tokens, stream, STAGE: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """FP32 centroids ``[tokens, words, lanes]`` of one stage; an index beyond the table gives its last row."""
    field = row + STAGE_FIELDS + STAGE * STAGE_WORDS
    rows = tl.load(field + 2).to(tl.int32)
    indices = tl.load(field).to(tl.pointer_type(tl.uint8)) + (stream * tokens + first)
    index = tl.minimum(tl.load(indices + local, mask=exists, other=0).to(tl.int32), rows - 1)
    table = tl.load(field + 1).to(tl.pointer_type(tl.uint16)) + stream * rows * CHANNELS
    lane = tl.arange(0, WORDS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    addresses = table + (index[:, None, None] * CHANNELS + lane)
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 1, 2 * LANES))
    return wide(tl.load(addresses, mask=inside, other=0))


@triton.jit
def wide(bits):
    """FP32 numbers of BF16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
