"""Codes of 8, 4 and 2 bits <-> bytes: first all directions of 8 bits, then those of 4, then those of 2.

Eight directions make a block, so each part is a whole number of bytes. Of two 4-bit codes the first sits in the low half
of the byte; 2-bit codes lie as :mod:`quantwm_core.packing` draws them::

    byte        0 .. 8a          .. 8a + 4b                  .. 8a + 4b + 2c        a, b, c blocks of 8, 4, 2 bits
    holds       one 8-bit code   two 4-bit codes             four 2-bit codes
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from quantwm_core import packing
from quantwm_core.allocation import BLOCK, directions, token_bytes
from quantwm_core.arguments import explain_errors
from quantwm_core.errors import ShapeError


def pack(
    codes: UInt8[np.ndarray, "tokens directions"], counts: Sequence[int] | UInt8[np.ndarray, "3"]
) -> UInt8[np.ndarray, "tokens bytes"]:
    """Pack a stream's codes, each below ``2**width`` of its direction.

    Args:
        codes: uint8 ``[N, K]``, directions of 8 bits first.
        counts: Blocks of 8, 4 and 2 bits.

    Raises:
        ShapeError: There are more or fewer directions than ``counts`` says.

    >>> pack(np.uint8([[1, 2, 3, 4, 5, 6, 7, 8]]), (0, 1, 0))
    array([[ 33,  67, 101, 135]], dtype=uint8)
    """
    if codes.shape[-1] != directions(counts):
        raise ShapeError(
            f"codes {codes.shape}: need {directions(counts)} directions for {list(map(int, counts))} blocks"
        )
    eight, four = BLOCK * int(counts[0]), BLOCK * (int(counts[0]) + int(counts[1]))
    halves = codes[:, eight:four].reshape(len(codes), (four - eight) // 2, 2)
    return np.concatenate(
        [codes[:, :eight], halves[..., 0] | halves[..., 1] << 4, packing.pack(codes[:, four:])], axis=1
    )


def unpack(
    packed: UInt8[np.ndarray, "tokens bytes"], counts: Sequence[int] | UInt8[np.ndarray, "3"]
) -> UInt8[np.ndarray, "tokens directions"]:
    """Inverse of :func:`pack`.

    Raises:
        ShapeError: A token has more or fewer bytes than ``counts`` says.

    >>> unpack(np.uint8([[33, 67, 101, 135]]), (0, 1, 0))
    array([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=uint8)
    """
    if packed.shape[-1] != token_bytes(counts):
        raise ShapeError(f"packed codes {packed.shape}: need {token_bytes(counts)} bytes a token")
    eight, four = 8 * int(counts[0]), 8 * int(counts[0]) + 4 * int(counts[1])
    middle = packed[:, eight:four]
    halves = np.stack([middle & 15, middle >> 4], axis=-1).reshape(len(packed), 2 * (four - eight))
    return np.concatenate([packed[:, :eight], halves, packing.unpack(packed[:, four:], BLOCK * int(counts[2]))], axis=1)


explain_errors(globals())
