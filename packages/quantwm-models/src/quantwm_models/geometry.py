"""Checking and copying what a host appends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core.errors import DtypeError, ShapeError
from quantwm_kernels.bridge import check_detached
from quantwm_kernels.launch import ceil_div, check_served
from quantwm_kernels.sealing import ACCEPTED


class Geometry(NamedTuple):
    """What every chunk of a cache has in common."""

    batch: int
    heads: int
    key_channels: int
    value_channels: int
    device: torch.device


def exact_chunk(
    keys: Tensor, values: Tensor, known: Geometry | None, *, copy: bool = True
) -> tuple[Tensor, Tensor, Geometry]:
    """A chunk in BF16, and its geometry.

    Args:
        keys, values: BF16, FP16 or FP32 ``[B, H, N, D]`` of any strides.
        known: Geometry of the chunks before, which this one must have, or None.
        copy: Return contiguous copies; otherwise what is BF16 already is returned as it is.

    Raises:
        StateError: A tensor requires grad.
        DeviceError: A tensor lives where no implementation serves it.
        DtypeError, ShapeError: The tensors do not fit each other or ``known``.

    >>> exact_chunk(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 8), None)[2][:4]
    (1, 2, 4, 8)
    """
    for name, tensor in (("keys", keys), ("values", values)):
        check_detached(tensor, name)
        check_served(tensor, name)
        if tensor.dtype not in ACCEPTED:
            raise DtypeError(f"{name}: got {tensor.dtype}, need torch.bfloat16, float16 or float32")
    shapes = f"keys {tuple(keys.shape)} and values {tuple(values.shape)}"
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ShapeError(f"{shapes}: need [B, H, N, D] with the same B, H and N")
    if keys.numel() == 0 or values.numel() == 0:
        raise ShapeError(f"{shapes}: an empty chunk; need at least one token")
    geometry = Geometry(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3], keys.device)
    if known not in (None, geometry):
        raise ShapeError(f"a chunk of {geometry} after chunks of {known}; clear() before changing it")
    if not copy:
        return keys.to(torch.bfloat16), values.to(torch.bfloat16), geometry
    copies = [torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device) for tensor in (keys, values)]
    return copies[0].copy_(keys), copies[1].copy_(values), geometry


def shared_by(heads: int, own: int) -> int:
    """Ranks that share a layer's ``heads``, of which each holds ``own``.

    >>> shared_by(40, 10), shared_by(40, 40)
    (4, 1)
    """
    return ceil_div(heads, own)
