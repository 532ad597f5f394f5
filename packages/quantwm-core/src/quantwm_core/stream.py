"""Bookkeeping of a causal cache: which tokens are live, which are sealed, what is due. No tensors.

Tokens bear *absolute* positions, counted from the beginning of the stream. A host sees the live ones side by side in
*window coordinates*: 0 is the oldest live token. A chunk is what the model generates at once; the newest one is
*active* until the next begins or :meth:`Stream.complete` is called. A *unit* is what is sealed together::

    absolute   0        4        8       12       16       20
    chunks     |   0    |   1    |   2    |   3    | active |
    units      |        0        |        1        |              chunks_per_seal = 2
    live       |sink|       evicted       |---------------|
    window     0    2                     2               10

A unit is cut at the sink's end, so that its evicted part can be freed, and ends ``recent_tokens`` early where a method
keeps its newest tokens BF16. A stream is a value: every transition returns a new one, and a failed seal leaves the
old one as it was.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import NamedTuple, TypeGuard

from quantwm_core.errors import ParameterError, RangeError, ShapeError, StateError


class Span(NamedTuple):
    """Tokens ``start`` to ``stop``, the end not included."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return self.stop - self.start


class Piece(NamedTuple):
    """Part of a read: absolute tokens ``span``, stored in sealed unit ``unit``, or BF16 where that is None."""

    span: Span
    unit: Span | None


def overlap(first: Span, second: Span) -> Span | None:
    """Tokens that both hold, or None.

    >>> overlap(Span(0, 4), Span(2, 9))
    Span(start=2, stop=4)
    """
    start, stop = max(first.start, second.start), min(first.stop, second.stop)
    return Span(start, stop) if start < stop else None


def cut(spans: tuple[Span, ...], hole: Span) -> tuple[Span, ...]:
    """``spans`` without the tokens of ``hole``.

    >>> cut((Span(0, 6), Span(8, 9)), Span(2, 4))
    (Span(start=0, stop=2), Span(start=4, stop=6), Span(start=8, stop=9))
    """
    parts = []
    for span in spans:
        parts += [Span(span.start, min(span.stop, hole.start)), Span(max(span.start, hole.stop), span.stop)]
    return tuple(part for part in parts if part.tokens > 0)


