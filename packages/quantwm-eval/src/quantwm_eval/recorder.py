"""Watches attention inside a rollout: real queries against exact and reconstructed keys and values.

The recorder keeps the exact BF16 tokens of sealed units, which the cache itself has dropped, until they are evicted. It
draws no random numbers and changes nothing that the model sees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from quantwm_core.stream import Span, cut, overlap
from quantwm_eval.evidence import Recording
from quantwm_eval.scoring import OF_CALLS, OF_TOKENS, Sealed, Sums, ages, gaps, of_call, of_tokens, tokens_of
from quantwm_eval.tally import Tally
from quantwm_kernels.chunk import SealedChunk
from quantwm_models.observer import CacheObserver

if TYPE_CHECKING:
    from quantwm_models.cache import LayerCache

TALLIES = (*OF_CALLS, *OF_TOKENS)
SPLIT = (*OF_CALLS[:2], *OF_TOKENS)


def sample_tokens(tokens: int, count: int, turn: int) -> Int64[np.ndarray, " sampled"]:
    """Indices of query tokens to look at: spread evenly over rows, columns and frames, others each turn.

    Multiples of about ``tokens`` over the golden ratio: a step that shares no factor with the grid that the tokens lie
    on, so that the sample never keeps to one column of the picture.

    >>> sorted(sample_tokens(8, 3, turn=0).tolist())
    [0, 2, 5]
    """
    step = max(1, round(tokens * 0.6180339887498949))
    while np.gcd(step, tokens) != 1:
        step += 1
    order = turn * count + np.arange(min(count, tokens))
    return order * step % tokens


@dataclass(frozen=True)
class _Unit:
    """Live tokens of a sealed unit, exact.

    Attributes:
        span: Absolute.
        keys: BF16 ``[B, H, n, D]``.
        values: Likewise.
    """

    span: Span
    keys: Tensor
    values: Tensor

    def part(self, span: Span) -> _Unit:
        """Some of its tokens, as a view."""
        tokens = slice(span.start - self.span.start, span.stop - self.span.start)
        return _Unit(span, self.keys[:, :, tokens], self.values[:, :, tokens])


def _no_sums() -> Float64[np.ndarray, "split 2 batch heads bins"]:
    return np.zeros((len(SPLIT), 2, 0, 0, 0))


@dataclass
class _Layer:
    """What the recorder holds of one layer.

    Attributes:
        exact: Live sealed tokens, ascending.
        calls: Attention calls seen.
        reads: By end of the read: ``[7, 2, B, H]`` sums in the order of ``TALLIES``.
        ages: ``[4, 2, B, H, ages]`` sums in the order of ``SPLIT``; no head before the first sealed token is read.
        positions: The same by position.
        moment: Sum of ``q q^T`` over all queries, ``[B, H, D, D]``; None before the first call.
        latest: Spans of the latest read and its sealed tokens: the passes of a chunk all read the same.
    """

    exact: list[_Unit] = field(default_factory=list)
    calls: int = 0
    reads: dict[int, Float64[np.ndarray, "tallies 2 batch heads"]] = field(default_factory=dict)
    ages: Float64[np.ndarray, "split 2 batch heads ages"] = field(default_factory=_no_sums)
    positions: Float64[np.ndarray, "split 2 batch heads positions"] = field(default_factory=_no_sums)
    moment: Tensor | None = None
    latest: tuple[tuple[Span, ...], Sealed | None] | None = None

    def add(self, end: int, tallies: slice, split: slice, sums: Sums) -> None:
        """Count sums in for some of the tallies."""
        self.reads[end][tallies] += sums.total
        self.ages = _grown(self.ages, split, sums.by_age)
        self.positions = _grown(self.positions, split, sums.by_position)

    def observe(self, queries: Tensor, heads: int) -> None:
        """Count all of a call's queries into the second moment."""
        batch, _, _, channels = queries.shape
        pooled = queries.detach().float().reshape(batch, heads, -1, channels)
        moment = pooled.mT @ pooled
        self.moment = moment if self.moment is None else self.moment.add_(moment)


