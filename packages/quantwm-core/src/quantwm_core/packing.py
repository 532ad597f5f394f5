"""2-bit codes and 4-bit integers <-> bytes.

Four consecutive codes share a byte; code ``i`` of the four sits in bits ``2i`` and ``2i + 1``::

    bit      7 6   5 4   3 2   1 0
    code      3     2     1     0

A last byte that is not full is padded with zero codes. Signed 4-bit integers, in two's complement, lie two in a byte::

    bit      7 6 5 4   3 2 1 0
    number      1         0
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int8, UInt8

from quantwm_core.arguments import explain_errors
from quantwm_core.errors import DtypeError, ShapeError

CODES_PER_BYTE = 4
NIBBLES_PER_BYTE = 2
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


def nibble_size(numbers: int) -> int:
    """Bytes that ``numbers`` 4-bit integers take.

    >>> nibble_size(5)
    3
    """
    return -(-numbers // NIBBLES_PER_BYTE)


def pack_nibbles(numbers: Int8[np.ndarray, "*lead numbers"]) -> UInt8[np.ndarray, "*lead packed"]:
    """Pack signed 4-bit integers along the last axis.

    Args:
        numbers: int8 ``[..., n]``, each -8 to 7.

    Returns:
        uint8 ``[..., ceil(n / 2)]``; an odd last byte is padded with 0.

    Raises:
        DtypeError: ``numbers`` is not int8.
        ShapeError: A number is out of range or the array has no axis.

    >>> pack_nibbles(np.int8([1, -1, 7]))
    array([241,   7], dtype=uint8)
    """
    if numbers.dtype != np.int8:
        raise DtypeError(f"4-bit integers: got {numbers.dtype}, need int8")
    if numbers.ndim == 0 or (numbers.size and not -8 <= int(numbers.min()) <= int(numbers.max()) <= 7):
        raise ShapeError(f"4-bit integers: got shape {numbers.shape} with a number beyond -8 to 7 or no axis")
    count = numbers.shape[-1]
    padded = np.zeros((*numbers.shape[:-1], nibble_size(count) * NIBBLES_PER_BYTE), np.uint8)
    padded[..., :count] = numbers.view(np.uint8) & 15
    return padded[..., 0::2] | padded[..., 1::2] << 4


def unpack_nibbles(packed: UInt8[np.ndarray, "*lead packed"], numbers: int) -> Int8[np.ndarray, "*lead numbers"]:
    """Inverse of :func:`pack_nibbles`.

    Args:
        packed: uint8 ``[..., ceil(numbers / 2)]``.
        numbers: How many integers to read from the last axis.

    Raises:
        DtypeError: ``packed`` is not uint8.
        ShapeError: ``packed`` does not hold that many.

    >>> unpack_nibbles(np.uint8([241, 7]), 3)
    array([ 1, -1,  7], dtype=int8)
    """
    if packed.dtype != np.uint8:
        raise DtypeError(f"packed 4-bit integers: got {packed.dtype}, need uint8")
    if packed.ndim == 0 or packed.shape[-1] != nibble_size(numbers):
        raise ShapeError(f"packed 4-bit integers: got shape {packed.shape}, need {nibble_size(numbers)} bytes")
    wide = np.stack([packed << 4, packed], axis=-1).view(np.int8) >> 4
    return wide.reshape(*packed.shape[:-1], packed.shape[-1] * NIBBLES_PER_BYTE)[..., :numbers]


explain_errors(globals())
