"""Sealing with a transform code on a GPU: all streams of a tensor together, in torch operations on FP64 up to the coefficients.

Formulas stand in :mod:`quantwm_core.transform` and :mod:`quantwm_core.basis`. How many directions a stream has differs, so
rows are padded with zeros to the most. How many bits they get is decided on the host, which therefore waits: this runs
when the unit is waited for, not when it is begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantwm_core import allocation, basis
from quantwm_core.allocation import BLOCK
from quantwm_core.errors import ShapeError
from quantwm_core.transform import Allocate
from quantwm_kernels.triton import directions

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class Sources:
    """Streams that are to be coded; see :class:`quantwm_core.transform.Source`.

    Attributes:
        residual: FP64 ``[S, N, D]``.
        covariance, metric: FP64 ``[S, D, D]``.
        means: BF16 ``[S, D]``, as stored.
        exponents: int32 ``[S]``.
        loudness: FP64 ``[S]``.
    """

    residual: Tensor
    covariance: Tensor
    metric: Tensor
    means: Tensor
    exponents: Tensor
    loudness: Tensor


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
    """How streams are coded in a basis; see :class:`quantwm_core.transform.Plan`.

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
    if channels % BLOCK:
        raise ShapeError(f"head dimension {channels}: a transform code needs a multiple of {BLOCK}")
    sources = sources_of(values, metrics, damp)
    stored, plans = _in_basis(sources, allocate, kept, lifetime * values.numel(), (batch, heads))
    return encode(sources, plans, (batch, heads)) | stored.arrays


def sources_of(values: Tensor, metrics: Tensor | None, damp: float) -> Sources:
    """Streams of BF16 ``[B, H, N, D]``."""
    flat = values.flatten(0, 1)
    channels = flat.shape[2]
    exponents = torch.frexp(flat.float().abs().amax((1, 2))).exponent
    scaled = torch.ldexp(flat.double(), -exponents[:, None, None])
    mean = scaled.mean(1).to(torch.float32).bfloat16()
    residual = scaled - mean.double()[:, None]
    identity = torch.eye(channels, dtype=torch.float64, device=flat.device)
    metric, loudness = identity.expand(len(flat), -1, -1), torch.ones_like(scaled[:, 0, 0])
    if metrics is not None:
        wide = metrics.flatten(0, 1).double()
        average = wide.diagonal(dim1=1, dim2=2).mean(1)
        loudness = torch.where(average > 0, average, 1.0)
        metric = torch.where((average > 0)[:, None, None], wide / loudness[:, None, None], identity)
    return Sources(
        residual,
        residual.mT @ residual / residual.shape[1],
        metric + damp * identity,
        torch.ldexp(mean.float(), exponents[:, None]).bfloat16(),
        exponents,
        loudness * torch.ldexp(torch.ones_like(loudness), 2 * exponents),
    )


def fit(covariance: Tensor, metric: Tensor) -> Tensor:
    """Rows ``[S, D, D]`` that whiten the metric and decorrelate the covariance, largest energy first."""
    energies, vectors = torch.linalg.eigh(metric)
    root = energies.sqrt()[:, None]
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
    device = sources.residual.device
    coefficients = (sources.residual @ projector(plans.rows, sources.metric).mT).to(torch.float32)
    widths = np.zeros(plans.order.shape, np.int64)
    for row, blocks in zip(widths, plans.blocks, strict=True):
        own = allocation.widths(blocks)
        row[: len(own)] = own
    table = torch.from_numpy(widths).to(device)
    steps = directions.search_steps(coefficients, table)
    loud = torch.ldexp(steps.float(), sources.exponents[:, None]).bfloat16()
    return {
        "codes": directions.packed(coefficients, table, steps, plans.blocks.tolist()),
        "blocks": torch.from_numpy(plans.blocks).to(device).view(*shape, 3),
        "order": _flat(plans.order.to(torch.uint8), plans.rows.counts),
        "steps": _flat(loud, plans.rows.counts),
        "means": sources.means.view(*shape, -1),
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
    floor = torch.finfo(torch.float64).tiny
    saved = (old.distortion.clamp(min=floor) / new.distortion.clamp(min=floor)).log2().mean() / 2
    nbytes = sum(array.nbytes for array in made.arrays.values())
    return (made, new) if saved.item() * elements > 8 * nbytes else (before, old)


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
