"""What is timed: the stream's own time on a GPU, pretended here, and on a real one where there is one."""

from __future__ import annotations

import time

import pytest
import torch

from quantwm_models import LayerCache
from quantwm_models.stopwatch import Stopwatch

GPU = torch.device("cuda", 0)


class Event:
    """An event of a GPU whose clock the test sets; it has passed what was recorded by then."""

    clock = 0.0
    passed = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = 0.0
        self.device: torch.device | None = None

    def record(self, device: torch.device) -> None:
        assert self.device in (None, device), "an event belongs to the device that it was recorded for first"
        self.device, self.at = device, Event.clock

    def query(self) -> bool:
        return self.at <= Event.passed

    def synchronize(self) -> None:
        Event.passed = max(Event.passed, self.at)

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "asked before it has passed"
        assert later.device == self.device, "two clocks"
        return later.at - self.at


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "clock", 0.0)
    monkeypatch.setattr(Event, "passed", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("quantwm_models.stopwatch.current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_a_cpu_is_timed_by_the_clock() -> None:
    watch = Stopwatch()
    mark = watch.start(torch.device("cpu"))
    time.sleep(0.01)
    watch.stop(mark)
    assert 0.01 <= watch.seconds() == watch.seconds()


@pytest.mark.usefixtures("pretended")
def test_a_gpu_is_timed_between_events() -> None:
    watch = Stopwatch()
    for begin, end in ((1000.0, 1250.0), (4000.0, 4250.0)):
        Event.clock = begin
        mark = watch.start(GPU)
        Event.clock = end
        watch.stop(mark)
    assert Event.passed == 0.0  # nobody waited
    assert watch.seconds() == 0.5
    assert Event.passed == 4250.0
    assert watch.seconds() == 0.5


@pytest.mark.usefixtures("pretended")
def test_what_is_timed_now_and_then_counts_for_all() -> None:
    watch = Stopwatch(3)
    timed = []
    for step in range(8):
        Event.clock = 100.0 * step
        mark = watch.start(GPU)
        timed.append(mark.event is not None)
        Event.clock += 10.0 + step
        watch.stop(mark)
    assert timed == [step in (0, 3, 6) for step in range(8)]
    assert watch.seconds() == pytest.approx(8 * (10 + 13 + 16) / 3 / 1000)


@pytest.mark.usefixtures("pretended")
def test_counting_anew_keeps_the_turns_and_what_they_told() -> None:
    watch = Stopwatch(3)
    told = []
    for _ in range(3):
        watch.restart()
        for step in range(2):
            mark = watch.start(GPU)
            Event.clock += 10.0 * (1 + step)
            watch.stop(mark)
        told.append(watch.seconds())
    # Of starts 0 to 5, the first (10 ms) and the fourth (20 ms) are timed.
    assert told == pytest.approx([2 * 0.010, 2 * 0.015, 2 * 0.015])
    on_cpu = Stopwatch()
    on_cpu.stop(on_cpu.start(torch.device("cpu")))
    on_cpu.restart()
    assert on_cpu.seconds() == 0


@pytest.mark.usefixtures("pretended")
def test_events_that_have_passed_are_not_kept() -> None:
    watch = Stopwatch()
    for step in range(50):
        Event.clock = 10.0 * step
        mark = watch.start(GPU)
        Event.clock += 1.0
        Event.passed = Event.clock
        watch.stop(mark)
    assert not watch._running
    assert watch.seconds() == pytest.approx(0.05)


@pytest.mark.usefixtures("pretended")
def test_events_of_one_gpu_are_not_recorded_for_another() -> None:
    watch = Stopwatch()
    for device in (GPU, torch.device("cuda", 1)):
        for _ in range(2):
            mark = watch.start(device)
            Event.clock += 500.0
            Event.passed = Event.clock
            watch.stop(mark)
            assert len(watch._spare) == 2, "over, for the same device to use again"
    assert watch.seconds() == 2.0


@pytest.mark.usefixtures("pretended")
def test_what_a_graph_captures_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    watch = Stopwatch()
    watch.stop(watch.start(GPU))
    assert watch.seconds() == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_neither_read_nor_seal_counts_what_was_queued_before() -> None:
    unit = torch.randn(2, 1, 4, 512, 64, generator=torch.Generator().manual_seed(0)).cuda()

    def run(cache: LayerCache, busy: int) -> None:
        for act in (lambda: cache.append(*unit), cache.seal, cache.read):
            if busy:
                torch.cuda._sleep(busy)
            act()

    run(LayerCache("quantwm"), 0)  # compiles
    queued = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    queued[0].record()
    torch.cuda._sleep(500_000_000)
    queued[1].record()
    queued[1].synchronize()
    asleep = queued[0].elapsed_time(queued[1]) / 1000
    cache = LayerCache("quantwm")
    run(cache, 500_000_000)
    report = cache.report()
    assert 0 < report.seal_seconds < asleep / 2
    assert 0 < report.decode_seconds < asleep / 2
