"""Uniform quantizers, one a direction of a transform code: the step is searched, the levels lie evenly around zero.

A code of ``w`` bits stands for ``(code - 2**(w-1) + offset) * step``. With 2 and 4 bits the offset is a half: zero is
between two levels, as suits few levels. With 8 bits it is none, so that every level is an integer that BF16 holds.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import BFloat16, Float32, Int64, UInt8

from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16, check_finite
from quantwm_core.errors import ShapeError

OFFSETS = {2: 0.5, 4: 0.5, 8: 0.0}
BEST_STEPS = {2: 0.9894, 4: 0.3330, 8: 0.03092}
"""Steps that are best for a normal variable of variance 1, by width."""

FACTORS = tuple(2 ** (exponent / 8) for exponent in range(-9, 11))
"""Multiples of the best step of a normal variable that are tried: from a half, for no tails at all, to more than two."""


def levels(
    codes: UInt8[np.ndarray, "tokens directions"], widths: Int64[np.ndarray, " directions"]
) -> Float32[np.ndarray, "tokens directions"]:
    """``code - 2**(w-1) + offset``: what is multiplied by the step; exact in BF16.

    >>> levels(np.uint8([[0, 3], [255, 1]]), np.array([8, 2]))
    array([[-128. ,    1.5],
           [ 127. ,   -0.5]], dtype=float32)
    """
    return codes.astype(np.float32) + _shifts(widths)


def quantize(
    coefficients: Float32[np.ndarray, "tokens directions"],
    widths: Int64[np.ndarray, " directions"],
    steps: BFloat16[np.ndarray, " directions"],
) -> UInt8[np.ndarray, "tokens directions"]:
    """Nearest codes; ties to even. Where the step is 0, any code decodes to 0 and the middle one is taken.

    >>> quantize(np.float32([[0.9, -5.0]]), np.array([2, 4]), np.array([1.0, 0.5], "bfloat16"))
    array([[2, 0]], dtype=uint8)
    """
    wide = steps.astype(np.float32)
    ratio = coefficients / np.where(wide > 0, wide, np.float32(np.inf))
    highest = (2.0**widths - 1).astype(np.float32)
    return np.clip(np.rint(ratio - _shifts(widths)), 0, highest).astype(np.uint8)


def search_steps(
    coefficients: Float32[np.ndarray, "tokens directions"], widths: Int64[np.ndarray, " directions"]
) -> BFloat16[np.ndarray, " directions"]:
    """Of :data:`FACTORS`, the step of each direction with the smallest squared error; the first of equals.

    Raises:
        ShapeError: There is no token.
        DomainError: A coefficient is NaN or infinite, or so large that its square is.

    >>> search_steps(np.float32([[-1.5], [1.5], [0.5], [-0.5]]), np.array([2])).astype(np.float32)
    array([1.015625], dtype=float32)
    """
    if not len(coefficients):
        raise ShapeError(f"coefficients {coefficients.shape}: need at least one token")
    spread = np.sqrt(np.square(coefficients).mean(axis=0))
    check_finite(spread, "coefficients")
    unit = spread * np.array([BEST_STEPS[int(width)] for width in widths], np.float32)
    best = np.zeros(len(widths), BF16)
    least = np.full(len(widths), np.inf, np.float32)
    for factor in FACTORS:
        steps = (unit * np.float32(factor)).astype(BF16)
        coded = levels(quantize(coefficients, widths, steps), widths) * steps.astype(np.float32)
        error = np.square(coefficients - coded).sum(axis=0)
        best, least = np.where(error < least, steps, best), np.minimum(error, least)
    return best


def _shifts(widths: Int64[np.ndarray, " directions"]) -> Float32[np.ndarray, " directions"]:
    return np.array([OFFSETS[int(width)] - 2 ** (int(width) - 1) for width in widths], np.float32)


explain_errors(globals())
