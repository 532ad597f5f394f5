"""Groups along the tokens of a channel, groups with a real-valued minimum, rotations: baselines, in torch operations.

Formulas in :mod:`quantwm_core.methods.rtn`, :mod:`quantwm_core.minmax` and :mod:`quantwm_core.methods.oscar`. Torch rounds as NumPy does, and
divides so by a tensor; by a number it multiplies by the reciprocal on a GPU, which differs in the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantwm_core.affine import LEVELS
from quantwm_core.allocation import check_channels
from quantwm_core.methods.oscar import SHARES, hadamard
from quantwm_kernels.affine import AffineCode
from quantwm_kernels.triton import packing, scales
from quantwm_kernels.triton.basis import Rows, Stored, fit, kept_rows, normalised, projector, store
from quantwm_kernels.triton.layer import Arrays
from quantwm_kernels.triton.transform_sealing import power_of_two, residuals, streams_at_once


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


def encode_rotated(
    values: Tensor, moment: Tensor | None, kept: Mapping[str, Tensor] | None, size: int, *, own: bool
) -> Arrays:
    """Arrays of a rotated tensor, of which a host waits for the rotation.

    Args:
        values: BF16 ``[B, H, N, D]``, finite.
        moment: FP32 ``[B, H, D, D]`` of past queries, or None.
        kept: Arrays of a sealed tensor whose rotation fits.
        size: Rotated channels of a group.
        own: Whether the rotation is fitted to the values themselves.

    Raises:
        ShapeError: The head dimension is no multiple of eight.
    """
    batch, heads, tokens, channels = values.shape
    check_channels(channels, "oscar")
    flat = values.flatten(0, 1)
    exponents = torch.frexp(flat.abs().amax((1, 2)).float()).exponent
    unmoved = torch.zeros((len(flat), channels), dtype=torch.float64, device=values.device)
    if own:
        moment = torch.cat([part.mT @ part / tokens for part in residuals(flat, unmoved, exponents)])
    elif moment is None:
        moment = unmoved.new_zeros(len(flat), channels, channels)
    moments, average = normalised(moment)
    fitted, stored = _rotation(kept, moments, average > 0, (batch, heads))
    forward = projector(stored.rows, torch.eye(channels, dtype=torch.float64, device=values.device))
    several = (part.split(streams_at_once(flat)) for part in (forward, stored.rows.rows, moments))
    parts = [
        _searched(scaled @ own_forward.mT, rows, metric, size)
        for scaled, own_forward, rows, metric in zip(residuals(flat, unmoved, exponents), *several, strict=True)
    ]
    codes, step, low = (torch.cat(part).view(batch, heads, tokens, -1) for part in zip(*parts, strict=True))
    loudness = power_of_two(exponents).view(batch, heads, 1, 1)
    scales, minima = ((part.double() * loudness).float().bfloat16() for part in (step, low))
    return {"codes": codes, "scales": scales, "minima": minima, "shared_fitted": fitted, **stored.arrays}


def _searched(rotated: Tensor, rows: Tensor, metric: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, steps and minima of FP64 ``[few, N, D]`` with the shares whose errors cost least; first of equals."""
    least = torch.full_like(rotated[:, 0, 0], torch.inf)
    best: tuple[Tensor, ...] = ()
    for share in SHARES:
        codes, step, low = encode_minmax(_clipped(rotated, size, share), size)
        wide = [part.float().repeat_interleave(size, -1)[..., : rotated.shape[2]] for part in (step, low)]
        error = ((wide[1] + codes * wide[0]).double() - rotated) @ rows
        cost = ((error @ metric) * error).sum((1, 2))
        better = (cost < least)[:, None, None]
        tried = (codes, step, low)
        best = tuple(torch.where(better, *pair) for pair in zip(tried, best, strict=True)) if best else tried
        least = torch.minimum(cost, least)
    codes, step, low = best
    return packing.pack(codes), step, low


def _rotation(
    kept: Mapping[str, Tensor] | None, moments: Tensor, known: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Stored]:
    """Which streams' rotations are fitted, and these: those of the unit before unless more can be fitted now."""
    if kept is not None and not (known & (kept["shared_fitted"].flatten() == 0)).any():
        return kept["shared_fitted"], kept_rows(kept)
    channels = moments.shape[-1]
    mix = torch.tensor(hadamard(channels), device=moments.device)
    rows = mix @ fit(moments, torch.eye(channels, dtype=torch.float64, device=moments.device).expand_as(moments))
    return known.to(torch.uint8).view(shape), store(Rows(rows, [channels] * len(rows)), shape)


def _clipped(rotated: Tensor, size: int, share: float) -> Tensor:
    """FP32: every group of a token cut to the middle ``share`` of its range."""
    parts = []
    for group in rotated.split(size, -1):
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        cut = (high - low) * (1 - share) / 2
        parts.append(torch.minimum(torch.maximum(group, low + cut), high - cut))
    return torch.cat(parts, -1).float()