class Recorder(CacheObserver):
    """Counts what reconstructed keys and values do to attention, per video, layer, head and read, and by token.

    One recorder watches one rollout, of one video or of a batch.

    Args:
        samples: Query tokens looked at per head, call and layer.

    Attributes:
        seconds: Time spent here, to be taken off the time of the rollout.
    """

    def __init__(self, samples: int = 32) -> None:
        self.samples = samples
        self.seconds = 0.0
        self._layers: dict[int, _Layer] = {}

    def sealed(self, cache: LayerCache, chunk: SealedChunk, keys: Tensor, values: Tensor) -> None:
        """Keep a unit's exact keys and values."""
        began = time.perf_counter()
        layer = self._layers.setdefault(cache.layer, _Layer())
        layer.exact.append(_Unit(Span(chunk.start, chunk.stop), keys.detach().clone(), values.detach().clone()))
        layer.latest = None
        self.seconds += time.perf_counter() - began

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        """Drop evicted tokens."""
        layer = self._layers.setdefault(cache.layer, _Layer())
        kept = []
        for unit in layer.exact:
            for left in cut((unit.span,), Span(start, stop)):
                part = unit.part(left)
                kept.append(unit if left == unit.span else _Unit(left, part.keys.clone(), part.values.clone()))
        layer.exact = kept
        layer.latest = None

    def attended(
        self,
        cache: LayerCache,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        spans: Sequence[Span],
    ) -> None:
        """Score a sample of the call's queries."""
        began = time.perf_counter()
        layer = self._layers.setdefault(cache.layer, _Layer())
        end, block = spans[-1].stop, queries.shape[2]
        layer.observe(queries, keys.shape[1])
        layer.reads.setdefault(end, np.zeros((len(TALLIES), 2, *keys.shape[:2])))
        if layer.latest is None or layer.latest[0] != tuple(spans):
            sealed = _sealed_tokens(layer.exact, spans, block)
            layer.latest = (tuple(spans), sealed)
            if sealed is not None:
                layer.add(end, slice(len(OF_CALLS), None), slice(2, None), of_tokens(keys, values, sealed))
        sealed = layer.latest[1]
        if sealed is not None:
            tokens = torch.from_numpy(sample_tokens(block, self.samples, layer.calls))
            sums = of_call(queries[:, :, tokens], keys, values, sealed)
            layer.add(end, slice(len(OF_CALLS)), slice(2), sums)
        layer.calls += 1
        self.seconds += time.perf_counter() - began

    def recordings(self) -> tuple[Recording, ...]:
        """What was counted, one recording per video of the batch."""
        if not self._layers:
            return ()
        layers = [self._layers[index] for index in sorted(self._layers)]
        ends = sorted({end for layer in layers for end in layer.reads})
        shape = next((found.shape for layer in layers for found in layer.reads.values()), (len(TALLIES), 2, 0, 0))
        reads = np.array([[layer.reads.get(end, np.zeros(shape)) for end in ends] for layer in layers])
        reads = reads.reshape(len(layers), len(ends), *shape).transpose(4, 2, 3, 0, 5, 1)
        by_age = _joined([layer.ages for layer in layers], shape[2:])
        by_position = _joined([layer.positions for layer in layers], shape[2:])
        spectra = _spectra([layer.moment for layer in layers if layer.moment is not None])
        return tuple(_recording(*parts) for parts in zip(reads, by_age, by_position, spectra, strict=True))


def _grown(
    held: Float64[np.ndarray, "split 2 batch heads bins"], split: slice, sums: Float64[np.ndarray, "..."]
) -> Float64[np.ndarray, "split 2 batch heads more"]:
    """Sums held so far, with more of them added to some of the tallies and bins appended where they need them."""
    old, bins = held.shape[-1], sums.shape[-1]
    grown = np.zeros((*held.shape[:2], *sums.shape[2:4], max(old, bins)))
    if old:
        grown[..., :old] = held
    grown[split, ..., :bins] += sums
    return grown


def _joined(
    sums: Sequence[Float64[np.ndarray, "split 2 batch heads bins"]], shape: tuple[int, ...]
) -> Float64[np.ndarray, "batch split 2 layers heads bins"]:
    """Sums of all layers, as wide as the widest."""
    grid = np.zeros((len(sums), len(SPLIT), 2, *shape, max(one.shape[-1] for one in sums)))
    for layer, one in zip(grid, sums, strict=True):
        if one.shape[-1]:
            layer[..., : one.shape[-1]] = one
    return grid.transpose(3, 1, 2, 0, 4, 5)


def _spectra(moments: Sequence[Tensor]) -> Float64[np.ndarray, "batch layers heads channels"]:
    """Eigenvalues of second moments, descending."""
    values = torch.linalg.eigvalsh(torch.stack([moment.double().cpu() for moment in moments], 1))
    return values.flip(-1).clamp(min=0).numpy()


def _recording(
    sums: Float64[np.ndarray, "tallies 2 layers heads reads"],
    by_age: Float64[np.ndarray, "split 2 layers heads ages"],
    by_position: Float64[np.ndarray, "split 2 layers heads positions"],
    spectrum: Float64[np.ndarray, "layers heads channels"],
) -> Recording:
    split = {name: (*age, *position) for name, age, position in zip(SPLIT, by_age, by_position, strict=True)}
    tallies = {name: Tally(*pair, *split.get(name, ())) for name, pair in zip(TALLIES, sums, strict=True)}
    return Recording(**tallies, spectrum=spectrum)


def _sealed_tokens(exact: Sequence[_Unit], spans: Sequence[Span], block: int) -> Sealed | None:
    """The sealed tokens of a read of ``spans``; None where there are none."""
    columns: list[slice] = []
    parts: list[_Unit] = []
    offset = 0
    for read in spans:
        for unit in exact:
            common = overlap(read, unit.span)
            if common is not None:
                first = offset + common.start - read.start
                begun = columns.pop().start if columns and columns[-1].stop == first else first
                columns.append(slice(begun, first + common.tokens))
                parts.append(unit.part(common))
        offset += read.tokens
    if not parts:
        return None
    tokens, rest = tokens_of([part.span for part in parts]), gaps(columns, offset)
    end = spans[-1].stop if rest else spans[-1].stop + block  # a host that rebuilds its cache holds what it makes apart
    return Sealed(
        tuple(columns),
        rest,
        torch.cat([part.keys for part in parts], 2).float(),
        torch.cat([part.values for part in parts], 2).float(),
        ages(tokens, end, block),
        tokens // block,
    )
