"""Asymmetric INT2 with a real-valued minimum, as KIVI uses it (arXiv 2402.02750).

For a group ``x``: ``m = min x`` and ``s = (max x - m) / 3``, both stored BF16, ``code = clip(round((x - m) / s'), 0, 3)``
and ``x^ = m + code * s'``. A constant group has ``s = 0`` and decodes to its constant. The minimum of BF16 input is
BF16 already, so only the scale is rounded.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import BFloat16, Float32, UInt8

from quantwm_core.affine import LEVELS
from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16, check_finite


def encode_groups(
    values: Float32[np.ndarray, "*lead rows size"], group_size: int
) -> tuple[
    UInt8[np.ndarray, "*lead rows size"],
    BFloat16[np.ndarray, "*lead rows groups"],
    BFloat16[np.ndarray, "*lead rows groups"],
]:
    """Quantize along the last axis in groups of ``group_size``; a ragged last group is a smaller one.

    Returns:
        codes (uint8, 0 to 3, not packed), BF16 scales, BF16 minima.

    Raises:
        DomainError: A value is NaN or infinite, or the range of a group is.

    >>> codes, step, low = encode_groups(np.float32([[0.0, 3.0, 1.0, 7.0, 7.0]]), 3)
    >>> codes, step.astype(np.float32), low.astype(np.float32)
    (array([[0, 3, 1, 0, 0]], dtype=uint8), array([[1., 0.]], dtype=float32), array([[0., 7.]], dtype=float32))
    """
    size = values.shape[-1]
    starts = np.arange(0, size, group_size)
    low = np.minimum.reduceat(values, starts, axis=-1).astype(BF16)
    high = np.maximum.reduceat(values, starts, axis=-1)
    check_finite(high - low.astype(np.float32), "groups")
    step = ((high - low.astype(np.float32)) / np.float32(LEVELS)).astype(BF16)
    wide_low, wide_step = _spread(low, group_size, size), _spread(step, group_size, size)
    codes = np.clip(np.rint((values - wide_low) / np.where(wide_step > 0, wide_step, np.float32(np.inf))), 0, LEVELS)
    return codes.astype(np.uint8), step, low


def decode_groups(
    codes: UInt8[np.ndarray, "*lead rows size"],
    step: BFloat16[np.ndarray, "*lead rows groups"],
    low: BFloat16[np.ndarray, "*lead rows groups"],
    group_size: int,
    offset: int = 0,
) -> Float32[np.ndarray, "*lead rows size"]:
    """Reconstruct ``low + code * step``; ``codes`` may begin ``offset`` elements inside the first group."""
    size = codes.shape[-1]
    wide_step = _spread(step, group_size, size, offset)
    return _spread(low, group_size, size, offset) + codes.astype(np.float32) * wide_step


def _spread(
    per_group: BFloat16[np.ndarray, "*lead groups"], group_size: int, size: int, offset: int = 0
) -> Float32[np.ndarray, "*lead size"]:
    """Repeat each group's number for its elements, in FP32."""
    return np.repeat(per_group.astype(np.float32), group_size, axis=-1)[..., offset : offset + size]


explain_errors(globals())
