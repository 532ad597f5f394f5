"""Who waits for memory that another stream writes; streams and events are pretended, so that no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quantwm_core.method import scheme
from quantwm_kernels import arrival, packed_attention, reading, reading_batches, triton
from quantwm_kernels.arrival import Arrival, Planned
from quantwm_kernels.attention_passes import Pass
from quantwm_kernels.methods import seal_chunk
from quantwm_kernels.reading import Piece, ReadPlan


class Stream:
    """A stream that notes what it waits for."""

    def __init__(self) -> None:
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


class Event:
    """An event that notes where it was recorded."""

    recorded: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream


class Table:
    """A tensor that notes the streams that it is kept for."""

    def __init__(self) -> None:
        self.readers: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.readers.append(stream)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Streams, the last of which is current."""
    entered = [Stream()]
    monkeypatch.setattr(arrival, "current_stream", lambda _: entered[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return entered


def test_another_stream_waits_and_keeps_the_memory(streams: list[Stream]) -> None:
    table = Table()
    tables = Arrival([cast("Any", table)], torch.device("cuda", 0))
    tables.expect()
    assert not streams[0].waited
    assert not table.readers
    streams.append(Stream())
    tables.expect()
    assert [event.recorded for event in streams[1].waited] == [streams[0]]
    assert table.readers == [streams[1]]


def test_a_captured_stream_waits_for_nothing(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    tables = Arrival([cast("Any", table)], torch.device("cuda", 0))
    streams.append(Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tables.expect()
    assert not streams[1].waited
    assert not table.readers


class Attending:
    """Attention on a GPU that nobody has, over a plan whose tables are noted, as is what streams waited for."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams
        self.tables: list[Table] = []
        self.launched: list[list[Event]] = []
        self.plan = ReadPlan([Piece(seal_chunk(scheme("bf16"), *torch.ones(2, 1, 1, 4, 8)), 0, 4, 0)])

    def passes(self, *_: object) -> tuple[SimpleNamespace]:
        self.tables.append(Table())
        return (SimpleNamespace(table=self.tables[-1]),)

    def attend(self, made: tuple[SimpleNamespace], *_: object, **__: object) -> None:
        assert [each.table for each in made] == self.tables
        self.launched.append([*self.streams[-1].waited])

    def __call__(self) -> None:
        with FakeTensorMode():
            queries: Tensor = torch.empty(1, 1, 3, 8, dtype=torch.bfloat16, device=torch.device("cuda", 0))
            packed_attention.run(queries, self.plan, [], (1, 1, 8, 8), 1.0)


@pytest.fixture
def attending(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> Attending:
    made = Attending(streams)
    monkeypatch.setattr(triton, "attention", made, raising=False)  # which needs Triton
    monkeypatch.setattr(packed_attention, "passes", made.passes)
    monkeypatch.setattr(packed_attention, "processors", lambda _: 1)
    return made


def test_attention_on_another_stream_waits_for_the_tables_and_keeps_them(attending: Attending) -> None:
    attending()
    attending.streams.append(Stream())
    attending()
    first, other = attending.launched
    assert not first
    assert [event.recorded for event in other] == [attending.streams[0]]
    assert [table.readers for table in attending.tables] == [[attending.streams[1]]]


def test_tables_that_graphs_captured_are_kept_once(attending: Attending, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: set[Planned[Pass]] = set()
    monkeypatch.setattr(packed_attention, "_captured", captured)
    attending()
    assert not captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attending()
    attending()
    assert captured == set(attending.plan.tables.values())


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none, where tensors are pretended")
@pytest.mark.usefixtures("streams")
def test_a_plan_makes_tables_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def batches(keys: object, values: object, device: torch.device, launch: object) -> tuple[()]:
        made.append(device)
        return ()

    monkeypatch.setattr(reading, "batches", batches)
    monkeypatch.setattr(reading, "run", lambda *_: None)  # which needs Triton
    plan = ReadPlan([Piece(seal_chunk(scheme("bf16"), *torch.ones(2, 1, 1, 4, 8)), 0, 4, 0)])
    with FakeTensorMode():
        for index in (0, 0, 1):
            out: Tensor = torch.empty(1, 1, 4, 8, dtype=torch.bfloat16, device=torch.device("cuda", index))
            plan.into(out, out)
    assert made == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_a_plan_of_no_token_needs_neither_triton_nor_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_: str) -> None:
        raise AssertionError

    monkeypatch.setattr(reading_batches, "check_available", unavailable)
    unit = seal_chunk(scheme("bf16"), *torch.ones(2, 1, 1, 4, 8))
    part = reading_batches.Part(unit.keys.row, 4, 4, 0)
    assert reading_batches.batches([], [], torch.device("cuda", 0)) == ()
    assert reading_batches.batches([part], [part], torch.device("cuda", 0)) == ()
