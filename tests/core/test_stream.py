"""The bookkeeping against a list of token numbers, which cannot be wrong because it does nothing clever."""

from dataclasses import dataclass, field
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core.errors import ParameterError, RangeError, ShapeError, StateError
from quantwm_core.stream import Piece, Span, Stream, cut, overlap


@dataclass
class Tokens:
    """What a cache holds, token by token.

    Attributes:
        live: Absolute numbers of the live tokens, in window order.
        stored: For each token that was sealed, the unit it lies in.
        ends: Absolute end of every chunk.
        completed: How many chunks no longer change.
    """

    chunks_per_seal: int = 1
    recent_tokens: int = 0
    sink: int = 0
    window: int | None = None
    live: list[int] = field(default_factory=list)
    stored: dict[int, tuple[int, int]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    completed: int = 0
    done: int = 0

    def append(self, tokens: int) -> None:
        begin = self.ends[-1] if self.ends else 0
        self.completed = len(self.ends)
        self.ends.append(begin + tokens)
        self.live += range(begin, begin + tokens)
        if self.window is not None and len(self.live) > self.window:
            del self.live[self.sink : self.sink + len(self.live) - self.window]

    def complete(self) -> None:
        self.completed = len(self.ends)

    def due(self) -> list[tuple[int, int]]:
        """Runs of neighbouring live tokens that are to be sealed, none of them over the edge of a unit or the sink."""
        edges = [self.sink]
        last = self.done
        for number, end in enumerate(self.ends[: self.completed], start=1):
            if number % self.chunks_per_seal == 0:
                edges.append(end - self.recent_tokens)
                last = max(last, end - self.recent_tokens)
        runs: list[list[int]] = []
        for token in self.live:
            if not self.done <= token < last:
                continue
            if runs and runs[-1][-1] == token - 1 and token not in edges:
                runs[-1].append(token)
            else:
                runs.append([token])
        return [(run[0], run[-1] + 1) for run in runs]

    def seal(self) -> None:
        for start, stop in self.due():
            self.stored |= dict.fromkeys(range(start, stop), (start, stop))
        ends = [end for number, end in enumerate(self.ends[: self.completed], 1) if number % self.chunks_per_seal == 0]
        self.done = max([self.done, *(end - self.recent_tokens for end in ends)])


def _check(stream: Stream, tokens: Tokens) -> None:
    """The stream says of every token what the list says."""
    assert stream.tokens == len(tokens.live)
    assert [token for span in stream.live for token in range(*span)] == tokens.live
    assert all(first.stop < second.start for first, second in pairwise(stream.live))
    assert list(stream.due()) == tokens.due()
    held = sorted({tokens.stored[token] for token in tokens.live if token in tokens.stored})
    assert list(stream.units) == held
    assert stream.end == (tokens.ends[-1] if tokens.ends else 0)
    active = tokens.completed < len(tokens.ends)
    starts = [0, *tokens.ends]
    assert stream.active_span == (Span(starts[-2], starts[-1]) if active else None)
    assert stream.completed_end == starts[tokens.completed]
    if tokens.window is not None:
        assert stream.tokens <= tokens.window
    _check_read(stream, tokens, 0, len(tokens.live))


def _check_read(stream: Stream, tokens: Tokens, start: int, stop: int) -> None:
    pieces = stream.read(start, stop)
    assert all(piece.span.tokens > 0 for piece in pieces)
    got = [(token, piece.unit) for piece in pieces for token in range(*piece.span)]
    assert got == [(token, tokens.stored.get(token)) for token in tokens.live[start:stop]]
    for piece in pieces:
        assert piece.unit is None or overlap(piece.span, piece.unit) == piece.span
    for first, second in pairwise(pieces):  # nothing is cut that could be read at once
        assert first.unit != second.unit or first.span.stop != second.span.start


@settings(max_examples=200)
@given(st.data())
def test_any_sequence_of_transitions(data: st.DataObject) -> None:
    sink = data.draw(st.integers(0, 4), "sink")
    window = data.draw(st.none() | st.integers(sink + 1, sink + 14), "window")
    per_seal = data.draw(st.integers(1, 3), "chunks per seal")
    recent = data.draw(st.integers(0, 6), "recent")
    stream, tokens = Stream(per_seal, recent, sink, window), Tokens(per_seal, recent, sink, window)
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        match data.draw(st.sampled_from(["append", "append", "complete", "seal", "seal", "evict", "read", "rewind"])):
            case "append":
                count = data.draw(st.integers(1, 6), "tokens")
                if window is not None and count > window - sink and len(tokens.live) + count > window:
                    with pytest.raises(RangeError):
                        stream.append(count)
                    continue
                stream = stream.append(count)
                tokens.append(count)
            case "complete":
                stream = stream.complete()
                tokens.complete()
            case "seal":
                stream = stream.sealed()
                tokens.seal()
            case "evict":
                start = data.draw(st.integers(0, len(tokens.live)), "evict from")
                stop = data.draw(st.integers(start, len(tokens.live)), "evict to")
                frozen = ([0, *tokens.ends])[tokens.completed]
                if any(token >= frozen for token in tokens.live[start:stop]):
                    with pytest.raises(RangeError, match="would cut the active chunk"):
                        stream.evict(start, stop)
                    continue
                stream = stream.evict(start, stop)
                del tokens.live[start:stop]
            case "read":
                start = data.draw(st.integers(0, len(tokens.live)), "read from")
                _check_read(stream, tokens, start, data.draw(st.integers(start, len(tokens.live)), "read to"))
            case _:
                stream, tokens = stream.rewound(), Tokens(per_seal, recent, sink, window)
        _check(stream, tokens)


def test_every_small_sliding_cache() -> None:
    for sink, room, recent, per_seal, chunk in product((0, 1, 3), (None, 3, 6, 7), (0, 1, 4), (1, 2, 3), (1, 2, 3)):
        window = None if room is None else sink + room
        stream, tokens = Stream(per_seal, recent, sink, window), Tokens(per_seal, recent, sink, window)
        for _ in range(9):
            stream = stream.append(chunk).sealed()
            tokens.append(chunk)
            tokens.seal()
            _check(stream, tokens)


def test_the_drawn_example() -> None:
    stream = Stream(chunks_per_seal=2)
    for _ in range(5):
        stream = stream.append(4).sealed()
    assert stream.units == (Span(0, 8), Span(8, 16))
    assert stream.active_span == Span(16, 20)
    stream = stream.evict(2, 12)
    assert stream.live == (Span(0, 2), Span(12, 20))
    assert stream.units == (Span(0, 8), Span(8, 16))
    assert stream.tokens == 10
    assert stream.read() == (
        Piece(Span(0, 2), Span(0, 8)),
        Piece(Span(12, 16), Span(8, 16)),
        Piece(Span(16, 20), None),
    )
    assert stream.read(1, 3) == (Piece(Span(1, 2), Span(0, 8)), Piece(Span(12, 13), Span(8, 16)))


def test_a_unit_is_cut_at_the_end_of_the_sink() -> None:
    stream = Stream(chunks_per_seal=2, sink=2).append(4).append(4).complete()
    assert stream.due() == (Span(0, 2), Span(2, 8))


def test_evicted_tokens_are_never_sealed() -> None:
    stream = Stream(chunks_per_seal=2).append(4).append(4).append(4).evict(1, 6)
    assert stream.due() == (Span(0, 1), Span(6, 8))
    sealed = stream.sealed()
    assert sealed.units == (Span(0, 1), Span(6, 8))
    assert sealed.due() == ()


def test_a_unit_lives_until_its_last_token_goes() -> None:
    stream = Stream().append(4).append(4).sealed()
    assert stream.evict(0, 3).units == (Span(0, 4),)
    assert stream.evict(0, 3).evict(0, 1).units == ()


def test_recent_tokens_count_completed_ones_across_unit_ends() -> None:
    stream = Stream(recent_tokens=6)
    sealed_ends = []
    for _ in range(5):
        stream = stream.append(4).complete().sealed()
        sealed_ends.append(stream.units[-1].stop if stream.units else 0)
    assert sealed_ends == [0, 2, 6, 10, 14]


def test_the_active_chunk_is_rewritten_whole_or_not_at_all() -> None:
    stream = Stream().append(4).append(3)
    assert stream.writable(3) == Span(4, 7)
    with pytest.raises(ShapeError, match="the active chunk holds 3 tokens, 4 came"):
        stream.writable(4)
    with pytest.raises(StateError, match="no chunk is active"):
        stream.complete().writable(3)
    with pytest.raises(StateError):
        Stream().writable(1)


def test_a_refused_transition_leaves_the_stream_as_it_was() -> None:
    stream = Stream(sink=1, window=5).append(3).append(2)
    before = Stream(sink=1, window=5).append(3).append(2)
    with pytest.raises(RangeError, match="a chunk of 5 tokens: window 5 less sink 1 holds fewer"):
        stream.append(5)
    with pytest.raises(RangeError, match="would cut the active chunk"):
        stream.evict(2, 4)
    assert stream == before


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 8), (8, 8)])
def test_a_range_outside_the_window_is_refused(bounds: tuple[int, int]) -> None:
    stream = Stream().append(4).append(3)
    for reach in (stream.read, stream.evict):
        with pytest.raises(RangeError, match=f"window tokens {bounds[0]} to {bounds[1]}: need 0 <= start <= stop <= 7"):
            reach(*bounds)