def join(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Merge spans that touch.

    >>> join((Span(0, 2), Span(2, 6), Span(8, 9)))
    (Span(start=0, stop=6), Span(start=8, stop=9))
    """
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, NumPy's included, and no truth value.

    >>> is_whole(3), is_whole(True), is_whole(3.0)
    (True, False, False)
    """
    # The usual case first.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


@dataclass(frozen=True)
class Stream:
    """State of one layer's cache.

    Attributes:
        chunks_per_seal: Chunks that form a unit.
        recent_tokens: Newest completed tokens that stay BF16.
        sink: First tokens that a sliding window never evicts.
        window: Live tokens at most, sink and active chunk included; None keeps all.
        ends: Absolute end of every chunk so far.
        active: Whether the newest chunk may still change.
        live: Absolute live spans, ascending, neighbours joined.
        units: Sealed units that still hold a live token, ascending.
        sealed_end: Absolute position up to which tokens were sealed, or evicted before they were.
    """

    chunks_per_seal: int = 1
    recent_tokens: int = 0
    sink: int = 0
    window: int | None = None
    ends: tuple[int, ...] = ()
    active: bool = False
    live: tuple[Span, ...] = ()
    units: tuple[Span, ...] = ()
    sealed_end: int = 0

    def __post_init__(self) -> None:
        for name, least in (("chunks_per_seal", 1), ("recent_tokens", 0), ("sink", 0)):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise ParameterError(f"{name} {value!r}: need a whole number of at least {least}")
        if self.window is None:
            return
        if not is_whole(self.window):
            raise ParameterError(f"window {self.window!r}: need a whole number or None")
        if self.window <= self.sink:
            raise ParameterError(f"window {self.window}: need more tokens than the sink's {self.sink}")

    @property
    def end(self) -> int:
        """Absolute position after the newest token."""
        return self.ends[-1] if self.ends else 0

    @cached_property
    def tokens(self) -> int:
        """Live tokens."""
        return sum(span.tokens for span in self.live)

    @cached_property
    def active_span(self) -> Span | None:
        """The chunk that may still change."""
        if not self.active:
            return None
        return Span(self.ends[-2] if len(self.ends) > 1 else 0, self.end)

    @property
    def completed_end(self) -> int:
        """Absolute position up to which tokens no longer change."""
        span = self.active_span
        return self.end if span is None else span.start

    def append(self, tokens: int) -> Stream:
        """Begin a chunk; the one before it is complete, and a window that is full slides.

        Raises:
            ShapeError: The chunk is empty.
            RangeError: The chunk alone exceeds what the window leaves beside the sink.

        >>> stream = Stream(sink=2, window=8).append(4).append(4).append(4)
        >>> stream.live, stream.active_span
        ((Span(start=0, stop=2), Span(start=6, stop=12)), Span(start=8, stop=12))
        """
        if tokens < 1:
            raise ShapeError(f"a chunk of {tokens} tokens: need at least one")
        grown = replace(
            self,
            ends=(*self.ends, self.end + tokens),
            active=True,
            live=join((*self.live, Span(self.end, self.end + tokens))),
        )
        if self.window is None or grown.tokens <= self.window:
            return grown
        if tokens > self.window - self.sink:
            raise RangeError(f"a chunk of {tokens} tokens: window {self.window} less sink {self.sink} holds fewer")
        return grown.evict(self.sink, self.sink + grown.tokens - self.window)

    def complete(self) -> Stream:
        """The active chunk will not change any more.

        >>> Stream().append(4).complete().due()
        (Span(start=0, stop=4),)
        """
        return replace(self, active=False)

    def due(self) -> tuple[Span, ...]:
        """Units to be sealed now, ascending; evicted tokens need no seal.

        >>> stream = Stream(chunks_per_seal=2, recent_tokens=1).append(4).append(4).append(4)
        >>> stream.due(), stream.append(4).append(4).due()
        ((Span(start=0, stop=7),), (Span(start=0, stop=7), Span(start=7, stop=15)))
        """
        units: list[Span] = []
        begin = self.sealed_end
        for end in self._unit_ends(begin):
            stop = end - self.recent_tokens
            if stop <= begin:
                continue
            for side in (Span(0, self.sink), Span(self.sink, stop)):
                part = overlap(Span(begin, stop), side)
                units += [span for span in (overlap(part, live) for live in self.live) if span] if part else []
            begin = stop
        return tuple(units)

    def sealed(self) -> Stream:
        """All units that were due are sealed; itself if none was."""
        ends = self._unit_ends(self.sealed_end)
        sealed_end = max(self.sealed_end, ends[-1] - self.recent_tokens) if ends else self.sealed_end
        if sealed_end == self.sealed_end:
            return self
        return replace(self, units=(*self.units, *self.due()), sealed_end=sealed_end)

    def evict(self, start: int, stop: int) -> Stream:
        """Drop the tokens ``start`` to ``stop`` of the window; units without a live token are gone.

        Raises:
            RangeError: The range lies outside the window or touches the active chunk.

        >>> stream = Stream().append(4).append(4).sealed().evict(0, 4)
        >>> stream.live, stream.units
        ((Span(start=4, stop=8),), ())
        """
        self._check(start, stop)
        holes = [piece.span for piece in self.read(start, stop)]
        active = self.active_span
        if active and any(overlap(hole, active) for hole in holes):
            raise RangeError(f"evicting window tokens {start} to {stop} would cut the active chunk; complete it first")
        live = self.live
        for hole in holes:
            live = cut(live, hole)
        units = tuple(unit for unit in self.units if any(overlap(unit, span) for span in live))
        return replace(self, live=live, units=units)

    def read(self, start: int = 0, stop: int | None = None) -> tuple[Piece, ...]:
        """Where the tokens ``start`` to ``stop`` of the window are, in order.

        Raises:
            RangeError: The range lies outside the window.

        >>> Stream().append(4).append(4).sealed().read(2, 6)
        (Piece(span=Span(start=2, stop=4), unit=Span(start=0, stop=4)), Piece(span=Span(start=4, stop=6), unit=None))
        """
        stop = self.tokens if stop is None else stop
        self._check(start, stop)
        pieces: list[Piece] = []
        offset = 0
        for span in self.live:
            first, last = max(start - offset, 0), min(stop - offset, span.tokens)
            if first < last:
                pieces += self._stored(Span(span.start + first, span.start + last))
            offset += span.tokens
        return tuple(pieces)

    def rewound(self) -> Stream:
        """An empty stream with the same settings."""
        return replace(self, ends=(), active=False, live=(), units=(), sealed_end=0)

    def writable(self, tokens: int) -> Span:
        """The active chunk, if ``tokens`` of it can be rewritten.

        Raises:
            StateError: No chunk is active.
            ShapeError: The active chunk has another length.
        """
        span = self.active_span
        if span is None:
            raise StateError("no chunk is active: all are complete; append a chunk before rewriting it")
        if span.tokens != tokens:
            raise ShapeError(f"the active chunk holds {span.tokens} tokens, {tokens} came; rewrite it whole")
        return span

    def _unit_ends(self, begin: int) -> tuple[int, ...]:
        """Where complete units end behind token ``begin``; those before it, ever more in a long stream, are not looked at."""
        first, last = (bisect_right(self.ends, token) for token in (begin, self.completed_end))
        return self.ends[first - first % self.chunks_per_seal : last][self.chunks_per_seal - 1 :: self.chunks_per_seal]

    def _stored(self, span: Span) -> list[Piece]:
        """Split a live span by where it is stored."""
        pieces, begin = [], span.start
        for unit in self.units:
            part = overlap(unit, span)
            if part is None:
                continue
            if begin < part.start:
                pieces.append(Piece(Span(begin, part.start), None))
            pieces.append(Piece(part, unit))
            begin = part.stop
        if begin < span.stop:
            pieces.append(Piece(Span(begin, span.stop), None))
        return pieces

    def _check(self, start: int, stop: int) -> None:
        if not (is_whole(start) and is_whole(stop) and 0 <= start <= stop <= self.tokens):
            raise RangeError(
                f"window tokens {start!r} to {stop!r}: need 0 <= start <= stop <= {self.tokens}, the live tokens, in whole numbers"
            )
