"""Groups along the tokens of a channel, and groups with a real-valued minimum: baselines, in plain torch operations.

Formulas in :mod:`quantwm_core.methods.rtn` and :mod:`quantwm_core.minmax`. Torch rounds as NumPy does, and
divides so by a tensor; by a number it multiplies by the reciprocal on a GPU, which differs in the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantwm_core.affine import LEVELS
from quantwm_kernels.affine import AffineCode
from quantwm_kernels.triton import packing, scales


def encode_channels(values: Tensor, size: int) -> AffineCode:
    """Affine INT2 in groups of ``size`` consecutive tokens of a channel; ``[B, H, N, D]`` BF16."""
    batch, heads, tokens, _ = values.shape
    # Zeros fill the last group up: they change no range that includes zero.
    grouped = pad(values.float(), (0, 0, 0, -tokens % size)).unflatten(2, (-1, size)).transpose(3, 4)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    width = high - low
    stored, super_scale = scales.encode(width / torch.full_like(width, LEVELS))
    step = scales.decode(stored, super_scale)
    divisor = torch.where(step > 0, step, 1.0)
    zero_points = (-low / divisor).round().clamp(0, LEVELS)
    codes = ((grouped / divisor[..., None]).round() + zero_points[..., None]).clamp(0, LEVELS)
    by_token = codes.transpose(3, 4).flatten(2, 3)[:, :, :tokens].to(torch.uint8)
    packed_zero_points = packing.pack(zero_points.to(torch.uint8).view(batch, heads, -1))
    return AffineCode(packing.pack(by_token), stored, packed_zero_points, super_scale)


def encode_minmax(rows: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric INT2 along the last axis in groups of ``size``, a ragged last group a smaller one.

    Args:
        rows: BF16 ``[.., rows, n]``.
        size: Elements of a group.

    Returns:
        uint8 codes, not packed; BF16 scales and minima ``[.., rows, groups]``.
    """
    length = rows.shape[-1]
    wide = rows.float()
    # The last element fills the last group up: it changes neither minimum nor maximum.
    filled = torch.cat([wide, wide[..., -1:].expand(*wide.shape[:-1], -length % size)], -1).unflatten(-1, (-1, size))
    low = filled.amin(-1).bfloat16()
    width = filled.amax(-1) - low.float()
    step = (width / torch.full_like(width, LEVELS)).bfloat16()
    divisor = torch.where(step > 0, step.float(), torch.inf)[..., None]
    codes = ((filled - low.float()[..., None]) / divisor).round().clamp(0, LEVELS)
    return codes.flatten(-2)[..., :length].to(torch.uint8), step, low
