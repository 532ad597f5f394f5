"""2-bit codes <-> bytes.

Four consecutive codes share a byte; code ``i`` of the four sits in bits ``2i`` and ``2i + 1``::

    bit      7 6   5 4   3 2   1 0
    code      3     2     1     0

A last byte that is not full is padded with zero codes.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

from quantwm_core.errors import DtypeError, ShapeError

CODES_PER_BYTE = 4
_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)


def packed_size(codes: int) -> int:
    """Bytes that ``codes`` 2-bit codes take.

    >>> packed_size(5)
    2
    """
    return -(-codes // CODES_PER_BYTE)


def pack(codes: UInt8[np.ndarray, "*lead codes"]) -> UInt8[np.ndarray, "*lead packed"]:
    """Pack 2-bit codes along the last axis.

    Args:
        codes: uint8 ``[..., n]``, each 0 to 3.

    Returns:
        uint8 ``[..., ceil(n / 4)]``.

    Raises:
        DtypeError: ``codes`` is not uint8.
        ShapeError: A code exceeds 3 or the array has no axis.

    >>> pack(np.uint8([1, 2, 3, 0, 2]))
    array([57,  2], dtype=uint8)
    """
    if codes.dtype != np.uint8:
        raise DtypeError(f"codes: got {codes.dtype}, need uint8")
    if codes.ndim == 0 or (codes.size and int(codes.max()) > 3):
        raise ShapeError(f"codes: got shape {codes.shape} with a code above 3 or no axis, need values 0 to 3")
    count = codes.shape[-1]
    size = packed_size(count)
    if size * CODES_PER_BYTE != count:
        padded = np.zeros((*codes.shape[:-1], size * CODES_PER_BYTE), np.uint8)
        padded[..., :count] = codes
        codes = padded
    quads = codes.reshape(*codes.shape[:-1], size, CODES_PER_BYTE)
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def unpack(packed: UInt8[np.ndarray, "*lead packed"], codes: int) -> UInt8[np.ndarray, "*lead codes"]:
    """Inverse of :func:`pack`.

    Args:
        packed: uint8 ``[..., ceil(codes / 4)]``.
        codes: How many codes to read from the last axis.

    Raises:
        DtypeError: ``packed`` is not uint8.
        ShapeError: ``packed`` does not hold that many codes.

    >>> unpack(np.uint8([57, 2]), 5)
    array([1, 2, 3, 0, 2], dtype=uint8)
    """
    if packed.dtype != np.uint8:
        raise DtypeError(f"packed codes: got {packed.dtype}, need uint8")
    if packed.ndim == 0 or packed.shape[-1] != packed_size(codes):
        raise ShapeError(f"packed codes: got shape {packed.shape}, need {packed_size(codes)} bytes for {codes} codes")
    wide = packed[..., None] >> _SHIFTS & 3
    return wide.reshape(*packed.shape[:-1], packed.shape[-1] * CODES_PER_BYTE)[..., :codes]
