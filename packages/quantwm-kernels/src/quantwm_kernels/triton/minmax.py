"""Reading asymmetric codes with a BF16 minimum on a GPU; formulas in :mod:`quantwm_core.minmax`."""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.triton.clustered import SCALES, ZERO_POINTS, counted_codes, packed_words, wide

COUNTING_ZERO: tl.constexpr = tl.constexpr(2.0**23)


@triton.jit
def minmax(
    row, first, local, inside, tokens, stream,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, BY_CHANNEL: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """FP32 ``minimum + code * s'`` ``[tokens, words, lanes]``; a group is ``GROUP`` tokens of a channel, or channels."""
    words = packed_words(row, first, local, inside, tokens, stream, CHANNELS, LANES, WORDS)
    channel = tl.arange(0, WORDS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    exists = inside & (channel < CHANNELS)
    token = (first + local)[:, None, None]
    if BY_CHANNEL:
        blocks = (tokens + GROUP - 1) // GROUP
        offset = channel * blocks.to(tl.int64) + token // GROUP
        begin = stream * blocks * CHANNELS
    else:
        groups: tl.constexpr = (CHANNELS + GROUP - 1) // GROUP
        offset = token * groups + channel // GROUP
        begin = stream * tokens * groups
    scales = tl.load(row + SCALES).to(tl.pointer_type(tl.uint16)) + begin
    minima = tl.load(row + ZERO_POINTS).to(tl.pointer_type(tl.uint16)) + begin
    step = wide(tl.load(scales + offset, mask=exists, other=0))
    low = wide(tl.load(minima + offset, mask=exists, other=0))
    return low + (counted_codes(words, LANES) - COUNTING_ZERO) * step
