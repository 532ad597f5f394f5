"""Sealing with a transform code on a GPU: all streams of a tensor together, in torch operations on FP64 up to the coefficients.

Formulas stand in :mod:`quantwm_core.transform_plan`. How many bits directions get is decided on the host, which therefore
waits: this runs when the unit is waited for, not when it is begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantwm_core import allocation
from quantwm_core.allocation import BLOCK
from quantwm_core.transform_plan import Allocate
from quantwm_kernels.triton import directions
from quantwm_kernels.triton.basis import Rows, Stored, fit, flattened, kept_rows, normalised, projector, store
from quantwm_kernels.triton.layer import Arrays

MOST_WIDE = 1 << 25
"""FP64 elements of residuals that are in memory at once: 256 MiB."""


@dataclass(frozen=True)
class Sources:
    """Streams that are to be coded; see :class:`quantwm_core.transform_plan.Source`.

    Attributes:
        values: BF16 ``[S, N, D]``.
        scaled_means: FP64 ``[S, D]``, means over ``2**exponents``, rounded as they are stored.
        covariance, metric: FP64 ``[S, D, D]``.
        exponents: int32 ``[S]``.
        loudness: FP64 ``[S]``.
    """

    values: Tensor
    scaled_means: Tensor
    exponents: Tensor
    covariance: Tensor
    metric: Tensor
    loudness: Tensor

    def coefficients(self, forward: Tensor) -> Tensor:
        """FP32 ``[S, N, K]``: what FP64 ``forward`` ``[S, K, D]`` makes of the residuals."""
        parts = [
            residual @ own.mT
            for residual, own in zip(
                residuals(self.values, self.scaled_means, self.exponents),
                forward.split(streams_at_once(self.values)),
                strict=True,
            )
        ]
        return torch.cat([part.to(torch.float32) for part in parts])


@dataclass(frozen=True)
class Plans:
    """How streams are coded in a basis; see :class:`quantwm_core.transform_plan.Plan`.

    Attributes:
        order: int64 ``[S, K]``, padded.
        blocks: Blocks of 8, 4 and 2 bits, uint8 ``[S, 3]`` on the host.
        rows: Of the directions that get bits.
        distortion: FP64 ``[S]``.
    """

    order: Tensor
    blocks: np.ndarray
    rows: Rows
    distortion: Tensor


def seal(
    values: Tensor,
    metrics: Tensor | None,
    damp: float,
    allocate: Allocate,
    kept: Mapping[str, Tensor] | None,
    lifetime: float,
) -> Arrays:
    """Arrays of a sealed tensor; :func:`quantwm_core.transform.seal` on a device.

    Args:
        values: BF16 ``[B, H, N, D]``, finite.
        metrics: FP32 ``[B, H, D, D]``; None where every error counts the same.
        damp: Share of the identity that is added to a metric of mean 1.
        allocate: Gives bits.
        kept: Arrays of a sealed tensor with a basis that fits.
        lifetime: Units that are expected to share a new basis; 0 makes none beside ``kept``.
    """
    batch, heads, _, channels = values.shape
    allocation.check_channels(channels)
    sources = sources_of(values, metrics, damp)
    stored, plans = _in_basis(sources, allocate, kept, lifetime * values.numel(), (batch, heads))
    return encode(sources, plans, (batch, heads)) | stored.arrays


def sources_of(values: Tensor, metrics: Tensor | None, damp: float) -> Sources:
    """Streams of BF16 ``[B, H, N, D]``."""
    flat = values.flatten(0, 1)
    channels = flat.shape[2]
    exponents = torch.frexp(flat.abs().amax((1, 2)).float()).exponent
    means = flat.mean(1, dtype=torch.float64) * power_of_two(-exponents)[:, None]
    scaled_means = means.to(torch.float32).bfloat16().double()
    tokens = flat.shape[1]
    covariance = torch.cat([part.mT @ part / tokens for part in residuals(flat, scaled_means, exponents)])
    metric, average = normalised(torch.zeros_like(covariance) if metrics is None else metrics)
    damped = metric + damp * torch.eye(channels, dtype=torch.float64, device=flat.device)
    loudness = torch.where(average > 0, average, 1.0) * power_of_two(2 * exponents)
    return Sources(flat, scaled_means, exponents, covariance, damped, loudness)


def residuals(values: Tensor, scaled_means: Tensor, exponents: Tensor) -> Iterator[Tensor]:
    """FP64 ``[few, N, D]``: values over ``2**exponents`` without their means, a few streams at a time."""
    scales = power_of_two(-exponents)
    several = (part.split(streams_at_once(values)) for part in (values, scales, scaled_means))
    for part, scale, mean in zip(*several, strict=True):
        yield part.double() * scale[:, None, None] - mean[:, None]


def streams_at_once(values: Tensor) -> int:
    """Streams ``[S, N, D]`` whose residuals are in memory together."""
    return max(1, MOST_WIDE // (values.shape[1] * values.shape[2]))


def power_of_two(exponents: Tensor) -> Tensor:
    """FP64 ``2**e`` to the bit, for integers from -1022 to 1023.

    >>> power_of_two(torch.tensor([-3, 0, 140])).tolist()
    [0.125, 1.0, 1.393796574908164e+42]
    """
    return (exponents.to(torch.int64) + 1023 << 52).view(torch.float64)


def plans_of(sources: Sources, rows: Rows, allocate: Allocate) -> Plans:
    """Order the directions of each stream by energy and give them bits."""
    forward = projector(rows, sources.metric)
    variances = ((forward @ sources.covariance) * forward).sum(2)
    costs = ((rows.rows @ sources.metric) * rows.rows).sum(2)
    energies = torch.where(rows.known, (variances * costs).clamp(min=0), -1.0)
    energies, order = energies.sort(dim=1, descending=True, stable=True)
    host, loud = energies.cpu().numpy(), (energies * sources.loudness[:, None]).cpu().numpy()
    blocks = allocate([_by_block(each[:count]) for each, count in zip(loud, rows.counts, strict=True)])
    coded = [allocation.directions(each) for each in blocks]
    taken = Rows.first(rows.rows.gather(1, order[..., None].expand(-1, -1, rows.rows.shape[2])), coded)
    explained = ((projector(taken, sources.metric) @ sources.covariance) * (taken.rows @ sources.metric)).sum((1, 2))
    total = (sources.metric * sources.covariance).sum((1, 2))
    left = [
        allocation.distortion(_by_block(each[:count]), own)
        for each, count, own in zip(host, coded, blocks, strict=True)
    ]
    error = (total - explained).clamp(min=0) + torch.tensor(left, dtype=torch.float64, device=total.device)
    return Plans(order[:, : max(coded)], blocks, taken, torch.where(total > 0, error / total, 0.0))


def encode(sources: Sources, plans: Plans, shape: tuple[int, int]) -> Arrays:
    """Codes, and all else but the basis."""
    device = sources.values.device
    coefficients = sources.coefficients(projector(plans.rows, sources.metric))
    widths = np.zeros(plans.order.shape, np.int64)
    for row, blocks in zip(widths, plans.blocks, strict=True):
        own = allocation.widths(blocks)
        row[: len(own)] = own
    table = torch.from_numpy(widths).to(device)
    steps = directions.search_steps(coefficients, table)
    loudness = power_of_two(sources.exponents)[:, None]
    loud, means = ((part.double() * loudness).to(torch.float32).bfloat16() for part in (steps, sources.scaled_means))
    return {
        "codes": directions.packed(coefficients, table, steps, plans.blocks.tolist()),
        "blocks": torch.from_numpy(plans.blocks).to(device).view(*shape, 3),
        "order": flattened(plans.order.to(torch.uint8), plans.rows.counts),
        "steps": flattened(loud, plans.rows.counts),
        "means": means.view(*shape, -1),
    }


def _in_basis(
    sources: Sources,
    allocate: Allocate,
    kept: Mapping[str, Tensor] | None,
    elements: float,
    shape: tuple[int, int],
) -> tuple[Stored, Plans]:
    """The basis of the unit before, or a new one if there is none or if that is worth its bytes."""
    if kept is None:
        return _fitted(sources, allocate, shape)
    before = kept_rows(kept)
    old = plans_of(sources, before.rows, allocate)
    if elements == 0:
        return before, old
    made, new = _fitted(sources, allocate, shape)
    nbytes = sum(array.nbytes for array in made.arrays.values())
    return (made, new) if _saved_bits(old, new) * elements > 8 * nbytes else (before, old)


def _saved_bits(old: Plans, new: Plans) -> float:
    """Bits an element that codes in the new basis save, once those in the old one grow to be as good, at 6 dB a bit."""
    floor = torch.finfo(torch.float64).tiny
    ratios = old.distortion.clamp(min=floor) / new.distortion.clamp(min=floor)
    return ratios.log2().mean().item() / 2 + _rate(old) - _rate(new)


def _rate(plans: Plans) -> float:
    """Code bits an element."""
    channels = plans.rows.rows.shape[2]
    return float(np.mean([8 * allocation.token_bytes(own) / channels for own in plans.blocks]))


def _fitted(sources: Sources, allocate: Allocate, shape: tuple[int, int]) -> tuple[Stored, Plans]:
    """A basis of only those directions that get bits, and the plans in it."""
    rows = fit(sources.covariance, sources.metric)
    streams, channels = rows.shape[:2]
    counts = plans_of(sources, Rows(rows, [channels] * streams), allocate).rows.counts
    made = store(Rows.first(rows, counts), shape)
    return made, plans_of(sources, made.rows, allocate)


def _by_block(energies: np.ndarray) -> np.ndarray:
    return np.asarray(energies.reshape(-1, BLOCK).sum(axis=1))
