"""The numbers that may enter: finite BF16 up to 2**60, and power-of-two normalisation inside.

Every operation works in FP32 on values that were rounded to BF16 first. Squared distances of values near
2**60 would overflow FP32, so distances are computed on data scaled by a power of two, which changes no bit
of a mantissa and makes encoding equivariant to powers of two.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Int32
from numpy.typing import ArrayLike

from quantwm_core.arguments import explain_errors
from quantwm_core.errors import DomainError, DtypeError, ShapeError

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
MAX_MAGNITUDE = 2.0**60

_ACCEPTED = (BF16, np.dtype(np.float16), np.dtype(np.float32))


def to_bf16(values: ArrayLike, name: str = "tensor", rank: int | None = None) -> Float[np.ndarray, "..."]:
    """Check ``values`` and round them to BF16 (nearest, ties to even).

    Args:
        values: BF16, FP16 or FP32 array of any strides.
        name: What the array is, for messages: ``"layer 3, chunk 7, keys"``.
        rank: Required number of dimensions, or None for any.

    Returns:
        BF16 array of the same shape; the input itself when it was BF16.

    Raises:
        DtypeError: Another number format came.
        ShapeError: The rank differs, or a dimension is zero.
        DomainError: A value is NaN, infinite or larger than 2**60 in magnitude.

    >>> to_bf16(np.float32([1.0, 1.00390625])).astype(np.float32)
    array([1., 1.], dtype=float32)
    """
    array = np.asarray(values)
    check_kind(array, name, rank)
    check_domain(array, name)
    return array.astype(BF16, copy=False)


def check_kind(array: np.ndarray, name: str, rank: int | None = None) -> None:
    """Raise :class:`DtypeError` or :class:`ShapeError` as :func:`to_bf16`, without a look at the values.

    >>> check_kind(np.ones((1, 2), np.float16), "keys", rank=2)
    """
    if array.dtype not in _ACCEPTED:
        raise DtypeError(f"{name}: got {array.dtype}, need bfloat16, float16 or float32; convert it first")
    if rank is not None and array.ndim != rank:
        raise ShapeError(f"{name}: got shape {array.shape}, need {rank} dimensions")
    if array.size == 0:
        raise ShapeError(f"{name}: got shape {array.shape}, which holds no element; pass at least one token")


def check_domain(array: Float[np.ndarray, "..."], name: str) -> None:
    """Raise :class:`DomainError` unless every value is finite and at most 2**60 in magnitude."""
    with np.errstate(invalid="ignore"):
        low, high = float(array.min()), float(array.max())  # NaN propagates through both
    if np.isfinite(low) and np.isfinite(high) and max(-low, high) <= MAX_MAGNITUDE:
        return
    wide = array.astype(np.float32)
    raise _refused(name, wide, ~(np.abs(wide) <= MAX_MAGNITUDE), "NaN, infinite or beyond 2**60")


def check_finite(array: Float[np.ndarray, "..."], name: str) -> None:
    """Raise :class:`DomainError` unless every value is finite.

    >>> check_finite(np.float32([1.0, 2.0**70]), "metric")
    """
    finite = np.isfinite(array)
    if not finite.all():
        raise _refused(name, array, ~finite, "NaN or infinite")


def _refused(name: str, array: np.ndarray, bad: np.ndarray, what: str) -> DomainError:
    """The error that says which values of an array cannot be taken."""
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    return DomainError(
        f"{name}: {int(bad.sum())} of {array.size} values are {what}, "
        f"first {array[first]} at index {first}; repair the input before sealing"
    )


def binary_exponent(*arrays: Float[np.ndarray, "*streams _rows channels"]) -> Int32[np.ndarray, "*streams 1 1"]:
    """Per stream the integer ``e`` with ``max |values| <= 2**e`` over all arrays; zero where all values are zero.

    Returns:
        int32 ``[*streams, 1, 1]``, ready for :func:`numpy.ldexp`.

    Raises:
        DomainError: A value is NaN or infinite.

    >>> (
    ...     binary_exponent(np.float32([[[3.0, -5.0]]])).item(),
    ...     binary_exponent(np.ones((1, 2)), np.full((3, 2), 9.0)).item(),
    ... )
    (3, 4)
    """
    largest = [np.abs(array).max(axis=(-2, -1), keepdims=True).astype(np.float32) for array in arrays]
    of_all = np.maximum.reduce(largest)
    if not np.isfinite(of_all).all():  # which a single value of them makes it
        for array in arrays:
            check_finite(array, "values")
    return np.frexp(of_all)[1].astype(np.int32)


def round_up(values: Float32[np.ndarray, "..."], bits: int) -> Float32[np.ndarray, "..."]:
    """Smallest FP32 numbers of ``bits`` significant bits that are not below non-negative ``values``.

    Eight bits are what BF16 has.

    >>> round_up(np.float32([1.0, 1.01, 0.3]), 3)
    array([1.    , 1.25  , 0.3125], dtype=float32)
    """
    dropped = np.uint32(24 - bits)
    mask = np.uint32((1 << dropped) - 1)
    lifted = np.ascontiguousarray(values, np.float32).view(np.uint32) + mask
    return (lifted & ~mask).view(np.float32)


explain_errors(globals())
