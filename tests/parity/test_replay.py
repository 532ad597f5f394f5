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

    def __init__(self, call: replay.Call, inputs: Sequence[Tensor]) -> None:
        self.call = call

    def replay(self, inputs: Sequence[Tensor]) -> replay.Made:
        return [{name: -tensor for name, tensor in each.items()} for each in self.call(inputs)]


def doubled(inputs: Sequence[Tensor]) -> replay.Made:
    return [{"twice": 2 * each} for each in inputs]


def test_a_call_is_replayed_from_the_second_time_on_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "Recording", Counted)
    recordings = replay.Recordings()

    def run(key: object, inputs: Sequence[Tensor]) -> float:
        return float(recordings.run(key, doubled, inputs)[0]["twice"].sum())

    one = [torch.ones(3)]
    assert [run("a", one), run("a", one), run("a", one)] == [6, -6, -6]
    assert run("b", one) == 6, "another key"
    assert run("a", [torch.ones(4)]) == 8, "another shape"
    for number in range(replay.MOST_RECORDINGS):
        run(number, one)
        run(number, one)
    assert run("a", one) == 6, "the oldest was forgotten"
    assert run(replay.MOST_RECORDINGS - 1, one) == -6
    recordings.clear()
    assert run(replay.MOST_RECORDINGS - 1, one) == 6
    assert not replay.pays(one), "a CPU is never waited for"


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
