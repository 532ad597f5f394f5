"""What one layer's cache holds, as a value: a transition returns new contents and leaves the old ones whole.

:mod:`quantwm_core.stream` says which tokens are live, sealed or due; this module carries their tensors along.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantwm_core.errors import DomainError, QuantWMError
from quantwm_core.method import Scheme
from quantwm_core.stream import Span, Stream, cut, overlap
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.methods import begin_chunk
from quantwm_kernels.reading import Piece
from quantwm_kernels.sealing import PendingChunk
from quantwm_kernels.statistics import QueryMoment
from quantwm_models.causality import CausalQueries
from quantwm_models.stopwatch import Stopwatch
from quantwm_models.workspace import Segment

serials = itertools.count()  # of stored pieces, of which no two ever share one

# The moment of queries as the keys of some absolute tokens see them.
KeyFrame = Callable[[QueryMoment, Span], QueryMoment]


class Exact(NamedTuple):
    """Tokens that are still BF16: ``keys`` and ``values`` ``[B, H, n, D]`` of the absolute tokens ``span``."""

    serial: int
    span: Span
    keys: Tensor
    values: Tensor


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


class Sealing(NamedTuple):
    """A unit that was just sealed, and the exact tokens it was made from."""

    chunk: SealedChunk
    keys: Tensor
    values: Tensor


class Unconfirmed(NamedTuple):
    """Units that can be read already, and of which a GPU will tell whether they could be sealed.

    Attributes:
        begun: Name for messages, span and sealing of each.
        watch: What times them.
    """

    begun: tuple[tuple[str, Span, PendingChunk], ...]
    watch: Stopwatch

    def wait(self) -> tuple[tuple[Span, SealedChunk], ...]:
        """Wait for the units, each with its span.

        Raises:
            DomainError: One cannot be sealed.
        """
        made = []
        for name, span, pending in self.begun:
            with located(name), _advised():
                made.append((span, pending.wait()))
        return tuple(made)

    def confirm(self, contents: Contents, *, keep: bool = False) -> Contents:
        """``contents``, which hold the units, with what became of them; waits for their sealing.

        Args:
            contents: Now.
            keep: Leave the units in the memory where they are read already, though less would do.

        Raises:
            DomainError: As :meth:`wait`.
        """
        units = dict(contents.units)
        for span, chunk in self.wait():
            if not keep and span in units and not _stored_alike(units[span].chunk, chunk):
                units[span] = units[span]._replace(chunk=chunk)
        return replace(contents, units=units, seal_seconds=contents.seal_seconds + self.watch.seconds())


class Settled(NamedTuple):
    """What sealing made of contents.

    Attributes:
        contents: Nothing is due in them any more.
        sealings: What was sealed.
        unconfirmed: Units that were not waited for; None if all were.
    """

    contents: Contents
    sealings: tuple[Sealing, ...]
    unconfirmed: Unconfirmed | None = None


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say where an error arose, keeping its type.

    >>> with located("layer 3"):
    ...     raise QuantWMError("no room")
    Traceback (most recent call last):
    ...
    quantwm_core.errors.QuantWMError: layer 3: no room
    """
    try:
        yield
    except QuantWMError as error:
        raise type(error)(f"{where}: {error}") from error


@contextmanager
def _advised() -> Iterator[None]:
    """Say what a host can do about numbers that cannot be sealed."""
    try:
        yield
    except DomainError as error:
        advice = "a chunk that is at fault can be rewritten with overwrite(), and clear() forgets everything"
        raise DomainError(f"{error}; {advice}") from error


