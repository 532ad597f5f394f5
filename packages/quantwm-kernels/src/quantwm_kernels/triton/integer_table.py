"""Centroids in small integers, in torch operations that wait for nothing; formulas in :mod:`quantwm_core.integer_table`."""

from __future__ import annotations

import torch
from torch import Tensor

from quantwm_core import integer_table as core
from quantwm_kernels.triton.packing import pack_nibbles, unpack_nibbles

MANTISSA_BITS = 24


def round_up(number: Tensor, bits: int) -> Tensor:
    """:func:`quantwm_core.domain.round_up` of non-negative FP32 numbers."""
    mask = (1 << (MANTISSA_BITS - bits)) - 1
    return ((number.view(torch.int32) + mask) & ~mask).view(torch.float32)


def encode(table: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Code centroids ``[*streams, C, D]``; see :func:`quantwm_core.integer_table.encode`.

    Returns:
        int8 codes, or uint8 with two in a byte; BF16 scales ``[*streams, D]``.
    """
    exact, most = table.bfloat16().float(), core.largest_code(bits)
    largest = exact.abs().amax(dim=-2)
    # A tensor as divisor: a Python number would be turned into its reciprocal on a GPU.
    share = (largest / torch.full_like(largest, most)).clamp(min=float(core.SMALLEST_SCALE))
    scales = torch.where(largest > 0, round_up(share, 9 - bits), 0.0)
    divisor = torch.where(scales > 0, scales, 1.0)[..., None, :]
    codes = (exact / divisor).round().clamp(-most, most).to(torch.int8)
    return (pack_nibbles(codes) if bits == 4 else codes), scales.bfloat16()


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """BF16 centroids ``[*streams, C, D]``, exact."""
    whole = unpack_nibbles(codes, scales.shape[-1]) if codes.dtype is torch.uint8 else codes
    return (whole.float() * scales.float()[..., None, :]).bfloat16()
