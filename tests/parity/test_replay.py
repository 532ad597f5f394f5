"""Small units are sealed by replaying a recording: the same bytes, on any stream, and nothing of one unit in the next."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.method import scheme
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.methods import begin_chunk, seal_chunk
from quantwm_kernels.statistics import QueryMoment, second_moment
from quantwm_kernels.triton import replay

SHAPE = (1, 4, 700, 128)
PARAMETERS: list[tuple[str, dict[str, Any]]] = [
    ("quantwm", {}),
    ("quantwm", {"warm_start": True, "threshold": 0.5}),
    ("qvg", {"stages": 2}),
]


class Counted:
    """Stands in for a recording where there is no GPU."""

    full = leaving_fails = broken = False

    def left(self) -> None:
        """Ends a recording."""
        if self.leaving_fails:
            raise RuntimeError("capture was invalidated")

    def __init__(self, call: replay.Call, inputs: Sequence[Tensor], kept: replay.Kept) -> None:
        if self.broken:
            raise RuntimeError("capture was invalidated")
        if self.full:
            try:
                raise torch.OutOfMemoryError("no room")
            finally:
                self.left()
        self.call, self.nbytes = call, replay.nbytes_of(inputs)

    def replay(self, inputs: Sequence[Tensor]) -> replay.Made:
        return [{name: -tensor for name, tensor in each.items()} for each in self.call(inputs)]


class Shared:
    """Stands in for what the recordings of a device share."""

    def __init__(self, pool: object) -> None:
        self.nbytes = 0
        self.last = self

    def synchronize(self) -> None:
        """Wait for the last replay, as an event does."""


def doubled(inputs: Sequence[Tensor]) -> replay.Made:
    return [{"twice": 2 * each} for each in inputs]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(replay, "Recording", Counted)
    monkeypatch.setattr(replay, "Kept", Shared)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Counted, "full", False)
    return Counted


def run(recordings: replay.Recordings, key: object, *inputs: Tensor) -> float:
    return float(recordings.run(key, doubled, inputs)[0]["twice"].sum())


def test_a_call_is_replayed_from_the_second_time_on(counted: type[Counted]) -> None:
    recordings, one = replay.Recordings(), torch.ones(3)
    assert [run(recordings, "a", one) for _ in range(3)] == [6, -6, -6]
    assert run(recordings, "b", one) == 6, "another key"
    assert run(recordings, "a", torch.ones(4)) == 8, "another shape"
    assert run(recordings, "a", torch.ones(3, 2).T[0]) == 6, "other strides"
    recordings.clear()
    assert run(recordings, "a", one) == 6
    assert not replay.pays([one]), "a CPU is never waited for"


@pytest.mark.usefixtures("counted")
def test_memory_is_given_back_once_the_last_replay_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings, known = replay.Recordings(), []
    monkeypatch.setattr(Shared, "synchronize", lambda _: known.append(len(recordings._seen)))
    for _ in range(2):
        run(recordings, "a", torch.ones(3))
    recordings.clear()
    assert (known, len(recordings._seen)) == ([1], 0)


def test_no_more_is_recorded_than_there_is_room_for(counted: type[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_KEPT_NBYTES", 24)
    recordings, one = replay.Recordings(), torch.ones(3)  # 12 bytes
    assert [run(recordings, key, one) for key in "aabbccca"] == [6, -6, 6, -6, 6, 6, 6, -6]
    assert recordings.nbytes() == 24
    recordings.clear()
    assert recordings.nbytes() == 0


def test_what_does_not_fit_into_memory_is_called(counted: type[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    recordings, one = replay.Recordings(), torch.ones(3)
    monkeypatch.setattr(Counted, "full", True)
    assert [run(recordings, "a", one) for _ in range(3)] == [6, 6, 6]
    monkeypatch.setattr(Counted, "leaving_fails", True)
    assert run(recordings, "a", one) == 6, "whatever is said on the way out"
    monkeypatch.setattr(Counted, "full", False)
    assert run(recordings, "a", one) == -6


def test_any_other_error_of_a_recording_is_told(counted: type[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    recordings, one = replay.Recordings(), torch.ones(3)
    monkeypatch.setattr(Counted, "broken", True)
    assert run(recordings, "a", one) == 6
    with pytest.raises(RuntimeError, match="invalidated"):
        run(recordings, "a", one)


def test_calls_beyond_those_that_are_remembered_are_made(
    counted: type[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_SEEN", 1)
    recordings, one = replay.Recordings(), torch.ones(3)
    assert [run(recordings, key, one) for key in "abab"] == [6, 6, -6, 6]


@pytest.fixture
def recorded(gpu: torch.device) -> Iterator[torch.device]:
    replay.RECORDINGS.clear()
    yield gpu
    replay.RECORDINGS.clear()


def units(device: torch.device, count: int) -> list[tuple[Tensor, Tensor, QueryMoment]]:
    generator = torch.Generator(device).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(SHAPE, device=device, generator=generator).bfloat16()

    return [(normal(), normal(), second_moment(normal(), SHAPE[1])) for _ in range(count)]


def arrays(chunk: SealedChunk) -> dict[str, Tensor]:
    pair = {"keys": chunk.keys, "values": chunk.values}
    return {
        f"{kind}.{name}": array.view(torch.uint8) for kind, each in pair.items() for name, array in each.arrays.items()
    }


def check_same(one: SealedChunk, other: SealedChunk) -> None:
    ours, theirs = arrays(one), arrays(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert torch.equal(array, theirs[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "parameters"), PARAMETERS)
def test_a_replay_gives_the_bytes_of_the_launches(
    recorded: torch.device, name: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, given = scheme(name, **parameters), units(recorded, 5)

    def sealed() -> list[SealedChunk]:
        made: list[SealedChunk] = []
        for keys, values, moment in given:
            made.append(seal_chunk(method, keys, values, moment, made[-1] if made else None))
        return made

    replayed = sealed()
    stream = torch.cuda.Stream(recorded)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        beside = sealed()
    torch.cuda.synchronize()
    monkeypatch.setattr(replay, "pays", lambda _: False)
    for expected, ours, other in zip(sealed(), replayed, beside, strict=True):
        check_same(ours, expected)
        check_same(other, expected)


@pytest.mark.gpu
def test_units_that_are_begun_together_do_not_share_memory(recorded: torch.device) -> None:
    method, given = scheme("quantwm"), units(recorded, 6)
    expected = [seal_chunk(method, *each) for each in given]
    pending = [begin_chunk(method, *each) for each in given]
    for each, chunk in zip(pending, expected, strict=True):
        check_same(each.wait(), chunk)


@pytest.mark.gpu
def test_what_a_recording_keeps_is_given_back(recorded: torch.device) -> None:
    method, (given,) = scheme("quantwm"), units(recorded, 1)
    seal_chunk(method, *given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    seal_chunk(method, *given)
    kept = torch.cuda.memory_allocated() - before
    unit = given[0].nbytes + given[1].nbytes
    assert unit < kept < 8 * unit
    replay.RECORDINGS.clear()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_have_recordings_of_their_own(recorded: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    method, made = scheme("quantwm"), []
    for index in (0, 1):
        given = units(torch.device("cuda", index), 3)
        made.append((given, [seal_chunk(method, *each) for each in given]))
    monkeypatch.setattr(replay, "pays", lambda _: False)
    for given, chunks in made:
        for each, chunk in zip(given, chunks, strict=True):
            check_same(chunk, seal_chunk(method, *each))
