"""What one layer's cache holds, as a value: a transition returns new contents and leaves the old ones whole.

:mod:`quantwm_core.stream` says which tokens are live, sealed or due; this module carries their tensors along.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantwm_core.stream import Span, Stream, cut, overlap
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.reading import Piece
from quantwm_models.causality import CausalQueries
from quantwm_models.workspace import Segment

serials = itertools.count()  # of stored pieces, of which no two ever share one


class Exact(NamedTuple):
    """Tokens that are still BF16: ``keys`` and ``values`` ``[B, H, n, D]`` of the absolute tokens ``span``."""

    serial: int
    span: Span
    keys: Tensor
    values: Tensor

    def within(self, part: Span) -> tuple[Tensor, Tensor]:
        """Keys and values of some of the tokens, in the same memory."""
        if part == self.span:
            return self.keys, self.values
        inside = slice(part.start - self.span.start, part.stop - self.span.start)
        return self.keys[:, :, inside], self.values[:, :, inside]


class Unit(NamedTuple):
    """A sealed unit, and the block of host memory that its arrays lie in, if it was moved there."""

    serial: int
    chunk: SealedChunk
    block: Tensor | None = None


class Part(NamedTuple):
    """Consecutive tokens of a read that are stored together.

    Attributes:
        place: Token of the read where they begin.
        span: Absolute tokens.
        unit: The sealed unit that they are of; None where they are BF16.
        exact: Which of the BF16 pieces they are of then.
    """

    place: int
    span: Span
    unit: Span | None
    exact: int

    @property
    def end(self) -> int:
        """Token of the read behind them."""
        return self.place + self.span.tokens


class Contents(NamedTuple):
    """Tensors and bookkeeping of one layer.

    Attributes:
        stream: Where tokens are.
        queries: Query statistics.
        units: Sealed units that hold a live token, by their absolute tokens.
        exact: Live BF16 tokens, ascending.
        chunks_sealed: Units sealed so far.
        chunks_evicted: Units that lost their last live token.
        seal_seconds: Time spent sealing, as a :class:`quantwm_models.stopwatch.Stopwatch` counts it.
    """

    stream: Stream
    queries: CausalQueries
    units: Mapping[Span, Unit]
    exact: tuple[Exact, ...] = ()
    chunks_sealed: int = 0
    chunks_evicted: int = 0
    seal_seconds: float = 0.0

    def append(self, keys: Tensor, values: Tensor) -> Contents:
        """A chunk begins with BF16 keys and values, which must not change any more."""
        stream, queries = self.stream, self.queries
        if len(stream.ends) % stream.chunks_per_seal == 0:
            queries = queries.begin(stream.end)
        grown = stream.append(keys.shape[2])
        piece = Exact(next(serials), Span(stream.end, grown.end), keys, values)
        return self.followed(grown, exact=(*self.exact, piece), queries=queries)

    def overwrite(self, keys: Tensor, values: Tensor) -> Contents:
        """The active chunk has other keys and values.

        Raises:
            StateError: No chunk is active.
            ShapeError: It has another length.
        """
        span = self.stream.writable(keys.shape[2])
        return self._replace(exact=(*self.exact[:-1], Exact(next(serials), span, keys, values)))

    def complete(self) -> Contents:
        """The active chunk will not change any more."""
        return self._replace(stream=self.stream.complete())

    def evict(self, start: int, stop: int) -> Contents:
        """Drop window tokens ``start`` to ``stop``; an active chunk that loses one is complete."""
        active = self.stream.active_span
        stream = self.stream
        stream.read(start, stop)  # which refuses what is no range
        if active is not None and start < stop and stop > stream.tokens - active.tokens:
            stream = stream.complete()
        return self.followed(stream.evict(start, stop))

    def owned(self) -> Contents:
        """The same, its BF16 tokens in memory of their own."""
        return self._replace(exact=tuple(_slice(piece, piece.span) for piece in self.exact))

    def moved(self, move: Callable[[Unit], Unit]) -> Contents:
        """The same units elsewhere; itself where none moves."""
        units = {span: move(unit) for span, unit in self.units.items()}
        return self if all(unit is self.units[span] for span, unit in units.items()) else self._replace(units=units)

    def parts(self, start: int, stop: int) -> tuple[Part, ...]:
        """Where the window tokens ``start`` to ``stop`` are stored, in order."""
        found: list[Part] = []
        for piece in self.stream.read(start, stop):
            held = ((None, number, overlap(exact.span, piece.span)) for number, exact in enumerate(self.exact))
            for unit, number, span in held if piece.unit is None else [(piece.unit, 0, piece.span)]:
                if span is not None:
                    found.append(Part(found[-1].end if found else 0, span, unit, number))
        return tuple(found)

    def segments(self, parts: Sequence[Part]) -> tuple[Segment, ...]:
        """Which stored pieces these are now: each overwrite makes another one of the active chunk."""
        exact, units = self.exact, self.units
        return tuple(
            [Segment((exact[number] if unit is None else units[unit]).serial, span) for _, span, unit, number in parts]
        )

    def chunks(self) -> dict[int, SealedChunk]:
        """The units by serial number, where they are."""
        return {unit.serial: unit.chunk for unit in self.units.values()}

    def pieces(self, parts: Sequence[Part], chunks: Mapping[int, SealedChunk]) -> tuple[Piece, ...]:
        """Those of ``parts`` that are of units, placed in memory that begins with the first; ``chunks`` by serial number."""
        found = []
        for place, (start, stop), unit, _ in parts:
            if unit is not None:
                chunk = chunks[self.units[unit].serial]
                found.append(Piece(chunk, start - chunk.start, stop - chunk.start, place - parts[0].place))
        return tuple(found)

    def plain(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Those of ``parts`` that are BF16, each with its keys and values ``[B, H, n, D]``."""
        for part in parts:
            if part.unit is None:
                yield part, *self.exact[part.exact].within(part.span)

    def gone(self, later: Contents) -> tuple[Span, ...]:
        """Absolute tokens that were live here and are not in ``later``."""
        spans = self.stream.live
        for span in later.stream.live:
            spans = cut(spans, span)
        return spans

    def newest(self, device: torch.device) -> SealedChunk | None:
        """The newest sealed unit, on a device where the next is sealed."""
        if not self.stream.units:
            return None
        unit = self.units[self.stream.units[-1]]
        return unit.chunk if unit.block is None else unit.chunk.to(device)

    def followed(
        self,
        stream: Stream,
        units: Mapping[Span, Unit] | None = None,
        exact: Sequence[Exact] | None = None,
        **changes: Any,
    ) -> Contents:
        """Follow the stream, with other units and BF16 tokens if they are given: let go of what it holds no longer, or holds sealed."""
        before, pieces = self.units if units is None else units, self.exact if exact is None else exact
        followed = {span: before[span] for span in stream.units}
        kept = []
        for piece in pieces:
            for live in stream.live:
                part = overlap(piece.span, Span(max(live.start, stream.sealed_end), live.stop))
                if part is not None:
                    kept.append(piece if part == piece.span else _slice(piece, part))
        evicted = self.chunks_evicted + len(before) - len(followed)
        return self._replace(stream=stream, units=followed, exact=tuple(kept), chunks_evicted=evicted, **changes)


def _slice(piece: Exact, part: Span) -> Exact:
    """Part of a piece in memory of its own, so that the rest is freed."""
    keys, values = (tensor.clone() for tensor in piece.within(part))
    return Exact(next(serials), part, keys, values)
