"""Sealing with a transform code on a GPU: all streams of a tensor together, in torch operations on FP64 up to the coefficients.

Formulas stand in :mod:`quantwm_core.transform_plan` and :mod:`quantwm_core.basis`. How many directions a stream has differs, so
rows are padded with zeros to the most. How many bits they get is decided on the host, which therefore waits: this runs
when the unit is waited for, not when it is begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantwm_core import allocation, basis
from quantwm_core.allocation import BLOCK
from quantwm_core.transform_plan import Allocate
from quantwm_kernels.triton import directions
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


class Rows(NamedTuple):
    """Directions of streams: FP64 ``[S, R, D]``, zero beyond the count of each stream."""

    rows: Tensor
    counts: Sequence[int]

    @classmethod
    def first(cls, rows: Tensor, counts: Sequence[int]) -> Rows:
        """The first rows of each stream, as many as ``counts`` says."""
        taken = cls(rows[:, : max(counts)], counts)
        return taken._replace(rows=taken.rows * taken.known[..., None])

    @property
    def known(self) -> Tensor:
        """Bool ``[S, R]``: which rows are of directions."""
        counts = torch.tensor(self.counts, device=self.rows.device)
        return torch.arange(self.rows.shape[1], device=self.rows.device) < counts[:, None]


class Stored(NamedTuple):
    """A basis as it is stored, and its rows."""

    arrays: Arrays
    rows: Rows


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


def normalised(moments: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`quantwm_core.basis.normalised` of streams ``[.., D, D]``: FP64 ``[S, D, D]`` and ``[S]``."""
    channels = moments.shape[-1]
    wide = moments.reshape(-1, channels, channels).double()
    average = wide.diagonal(dim1=1, dim2=2).mean(1)
    known = (average > 0)[:, None, None]
    identity = torch.eye(channels, dtype=torch.float64, device=moments.device)
    return torch.where(known, wide / torch.where(known, average[:, None, None], 1.0), identity), average


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


def fit(covariance: Tensor, metric: Tensor) -> Tensor:
    """Rows ``[S, D, D]`` that whiten the metric and decorrelate the covariance, largest energy first."""
    energies, vectors = torch.linalg.eigh(metric)
    root = torch.maximum(energies, basis.RIDGE * energies[:, -1:]).sqrt()[:, None]
    whiten, restore = (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT
    rows = (restore @ torch.linalg.eigh(whiten @ covariance @ whiten).eigenvectors.flip(2)).mT
    largest = rows.gather(2, rows.abs().argmax(2, keepdim=True))
    return rows * torch.where(largest < 0, -1.0, 1.0)


def store(rows: Rows, shape: tuple[int, int]) -> Stored:
    """Round rows to INT8."""
    scales = (rows.rows.abs().amax(2) / basis.ROW_MAX).to(torch.float32).bfloat16()
    step = scales.double()[..., None]
    whole = (rows.rows / torch.where(step > 0, step, torch.inf)).round().clamp(-basis.ROW_MAX, basis.ROW_MAX)
    blocks = torch.tensor([count // BLOCK for count in rows.counts], dtype=torch.uint8).view(shape)
    parts = (_flat(whole.to(torch.int8), rows.counts), _flat(scales, rows.counts), blocks.to(scales.device))
    return Stored(dict(zip(basis.PARTS, parts, strict=True)), Rows(whole * step, rows.counts))


def kept_rows(arrays: Mapping[str, Tensor]) -> Stored:
    """The basis of a sealed tensor; its arrays are handed on as they are."""
    whole, scales, blocks = (arrays[part] for part in basis.PARTS)
    counts = [BLOCK * count for count in blocks.flatten().tolist()]
    wide = _padded(whole.double() * scales.double()[:, None], counts)
    return Stored({part: arrays[part] for part in basis.PARTS}, Rows(wide, counts))


def projector(rows: Rows, metric: Tensor) -> Tensor:
    """``[S, R, D]`` that makes of a vector its coefficients, zero for rows that are none."""
    weighted = rows.rows @ metric
    gram = weighted @ rows.rows.mT
    known = rows.known
    trace = gram.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
    ridge = basis.RIDGE * trace / known.sum(1, keepdim=True).clamp(min=1)
    return torch.linalg.solve(gram + torch.diag_embed(torch.where(known, ridge, 1.0)), weighted)


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
        "order": _flat(plans.order.to(torch.uint8), plans.rows.counts),
        "steps": _flat(loud, plans.rows.counts),
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


def _flat(padded: Tensor, counts: Sequence[int]) -> Tensor:
    """The first elements of each stream, one stream behind the other."""
    return torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)])


def _padded(flat: Tensor, counts: Sequence[int]) -> Tensor:
    """Inverse of :func:`_flat`, zeros in between."""
    padded = flat.new_zeros(len(counts), max(counts), *flat.shape[1:])
    for part, own in zip(padded, flat.split(list(counts)), strict=True):
        part[: len(own)] = own
    return padded
