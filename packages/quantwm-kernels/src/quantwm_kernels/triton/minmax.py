"""Reading asymmetric codes with a BF16 minimum on a GPU; formulas in :mod:`quantwm_core.minmax`."""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.triton.clustered import SCALES, ZERO_POINTS, four_plus_codes, halves_at, wide


@triton.jit
def minima_at(row, stream, tokens, CHANNELS: tl.constexpr, GROUP: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Pointers to a stream's scales and minima."""
    if BY_CHANNEL:
        begin = stream * ((tokens + GROUP - 1) // GROUP) * CHANNELS
    else:
        begin = stream * tokens * ((CHANNELS + GROUP - 1) // GROUP)
    return halves_at(tl.load(row + SCALES), begin), halves_at(tl.load(row + ZERO_POINTS), begin)


@triton.jit
def minmax(
    codes, scales, minima, four, first, local, word, inside, tokens,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, BY_CHANNEL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """FP32 ``minimum + code * s'`` ``[tokens, words, lanes]``; a group is ``GROUP`` tokens of a channel, or channels."""
    channel = word[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    exists = inside & (channel < CHANNELS)
    token = (first + local)[:, None, None]
    if BY_CHANNEL:
        offset = channel * ((tokens + GROUP - 1) // GROUP) + token // GROUP
    else:
        offset = token * ((CHANNELS + GROUP - 1) // GROUP) + channel // GROUP
    step = wide(tl.load(scales + offset, mask=exists))
    low = wide(tl.load(minima + offset, mask=exists))
    return low + (four_plus_codes(codes, four, first, local, word, inside, CHANNELS, LANES) - 4.0) * step
