"""One attention call with exact against reconstructed keys and values, as sums per video and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from quantwm_core.stream import Span

OF_CALLS = ("selection", "logits", "attention", "output", "top")
"""Tallies that every call adds to; the first two also by token."""
OF_TOKENS = ("keys", "values")
"""Tallies of the tokens themselves, also by token."""
TOP = 8
"""Largest logits of a query that are compared as a set."""


@dataclass(frozen=True)
class Sealed:
    """Sealed tokens of one read.

    Attributes:
        columns: Where they stand in the read.
        rest: Where the other tokens stand.
        keys: Their exact keys, FP32 ``[B, H, n, D]``.
        values: Their exact values, likewise.
        ages: How long ago each was written.
        positions: When each was written.
    """

    columns: tuple[slice, ...]
    rest: tuple[slice, ...]
    keys: Tensor
    values: Tensor
    ages: Int64[np.ndarray, " tokens"]
    positions: Int64[np.ndarray, " tokens"]


@dataclass(frozen=True)
class Sums:
    """Numerators and denominators of some tallies.

    Attributes:
        total: ``[tallies, 2, B, H]``.
        by_age: ``[split tallies, 2, B, H, ages]``.
        by_position: ``[split tallies, 2, B, H, positions]``.
    """

    total: Float64[np.ndarray, "tallies 2 batch heads"]
    by_age: Float64[np.ndarray, "split 2 batch heads ages"]
    by_position: Float64[np.ndarray, "split 2 batch heads positions"]


def ages(tokens: Int64[np.ndarray, " tokens"], end: int, block: int) -> Int64[np.ndarray, " tokens"]:
    """How long ago tokens were written, in blocks of queries: 1 for those just before the active block, 0 inside it.

    Args:
        tokens: Absolute numbers.
        end: End of the read, absolute.
        block: Tokens of the active block.

    >>> ages(np.array([0, 3, 4, 7, 8]), end=12, block=4)
    array([2, 2, 1, 1, 0])
    """
    return np.maximum((end - block - 1 - tokens) // block + 1, 0)


def gather(tensor: Tensor, columns: Sequence[slice]) -> Tensor:
    """Some tokens of ``[B, H, n, D]`` in FP32."""
    parts = [tensor[:, :, column] for column in columns]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).float() if parts else tensor[:, :, :0].float()


def gaps(columns: Sequence[slice], tokens: int) -> tuple[slice, ...]:
    """What ascending ``columns`` leave of the first ``tokens``.

    >>> gaps([slice(0, 2), slice(5, 6)], 8)
    (slice(2, 5, None), slice(6, 8, None))
    """
    starts = [0, *(column.stop for column in columns)]
    stops = [*(column.start for column in columns), tokens]
    return tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)


def of_call(queries: Tensor, keys: Tensor, values: Tensor, sealed: Sealed) -> Sums:
    """The tallies ``OF_CALLS``, over sampled queries; query heads of a KV head are pooled.

    Args:
        queries: ``[B, Hq, t, D]``.
        keys: As they were read, ``[B, H, n, D]``.
        values: Likewise.
        sealed: The sealed tokens among them.
    """
    batch, heads, _, channels = sealed.keys.shape
    pooled = queries.detach().float().reshape(batch, heads, -1, channels) * channels**-0.5
    true, rebuilt = pooled @ sealed.keys.mT, pooled @ gather(keys, sealed.columns).mT
    # A shift of all of a query's logits changes no attention weight, so energies are taken around the mean.
    energies = [(x - x.mean(-1, keepdim=True)).square().sum(-2, dtype=torch.float64) for x in (rebuilt - true, true)]
    winner = true.argmax(-1)
    shifted = (winner != rebuilt.argmax(-1)).double()
    count = torch.ones_like(shifted)
    divergence, error, energy = _attention(pooled @ gather(keys, sealed.rest).mT, true, rebuilt, values, sealed)
    by_query = [shifted, count], [divergence, count], [error, energy], [_missed(true, rebuilt), count]
    selection, attention, output, top = ([x.sum(-1) for x in pair] for pair in by_query)
    total = [selection, [x.sum(-1) for x in energies], attention, output, top]

    def split(bins: Tensor, size: int) -> list[list[Tensor]]:
        return [[_binned(x, bins[winner], size) for x in (shifted, count)], [_binned(x, bins, size) for x in energies]]

    return _sums(total, split, sealed, winner.device)


def of_tokens(keys: Tensor, values: Tensor, sealed: Sealed) -> Sums:
    """The tallies ``OF_TOKENS``: squared error and energy of reconstructed keys and values."""
    pairs = []
    for read, exact in ((keys, sealed.keys), (values, sealed.values)):
        rebuilt = gather(read, sealed.columns)
        pairs.append([x.square().sum(-1, dtype=torch.float64) for x in (rebuilt - exact, exact)])

    def split(bins: Tensor, size: int) -> list[list[Tensor]]:
        return [[_binned(x, bins, size) for x in pair] for pair in pairs]

    return _sums([[x.sum(-1) for x in pair] for pair in pairs], split, sealed, keys.device)


def _attention(
    active: Tensor, true: Tensor, rebuilt: Tensor, values: Tensor, sealed: Sealed
) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence, squared output error and squared output of every query, over all tokens of the read."""
    exact, approximate = (torch.cat([scores, active], -1).log_softmax(-1) for scores in (true, rebuilt))
    weights, moved = exact.exp(), approximate.exp()
    divergence = (weights * (exact - approximate)).sum(-1, dtype=torch.float64)
    past, rest = sealed.keys.shape[2], gather(values, sealed.rest)
    output = weights[..., :past] @ sealed.values
    error = moved[..., :past] @ gather(values, sealed.columns) - output + (moved - weights)[..., past:] @ rest
    output = output + weights[..., past:] @ rest
    return divergence, error.square().sum(-1, dtype=torch.float64), output.square().sum(-1, dtype=torch.float64)


def _missed(true: Tensor, rebuilt: Tensor) -> Tensor:
    """Share of each query's ``TOP`` largest exact logits that are not among its largest rebuilt ones."""
    count = min(TOP, true.shape[-1])
    wanted, found = (scores.topk(count, -1).indices for scores in (true, rebuilt))
    return (wanted[..., :, None] != found[..., None, :]).all(-1).double().mean(-1)


def _sums(
    total: Sequence[Sequence[Tensor]],
    split: Callable[[Tensor, int], list[list[Tensor]]],
    sealed: Sealed,
    device: torch.device,
) -> Sums:
    """Sums over all, and split by age and by position."""
    by = [split(torch.from_numpy(bins).to(device), int(bins.max()) + 1) for bins in (sealed.ages, sealed.positions)]
    return Sums(_stack(total), *map(_stack, by))


def _binned(numbers: Tensor, bins: Tensor, size: int) -> Tensor:
    """Sums of numbers ``[B, H, n]`` by their bin, ``[n]`` or ``[B, H, n]``, of ``size`` bins."""
    return numbers.new_zeros((*numbers.shape[:2], size)).scatter_add_(2, bins.expand_as(numbers), numbers)


def _stack(pairs: Sequence[Sequence[Tensor]]) -> Float64[np.ndarray, "..."]:
    return torch.stack([torch.stack(list(pair)) for pair in pairs]).cpu().numpy()


def tokens_of(spans: Sequence[Span]) -> Int64[np.ndarray, " tokens"]:
    """Absolute numbers of the tokens of some spans."""
    return np.concatenate([np.arange(span.start, span.stop) for span in spans])
