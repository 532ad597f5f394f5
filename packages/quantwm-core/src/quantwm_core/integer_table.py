"""A codebook in small integers: 8 or 4 bits an entry and one scale per channel (ours).

Residuals are taken from the stored centroid, so a coarse centroid is no error of the key; it only stands a little off the
mean of its cluster. Per stream and channel ``j``, with ``b`` bits and ``m = 2^(b-1) - 1``::

    s_j = max_i |c_ij| / m, rounded up to 9 - b significant bits       code_ij = round(c_ij / s_j)
    c^_ij = code_ij * s_j

A scale keeps so few bits that every product is a BF16 number: decoding multiplies once and rounds nothing.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import BFloat16, Float, Int8, UInt8

from quantwm_core import packing
from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16, check_finite, round_up
from quantwm_core.errors import ParameterError

EXACT_BITS = 16
BITS = (4, 8, EXACT_BITS)
SMALLEST_SCALE = np.finfo(np.float32).tiny


def check_bits(bits: int) -> None:
    """Raise :class:`ParameterError` unless centroids can be stored in so many bits; 16 is BF16.

    >>> check_bits(8)
    """
    if bits not in BITS:
        raise ParameterError(f"centroids of {bits} bits: need 4, 8 or 16")


def largest_code(bits: int) -> int:
    """Largest magnitude of a code.

    >>> largest_code(4)
    7
    """
    return (1 << (bits - 1)) - 1


def table_size(rows: int, channels: int, bits: int) -> int:
    """Bytes of a stream's centroids, scales included.

    >>> table_size(64, 128, 16), table_size(64, 128, 4)
    (16384, 4352)
    """
    if bits == EXACT_BITS:
        return 2 * rows * channels
    return rows * (packing.nibble_size(channels) if bits == 4 else channels) + 2 * channels


def encode(
    table: Float[np.ndarray, "*streams rows channels"], bits: int
) -> tuple[
    Int8[np.ndarray, "*streams rows channels"] | UInt8[np.ndarray, "*streams rows packed"],
    BFloat16[np.ndarray, "*streams channels"],
]:
    """Code centroids.

    Args:
        table: BF16 or FP32 ``[*streams, rows, channels]``.
        bits: 8 or 4.

    Returns:
        int8 codes of the same shape, or uint8 ``[*streams, rows, ceil(channels / 2)]`` with two in a byte; BF16 scales.

    Raises:
        ParameterError: ``bits`` is neither.
        DomainError: An entry is NaN or infinite.

    >>> codes, scales = encode(np.float32([[[7.0, -1.0], [3.0, 0.5]]]), 4)
    >>> packing.unpack_nibbles(codes, 2), scales.astype(np.float32)
    (array([[[ 7, -7],
            [ 3,  3]]], dtype=int8), array([[1.      , 0.1484375]], dtype=float32))
    """
    check_bits(bits)
    if bits == EXACT_BITS:
        raise ParameterError("centroids of 16 bits are stored as they are, need 4 or 8")
    wide, most = table.astype(np.float32), largest_code(bits)
    largest = np.abs(wide).max(axis=-2)
    check_finite(largest, "centroids")
    scales = np.where(largest > 0, round_up(np.maximum(largest / np.float32(most), SMALLEST_SCALE), 9 - bits), 0)
    codes = np.clip(np.rint(wide / np.where(scales > 0, scales, np.float32(1))[..., None, :]), -most, most)
    whole = codes.astype(np.int8)
    return packing.pack_nibbles(whole) if bits == 4 else whole, scales.astype(BF16)


def decode(
    codes: Int8[np.ndarray, "*streams rows channels"] | UInt8[np.ndarray, "*streams rows packed"],
    scales: BFloat16[np.ndarray, "*streams channels"],
) -> BFloat16[np.ndarray, "*streams rows channels"]:
    """Centroids, exact in BF16.

    >>> decode(*encode(np.float32([[[7.0, -1.0]]]), 8)).astype(np.float32)
    array([[[ 7., -1.]]], dtype=float32)
    """
    whole = packing.unpack_nibbles(codes, scales.shape[-1]) if codes.dtype == np.uint8 else codes
    exact: np.ndarray = (whole.astype(np.float32) * scales.astype(np.float32)[..., None, :]).astype(BF16)
    return exact


explain_errors(globals())