@dataclass(frozen=True)
class Contents:
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
    units: Mapping[Span, Unit] = field(default_factory=dict)
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
        return _follow(self, grown, exact=(*self.exact, piece), queries=queries)

    def overwrite(self, keys: Tensor, values: Tensor) -> Contents:
        """The active chunk has other keys and values.

        Raises:
            StateError: No chunk is active.
            ShapeError: It has another length.
        """
        span = self.stream.writable(keys.shape[2])
        return replace(self, exact=(*self.exact[:-1], Exact(next(serials), span, keys, values)))

    def complete(self) -> Contents:
        """The active chunk will not change any more."""
        return replace(self, stream=self.stream.complete())

    def evict(self, start: int, stop: int) -> Contents:
        """Drop window tokens ``start`` to ``stop``; an active chunk that loses one is complete."""
        active = self.stream.active_span
        stream = self.stream
        stream.read(start, stop)  # which refuses what is no range
        if active is not None and start < stop and stop > stream.tokens - active.tokens:
            stream = stream.complete()
        return _follow(self, stream.evict(start, stop))

    def owned(self) -> Contents:
        """The same, its BF16 tokens in memory of their own."""
        return replace(self, exact=tuple(_slice(piece, piece.span) for piece in self.exact))

    def settle(
        self,
        scheme: Scheme,
        frame: KeyFrame | None = None,
        *,
        replaced: SealedChunk | None = None,
        wait: bool = True,
    ) -> Settled:
        """Seal what is due, by queries in the frame of the keys.

        Args:
            scheme: How.
            frame: See :attr:`quantwm_models.cache.LayerCache.key_frame`.
            replaced: What is the unit before to the first unit, which has none here.
            wait: Whether to wait for units that a GPU seals; those that can be read before are left unconfirmed otherwise.

        Raises:
            QuantWMError: A unit cannot be sealed; the message names its chunk and the tensor.
        """
        stream = self.stream.sealed()
        due = stream.units[len(self.stream.units) :]
        if stream is self.stream:
            queries = self.queries.before(stream.sealed_end)
            return Settled(self if queries is self.queries else replace(self, queries=queries), ())
        watch = Stopwatch()
        queries, units, sealings, unconfirmed = self.queries, dict(self.units), [], []
        last = (self.newest(self.exact[-1].keys.device) or replaced) if due else None
        for span in due:
            queries = queries.before(span.start)
            keys, values = self._gather(span)
            past = queries.past if frame is None or queries.past is None else frame(queries.past, span)
            begun, name = watch.start(keys.device), self._name(span)
            with located(name), _advised():
                pending = begin_chunk(scheme, keys, values, past, last, span.start)
                readable = None if wait else pending.readable()
                if readable is not None:
                    unconfirmed.append((name, span, pending))
                last = readable or pending.wait()
            watch.stop(begun)
            units[span] = Unit(next(serials), last)
            sealings.append(Sealing(last, keys, values))
        settled = _follow(
            self,
            stream,
            units,
            queries=queries.before(stream.sealed_end),
            chunks_sealed=self.chunks_sealed + len(due),
            seal_seconds=self.seal_seconds + (0 if unconfirmed else watch.seconds()),
        )
        return Settled(settled, tuple(sealings), Unconfirmed(tuple(unconfirmed), watch) if unconfirmed else None)

    def moved(self, move: Callable[[Unit], Unit]) -> Contents:
        """The same units elsewhere; itself where none moves."""
        units = {span: move(unit) for span, unit in self.units.items()}
        return self if all(unit is self.units[span] for span, unit in units.items()) else replace(self, units=units)

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
                _, held, keys, values = self.exact[part.exact]
                if part.span != held:
                    inside = slice(part.span.start - held.start, part.span.stop - held.start)
                    keys, values = keys[:, :, inside], values[:, :, inside]
                yield part, keys, values

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

    def _gather(self, span: Span) -> tuple[Tensor, Tensor]:
        """BF16 keys and values of live, unsealed tokens."""
        parts = [(piece, overlap(piece.span, span)) for piece in self.exact]
        slices = [(piece, part.start - piece.span.start, part.stop - piece.span.start) for piece, part in parts if part]
        if len(slices) == 1:
            piece, start, stop = slices[0]
            return piece.keys[:, :, start:stop], piece.values[:, :, start:stop]
        keys = torch.cat([piece.keys[:, :, start:stop] for piece, start, stop in slices], dim=2)
        return keys, torch.cat([piece.values[:, :, start:stop] for piece, start, stop in slices], dim=2)

    def _name(self, span: Span) -> str:
        """Chunks that a unit lies in, for messages."""
        first, last = (bisect_right(self.stream.ends, token) for token in (span.start, span.stop - 1))
        return f"chunk {first}" if first == last else f"chunks {first} to {last}"


def _stored_alike(one: SealedChunk, other: SealedChunk) -> bool:
    """Whether two units are made of the same arrays."""
    pairs = ((one.keys.arrays, other.keys.arrays), (one.values.arrays, other.values.arrays))
    return all(
        ours.keys() == theirs.keys() and all(array is theirs[name] for name, array in ours.items())
        for ours, theirs in pairs
    )


def _follow(
    contents: Contents,
    stream: Stream,
    units: Mapping[Span, Unit] | None = None,
    exact: Sequence[Exact] | None = None,
    **changes: Any,
) -> Contents:
    """Follow the stream, with other units and BF16 tokens if they are given: let go of what it holds no longer, or holds sealed."""
    before, pieces = contents.units if units is None else units, contents.exact if exact is None else exact
    followed = {span: before[span] for span in stream.units}
    kept = []
    for piece in pieces:
        for live in stream.live:
            part = overlap(piece.span, Span(max(live.start, stream.sealed_end), live.stop))
            if part is not None:
                kept.append(piece if part == piece.span else _slice(piece, part))
    evicted = contents.chunks_evicted + len(before) - len(followed)
    return replace(contents, stream=stream, units=followed, exact=tuple(kept), chunks_evicted=evicted, **changes)


def _slice(piece: Exact, part: Span) -> Exact:
    """Part of a piece in memory of its own, so that the rest is freed."""
    start, stop = part.start - piece.span.start, part.stop - piece.span.start
    keys, values = (tensor[:, :, start:stop].clone() for tensor in (piece.keys, piece.values))
    return Exact(next(serials), part, keys, values)
