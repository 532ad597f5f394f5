"""Watches attention inside a rollout: real queries against exact and reconstructed keys.

The recorder keeps the exact BF16 keys of sealed units, which the cache itself has dropped, until they are evicted. It
draws no random numbers and changes nothing that the model sees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from quantwm_core.stream import Span, cut, overlap
from quantwm_eval.evidence import Recording
from quantwm_kernels.chunk import SealedChunk
from quantwm_models.observer import CacheObserver

if TYPE_CHECKING:
    from quantwm_models.cache import LayerCache

FIELDS = ("queries", "shifted", "error_energy", "logit_energy")


def share(
    part: Float64[np.ndarray, "..."], whole: Float64[np.ndarray, "..."], axis: int | tuple[int, ...] | None = None
) -> Any:
    """Sum of ``part`` over sum of ``whole``, NaN where the latter is zero.

    >>> share(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[2.0, 0.0], [2.0, 0.0]]), axis=0)
    array([0.5, nan])
    """
    above, below = part.sum(axis), whole.sum(axis)
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)


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
class _Sealed:
    """Sealed tokens of one read.

    Attributes:
        columns: Where they stand in the read.
        exact: Their exact keys, FP32 ``[B, H, n, D]``.
    """

    columns: tuple[slice, ...]
    exact: Tensor


@dataclass
class _Layer:
    """What the recorder holds of one layer.

    Attributes:
        exact: Absolute span and BF16 keys ``[B, H, n, D]`` of live sealed tokens, ascending.
        calls: Attention calls seen.
        reads: By end of the read: ``[4, B, H]`` sums in the order of ``FIELDS``.
        latest: Spans of the latest read and its sealed tokens: the passes of a chunk all read the same.
    """

    exact: list[tuple[Span, Tensor]] = field(default_factory=list)
    calls: int = 0
    reads: dict[int, Float64[np.ndarray, "4 batch heads"]] = field(default_factory=dict)
    latest: tuple[tuple[Span, ...], _Sealed | None] | None = None


class Recorder(CacheObserver):
    """Counts selection shifts and logit errors over sealed tokens, per video, layer, head and read.

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
        """Keep a unit's exact keys."""
        began = time.perf_counter()
        layer = self._layers.setdefault(cache.layer, _Layer())
        layer.exact.append((Span(chunk.start, chunk.stop), keys.detach().clone()))
        layer.latest = None
        self.seconds += time.perf_counter() - began

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        """Drop evicted tokens."""
        layer = self._layers.setdefault(cache.layer, _Layer())
        kept = []
        for span, keys in layer.exact:
            for left in cut((span,), Span(start, stop)):
                whole = left == span
                kept.append(
                    (left, keys if whole else keys[:, :, left.start - span.start : left.stop - span.start].clone())
                )
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
        sums = layer.reads.setdefault(spans[-1].stop, np.zeros((len(FIELDS), *keys.shape[:2])))
        if layer.latest is None or layer.latest[0] != tuple(spans):
            layer.latest = (tuple(spans), _sealed_tokens(layer.exact, spans))
        sealed = layer.latest[1]
        if sealed is not None:
            tokens = torch.from_numpy(sample_tokens(queries.shape[2], self.samples, layer.calls))
            parts = [keys[:, :, columns] for columns in sealed.columns]
            read = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
            sums += _score(queries[:, :, tokens], sealed.exact, read.float())
        layer.calls += 1
        self.seconds += time.perf_counter() - began

    def recordings(self) -> tuple[Recording, ...]:
        """What was counted, one recording per video of the batch."""
        if not self._layers:
            return ()
        layers = [self._layers[index] for index in sorted(self._layers)]
        ends = sorted({end for layer in layers for end in layer.reads})
        template = np.zeros_like(next(iter(layers[0].reads.values()))) if layers[0].reads else np.zeros((4, 0, 0))
        sums = np.array([[layer.reads.get(end, template) for end in ends] for layer in layers])
        by_video = sums.transpose(3, 2, 0, 4, 1)  # layer, read, field, video, head -> video, field, layer, head, read
        return tuple(Recording(**dict(zip(FIELDS, fields, strict=True))) for fields in by_video)


def _sealed_tokens(exact: Sequence[tuple[Span, Tensor]], spans: Sequence[Span]) -> _Sealed | None:
    """The sealed tokens of a read of ``spans``; None where there are none."""
    columns: list[slice] = []
    parts = []
    offset = 0
    for read in spans:
        for span, keys in exact:
            common = overlap(read, span)
            if common is not None:
                first = offset + common.start - read.start
                begun = columns.pop().start if columns and columns[-1].stop == first else first
                columns.append(slice(begun, first + common.tokens))
                parts.append(keys[:, :, common.start - span.start : common.stop - span.start])
        offset += read.tokens
    return _Sealed(tuple(columns), torch.cat(parts, 2).float()) if parts else None


def _score(queries: Tensor, exact: Tensor, approximate: Tensor) -> Float64[np.ndarray, "4 batch heads"]:
    """Sums in the order of ``FIELDS`` over sampled queries ``[B, Hq, t, D]``; query heads of a KV head are pooled."""
    batch, heads, _, channels = exact.shape
    pooled = queries.detach().float().reshape(batch, heads, -1, channels) * channels**-0.5
    true, rebuilt = pooled @ exact.mT, pooled @ approximate.mT
    shifted = (true.argmax(-1) != rebuilt.argmax(-1)).double().sum(-1)
    # A shift of all of a query's logits changes no attention weight, so energies are taken around the mean.
    tokens = exact.shape[2]
    energies = [tokens * x.var(-1, correction=0).double().sum(-1) for x in (rebuilt - true, true)]
    count = torch.full_like(shifted, pooled.shape[2])
    return torch.stack([count, shifted, *energies]).cpu().numpy()
