"""Symmetric INT2 as QVG releases it: levels -1, 0, 1 and one E4M3 scale per group (numerics of arXiv 2602.02958).

For a group ``x`` of consecutive channels: ``s = max |x|`` stored as E4M3 (nearest-even, saturating at 448, no
super-scale), ``level = clip(round(x / s'), -1, 1)``, stored code ``level + 1``. One of the four codes stays unused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float8e4m3fn, Float32, UInt8

from quantwm_core import packing
from quantwm_core.affine import check_group_size
from quantwm_core.arguments import explain_errors
from quantwm_core.domain import E4M3, check_finite
from quantwm_core.scales import E4M3_MAX


@dataclass(frozen=True)
class SymmetricCode:
    """Encoded groups of ``[*streams, tokens, channels]``.

    Attributes:
        codes: uint8 ``[*streams, tokens, channels / 4]``, packed, ``level + 1``.
        scales: E4M3 ``[*streams, tokens, channels / G]``.
    """

    codes: UInt8[np.ndarray, "*streams tokens quads"]
    scales: Float8e4m3fn[np.ndarray, "*streams tokens groups"]


def encode(values: Float32[np.ndarray, "*streams tokens channels"], group_size: int) -> SymmetricCode:
    """Quantize FP32 values to three levels.

    Raises:
        ParameterError: ``group_size`` does not fit the channels.
        DomainError: A value is NaN or infinite.

    >>> packing.unpack(encode(np.float32([[[-2.0, 0.1, 2.0, 0.9]]]), 4).codes, 4)
    array([[[0, 1, 2, 1]]], dtype=uint8)
    """
    groups = check_group_size(values.shape[-1], group_size)
    grouped = values.reshape(*values.shape[:-1], groups, group_size)
    largest = np.abs(grouped).max(axis=-1)
    check_finite(largest, "groups")
    stored = np.minimum(largest, np.float32(E4M3_MAX)).astype(E4M3)
    step = stored.astype(np.float32)[..., None]
    levels = np.clip(np.rint(grouped / np.where(step > 0, step, np.float32(np.inf))), -1, 1)
    return SymmetricCode(packing.pack((levels + 1).astype(np.uint8).reshape(values.shape)), stored)


def decode(
    code: SymmetricCode, start: int = 0, stop: int | None = None
) -> Float32[np.ndarray, "*streams tokens channels"]:
    """Reconstruct tokens ``start`` to ``stop`` in FP32.

    >>> decode(encode(np.float32([[[-2.0, 0.1, 2.0, 0.9]]]), 4))
    array([[[-2.,  0.,  2.,  0.]]], dtype=float32)
    """
    stored = code.scales[..., start:stop, :].astype(np.float32)
    channels = code.codes.shape[-1] * packing.CODES_PER_BYTE
    codes = packing.unpack(code.codes[..., start:stop, :], channels)
    levels = (codes.view(np.int8) - 1).astype(np.float32).reshape(*stored.shape, channels // stored.shape[-1])
    return (levels * stored[..., None]).reshape(codes.shape)


explain_errors(globals())
