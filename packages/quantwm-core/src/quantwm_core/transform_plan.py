"""How a transform code spends its bits: which directions of a basis a stream codes, and whether a new basis is worth its bytes.

Streams are taken in FP64 from a power of two, one by one, so neither scale nor company changes a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import BFloat16, Float64, Int64, UInt8

from quantwm_core import allocation, basis
from quantwm_core.allocation import BLOCK
from quantwm_core.arguments import explain_errors
from quantwm_core.basis import Basis
from quantwm_core.domain import BF16, binary_exponent

Allocate = Callable[[Sequence[Float64[np.ndarray, " _blocks"]]], UInt8[np.ndarray, "streams 3"]]
"""Blocks of 8, 4 and 2 bits for every stream, given the energies of their blocks in descending order."""


@dataclass(frozen=True)
class Source:
    """A stream that is to be coded.

    Attributes:
        residual: FP64 ``[N, D]``, without the mean, scaled by a power of two.
        covariance: Of the residual.
        metric: What an error costs, scaled to a mean of about 1 a channel.
        mean: BF16, as stored.
        exponent: The residual is the tensor's over ``2**exponent``.
        loudness: What an error of the tensor costs over what the metric says of the residual's.
    """

    residual: Float64[np.ndarray, "tokens channels"]
    covariance: Float64[np.ndarray, "channels channels"]
    metric: Float64[np.ndarray, "channels channels"]
    mean: BFloat16[np.ndarray, " channels"]
    exponent: int
    loudness: float


@dataclass(frozen=True)
class Plan:
    """How a stream is coded in a basis.

    Attributes:
        order: Rows of the basis that get bits, by descending energy.
        counts: Blocks of 8, 4 and 2 bits.
        rows: Those rows, FP64.
        distortion: Expected error over the energy of the stream.
    """

    order: Int64[np.ndarray, " coded"]
    counts: UInt8[np.ndarray, "3"]
    rows: Float64[np.ndarray, "coded channels"]
    distortion: float


def sources(
    values: BFloat16[np.ndarray, "batch heads tokens channels"],
    metrics: Float64[np.ndarray, "batch heads channels channels"],
    damp: float,
) -> list[Source]:
    """Streams of a tensor; arguments as :func:`quantwm_core.transform.seal` takes them.

    Raises:
        ShapeError: The head dimension is no multiple of eight.
    """
    batch, heads, _, channels = values.shape
    allocation.check_channels(channels)
    return [_source(values[place], metrics[place], damp) for place in np.ndindex(batch, heads)]


def fit(streams: Sequence[Source], allocate: Allocate, shape: tuple[int, int]) -> tuple[Basis, list[Plan]]:
    """A basis for these streams, of only those directions that get bits, and the plans in it."""
    rows = [basis.fit(source.covariance, source.metric) for source in streams]
    kept = [each[: len(plan.order)] for each, plan in zip(rows, plans(streams, rows, allocate), strict=True)]
    made = basis.store(kept, shape)
    return made, plans(streams, [basis.wide(*each) for each in made.streams()], allocate)


def plans(
    streams: Sequence[Source], rows: Sequence[Float64[np.ndarray, "_directions channels"]], allocate: Allocate
) -> list[Plan]:
    """Order the directions of each stream by energy and give them bits."""
    ranked = [_rank(source, each) for source, each in zip(streams, rows, strict=True)]
    loud = [energies * source.loudness for source, (_, energies) in zip(streams, ranked, strict=True)]
    counts = allocate([_by_block(energies) for energies in loud])
    return [
        _plan(source, each, order, energies, count)
        for source, each, (order, energies), count in zip(streams, rows, ranked, counts, strict=True)
    ]


def in_basis(
    streams: Sequence[Source], allocate: Allocate, kept: Basis | None, shape: tuple[int, int], elements: float
) -> tuple[Basis, list[Plan]]:
    """The basis of the units before, or a new one if there is none or if that is worth its bytes.

    Args:
        streams: What is to be coded.
        allocate: Gives bits.
        kept: Basis of the unit before.
        shape: Batch and heads.
        elements: Elements of the units that are expected to share a new one; 0 never makes one beside ``kept``.
    """
    if kept is None:
        return fit(streams, allocate, shape)
    old = plans(streams, [basis.wide(*each) for each in kept.streams()], allocate)
    if elements == 0:
        return kept, old
    made, new = fit(streams, allocate, shape)
    return (made, new) if _saved_bits(old, new) * elements > 8 * made.nbytes else (kept, old)


def _source(values: np.ndarray, metric: np.ndarray, damp: float) -> Source:
    exponent = int(binary_exponent(values).item())
    scaled = np.ldexp(np.ascontiguousarray(values, np.float64), -exponent)
    mean = scaled.mean(axis=0).astype(np.float32).astype(BF16)
    residual = scaled - mean.astype(np.float64)
    normal, average = basis.normalised(metric)
    return Source(
        residual,
        residual.T @ residual / len(residual),
        normal + damp * np.eye(values.shape[1]),
        np.ldexp(mean.astype(np.float32), exponent).astype(BF16),
        exponent,
        (float(average) if average > 0 else 1.0) * 4.0**exponent,
    )


def _rank(
    source: Source, rows: Float64[np.ndarray, "directions channels"]
) -> tuple[Int64[np.ndarray, " directions"], Float64[np.ndarray, " directions"]]:
    """Directions by descending energy, ties by place; and the energies."""
    forward = basis.projector(rows, source.metric)
    variances = np.einsum("id,de,ie->i", forward, source.covariance, forward, optimize=True)
    costs = np.einsum("id,de,ie->i", rows, source.metric, rows, optimize=True)
    energies = np.maximum(variances * costs, 0.0)
    order = np.argsort(-energies, kind="stable")
    return order, energies[order]


def _plan(
    source: Source,
    rows: Float64[np.ndarray, "directions channels"],
    order: Int64[np.ndarray, " directions"],
    energies: Float64[np.ndarray, " directions"],
    counts: UInt8[np.ndarray, "3"],
) -> Plan:
    taken = order[: allocation.directions(counts)]
    own = rows[taken]
    explained = np.einsum("id,de,ei->", basis.projector(own, source.metric), source.covariance, source.metric @ own.T)
    total = float(np.sum(source.metric * source.covariance))
    error = max(total - float(explained), 0.0) + allocation.distortion(_by_block(energies[: len(taken)]), counts)
    return Plan(taken, counts, own, error / total if total > 0 else 0.0)


def _saved_bits(old: Sequence[Plan], new: Sequence[Plan]) -> float:
    """Bits an element that codes in the new basis save, once those in the old one grow to be as good, at 6 dB a bit."""
    floor = np.finfo(np.float64).tiny
    ratios = [max(a.distortion, floor) / max(b.distortion, floor) for a, b in zip(old, new, strict=True)]
    return float(np.mean(np.log2(ratios))) / 2 + _rate(old) - _rate(new)


def _rate(coded: Sequence[Plan]) -> float:
    """Code bits an element."""
    return float(np.mean([8 * allocation.token_bytes(plan.counts) / plan.rows.shape[1] for plan in coded]))


def _by_block(energies: Float64[np.ndarray, " directions"]) -> Float64[np.ndarray, " blocks"]:
    return energies.reshape(-1, BLOCK).sum(axis=1)


explain_errors(globals())
