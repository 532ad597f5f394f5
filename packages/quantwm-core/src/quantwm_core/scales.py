"""Group scales <-> one FP32 super-scale per stream and one E4M3 byte per group.

E4M3 spans 2**-9 to 448. The super-scale moves the largest scale of a stream to 448, so a stream keeps about
18 binary orders of magnitude below its largest group::

    S  = max(max_groups s / 448, smallest normal FP32)
    s' = S * e4m3(s / S)          nearest, ties to even; a positive s never becomes zero
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float8e4m3fn, Float32

from quantwm_core.arguments import explain_errors
from quantwm_core.domain import E4M3
from quantwm_core.errors import DomainError

E4M3_MAX = 448.0
SMALLEST_SUBNORMAL = 2.0**-9
_TINY = np.finfo(np.float32).tiny


def encode(
    steps: Float32[np.ndarray, "*streams rows groups"],
) -> tuple[Float8e4m3fn[np.ndarray, "*streams rows groups"], Float32[np.ndarray, "*streams"]]:
    """Store non-negative group scales as E4M3 under a super-scale.

    Args:
        steps: FP32 ``[*streams, rows, groups]``, finite, at least zero.

    Returns:
        E4M3 scales of the same shape and the FP32 super-scale ``[*streams]``.

    Raises:
        DomainError: A scale is negative, NaN or infinite.

    >>> scales, super_scale = encode(np.float32([[[7.0, 3.5, 0.0]]]))
    >>> scales.astype(np.float32), super_scale
    (array([[[448., 224.,   0.]]], dtype=float32), array([0.015625], dtype=float32))
    """
    super_scale = super_scale_of(steps)
    if steps.min() < 0:
        raise DomainError(f"group scale {steps.min()}: need 0 or more")
    return store(steps, super_scale), super_scale


def super_scale_of(steps: Float32[np.ndarray, "*streams rows groups"]) -> Float32[np.ndarray, "*streams"]:
    """FP32 super-scale that moves the largest step of each stream to 448.

    Raises:
        DomainError: A step is NaN or infinite.

    >>> super_scale_of(np.float32([[[7.0, 3.5]]]))
    array([0.015625], dtype=float32)
    """
    super_scale = np.maximum(steps.max(axis=(-2, -1)) / np.float32(E4M3_MAX), _TINY).astype(np.float32)
    if not np.isfinite(super_scale).all():  # which NaN among the steps makes it, too
        raise DomainError("group scales: NaN or infinite, as those of such values are; need finite ones")
    return super_scale


def store(
    steps: Float32[np.ndarray, "*streams rows groups"], super_scale: Float32[np.ndarray, "*streams"]
) -> Float8e4m3fn[np.ndarray, "*streams rows groups"]:
    """E4M3 bytes of steps that are no larger than those which ``super_scale`` was made of.

    >>> store(np.float32([[[1.0, 0.0]]]), np.float32([0.015625])).astype(np.float32)
    array([[[64.,  0.]]], dtype=float32)
    """
    ratio = steps / super_scale[..., None, None]
    stored = np.minimum(ratio, np.float32(E4M3_MAX)).astype(E4M3)
    vanished = (steps > 0) & (stored.astype(np.float32) == 0)
    stored[vanished] = np.float32(SMALLEST_SUBNORMAL)
    return stored


def decode(
    scales: Float8e4m3fn[np.ndarray, "*streams rows groups"], super_scale: Float32[np.ndarray, "*streams"]
) -> Float[np.ndarray, "*streams rows groups"]:
    """FP32 scales ``s' = S * e4m3`` of the same shape.

    >>> decode(np.array([[[448.0, 1.0]]], E4M3), np.float32([0.5]))
    array([[[224. ,   0.5]]], dtype=float32)
    """
    return scales.astype(np.float32) * super_scale[..., None, None]


explain_errors(globals())