@pytest.mark.parametrize("tokens", [0, -1])
def test_an_empty_chunk_is_refused(tokens: int) -> None:
    with pytest.raises(ShapeError, match=f"a chunk of {tokens} tokens"):
        Stream().append(tokens)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0,), "chunks_per_seal 0"),
        ((1, -1), "recent_tokens -1"),
        ((1, 0, -1), "^sink -1: need a whole number of at least 0$"),
        ((1, 0, 0, 0), "window 0"),
        ((1, 0, 4, 4), "window 4: need more tokens than the sink's 4"),
    ],
)
def test_impossible_settings_are_refused(settings: tuple[int, ...], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Stream(*settings)  # type: ignore[arg-type]  # the fields after the settings are not given


def test_a_rewound_stream_keeps_its_settings_alone() -> None:
    stream = Stream(2, 1, 3, 9)
    assert stream.append(4).append(4).append(4).sealed().evict(0, 2).rewound() == stream


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_overlap_and_cut_by_token(a: int, b: int, c: int, d: int) -> None:
    first, second = Span(min(a, b), max(a, b)), Span(min(c, d), max(c, d))
    common = set(range(*first)) & set(range(*second))
    span = overlap(first, second)
    assert set(range(*span)) == common if span else not common
    left = [token for part in cut((first,), second) for token in range(*part)]
    assert left == sorted(set(range(*first)) - common)
