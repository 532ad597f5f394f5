"""Threads that run at once: each reads into memory of its own, and what is handed from one to another goes on."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import DomainError
from quantwm_kernels.reading import ReadPlan
from quantwm_models import LayerCache, Offload, Workspace, attach, snapshot
from quantwm_models.attention_hook import Attention
from quantwm_models.store import pair
from tests.models import rolling_host
from tests.models.chunks import bits, chunk, fill
from tests.models.rolling_host import Entry, Pipeline, Settings
from tests.models.test_attach import ADAPTER
from tests.models.test_unconfirmed import Decree, late
from tests.models.worlds import go_on, layers, value

__all__ = ["late"]

SECONDS = 60
Result = TypeVar("Result")


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """What calls return that run in a thread each, which all live until the last is done."""
    meet = threading.Barrier(len(calls), timeout=SECONDS)

    def run(call: Callable[[], Result]) -> Result:
        meet.wait()
        try:
            return call()
        except BaseException:
            meet.abort()
            raise
        finally:
            with suppress(threading.BrokenBarrierError):
                meet.wait()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(run, call) for call in calls]]


def elsewhere(call: Callable[[], Result]) -> Result:
    """What a call returns in a thread of its own, which is over then."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> threading.Barrier:
    """Where the small host's attention waits until another thread has read, too; once it is aborted, for nobody."""
    meet, dense = threading.Barrier(2, timeout=SECONDS), rolling_host.attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with suppress(threading.BrokenBarrierError):
            meet.wait()
        return dense(q, k, v)

    monkeypatch.setattr(rolling_host, "attention", attention)
    return meet


def test_layers_that_share_a_workspace_are_read_by_two_threads() -> None:
    workspace, meet = Workspace(), threading.Barrier(2, timeout=SECONDS)
    caches = [LayerCache("bf16", layer=layer, workspace=workspace) for layer in range(2)]

    def read(cache: LayerCache) -> list[bool]:
        same = []
        for number in range(4):
            cache.append(*chunk(10 * cache.layer + number))
            meet.wait()
            keys, values = cache.read()
            meet.wait()
            halves = zip((keys[:, :, -16:], values[:, :, -16:]), chunk(10 * cache.layer + number), strict=True)
            same.append(all(torch.equal(ours, theirs) for ours, theirs in halves))
        return same

    assert at_once([lambda: read(caches[0]), lambda: read(caches[1])]) == [[True] * 4] * 2


class Keeping(Pipeline):
    """A host that keeps the caches of every video."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.kept: list[list[Entry]] = []

    def _caches(self) -> list[Entry]:
        self.kept.append(super()._caches())
        return self.kept[-1]


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("method", ["bf16", "quantwm"])
def test_two_videos_of_one_host(method: str, offload: bool, meeting: threading.Barrier) -> None:
    parameters: dict[str, Any] = {"iterations": 1} if method == "quantwm" else {}
    host = Pipeline(Settings(window=96, sink=24))
    with attach(host, method, adapter=ADAPTER, offload=offload, **parameters):
        both = at_once([lambda: host.inference(0, 6), lambda: host.inference(1, 6)])
        meeting.abort()
        assert [bits(each) for each in both] == [bits(host.inference(seed, 6)) for seed in range(2)]


def test_each_of_two_threads_asks_for_its_own_video(tmp_path: Path) -> None:
    host = Keeping(Settings(window=96))
    done = threading.Barrier(2, timeout=SECONDS)
    with attach(host, "quantwm", iterations=1, adapter=ADAPTER) as attachment:

        def video(seed: int) -> tuple[list[Any], int, int]:
            host.inference(seed, 3 + seed)
            done.wait()
            snapshot.save(attachment, tmp_path / str(seed))
            report = attachment.report()
            return [value(cache) for cache in attachment.caches], report.chunks_sealed, report.workspace_nbytes

        both = at_once([lambda: video(0), lambda: video(1)])
        assert [sealed for _, sealed, _ in both] == [2 * 2, 2 * 3]
        assert [nbytes for *_, nbytes in both] == [2 * 2 * 96 * 2 * 16] * 2
        last = [value(cache) for cache in attachment.caches]
        assert last in [caches for caches, *_ in both], "of the main thread, which made none"
        for seed in range(2):
            host._caches()
            snapshot.load(attachment, tmp_path / str(seed))
            assert [value(cache) for cache in attachment.caches] == both[seed][0]


def test_caches_of_one_thread_after_the_other_are_not_kept() -> None:
    host, seen = Pipeline(Settings(window=96)), weakref.WeakSet[LayerCache]()
    with attach(host, "quantwm", iterations=1, adapter=ADAPTER) as attachment:

        def video(seed: int) -> int:
            host.inference(seed, 3)
            seen.update(attachment.caches)
            return attachment.report().workspace_nbytes

        pools = [ThreadPoolExecutor(1) for _ in range(3)]  # whose threads all live on
        nbytes = [pool.submit(video, 0).result() for pool in pools for _ in range(2)]
        gc.collect()
        assert len(seen) == 2
        assert set(nbytes) == {2 * 2 * 96 * 2 * 16}
        for pool in pools:
            pool.shutdown()


def test_offloaded_units_are_not_overwritten_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, into, other_is_done = Offload(), ReadPlan.into, threading.Event()
    caches = [LayerCache("quantwm", layer=layer, offload=shared, iterations=1) for layer in range(4)]
    for number, cache in enumerate(caches):
        fill(cache, 3, first=10 * number)

    def read(these: Sequence[LayerCache]) -> list[bytes]:
        seen = []
        for cache in these:
            cache.workspace.release()
            seen.append(bits(cache.read()[0]))
        other_is_done.set()
        return seen

    expected = [read(caches[:2]), read(caches[2:])]
    other_is_done.clear()

    def slow(plan: ReadPlan, keys: Tensor, values: Tensor) -> None:
        if threading.current_thread().name.endswith("_0"):
            other_is_done.wait(0.2)  # in vain, where one waits for the other
        into(plan, keys, values)

    monkeypatch.setattr(ReadPlan, "into", slow)
    assert at_once([lambda: read(caches[:2]), lambda: read(caches[2:])]) == expected
    assert shared.ahead + shared.late == 2 * len(caches)


def test_a_world_goes_on_in_another_thread() -> None:
    expected = go_on(layers("quantwm", offloaded=True), 0, 7)
    caches = layers("quantwm", offloaded=True)
    seen = go_on(caches, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        for first in (2, 4):
            seen += pool.submit(go_on, caches, first, 1).result()
            seen += go_on(caches, first + 1, 1)
        taken = caches[0].workspace.nbytes
    gc.collect()
    assert 0 < caches[0].workspace.nbytes < taken, "without that of the thread that ended"
    assert caches[0].report().workspace_nbytes == caches[0].workspace.nbytes
    caches[0].workspace.release()
    assert caches[0].workspace.nbytes == 0
    assert seen + go_on(caches, 6, 1) == expected


def test_what_one_thread_began_to_seal_another_waits_for(late: Decree) -> None:
    expected = LayerCache("quantwm", iterations=1)
    fill(expected, 3)
    waited = late(None)
    first, second = (LayerCache("quantwm", iterations=1) for _ in range(2))
    for cache in (first, second):
        elsewhere(partial(fill, cache, 2))
    assert waited == []
    fill(first, 1, first=2)
    assert waited == [0]
    assert bits(first.read()[0]) == bits(expected.read()[0])
    elsewhere(second.confirm)
    assert waited == [0, 0]


def test_what_could_not_be_sealed_is_told_in_the_thread_that_goes_on(late: Decree) -> None:
    late(DomainError("keys hold NaN"))
    cache = LayerCache("quantwm", layer=3, iterations=1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill, cache, 2).result()
        with pytest.raises(DomainError, match="layer 3: chunk 0"):
            cache.append(*chunk(2))
        late(None)
        cache.append(*chunk(2))
        assert cache.tokens == 32
        assert pool.submit(cache.workspace.confirm).result() is None, "which waits for nothing that is not its own"
    assert cache.report().chunks_sealed == 1


def test_a_unit_that_is_refused_late_takes_what_waits_with_it(late: Decree) -> None:
    late(DomainError("keys hold NaN"))
    cache = LayerCache("quantwm", iterations=1)
    keys, values = pair(cache, (1, 64, 2, 32))
    first, second = (torch.ones(1, 16, 2, 32) for _ in range(2))
    for place in (slice(0, 16), slice(16, 32)):
        keys[:, place] = first
        values[:, place] = second
    keys[:, 0:16] = keys[:, 16:32].clone()
    keys[:, 16:32] = first
    with pytest.raises(DomainError, match="keys hold NaN"):
        values[:, 0:16] = values[:, 16:32].clone()
    assert not cache.half_written


def test_who_forgets_what_another_thread_began_leaves_what_this_one_waits_for(late: Decree) -> None:
    waited, shared = late(None), Workspace()
    theirs, ours, third = (LayerCache("quantwm", iterations=1, workspace=shared) for _ in range(3))
    elsewhere(partial(fill, theirs, 2))
    fill(ours, 2)
    theirs.clear()
    assert waited == []
    third.append(*chunk(0))
    assert waited == [0]
    assert ours.report().chunks_sealed == 1


def test_queries_are_those_of_the_layer_that_runs_in_the_thread() -> None:
    meet = threading.Barrier(2, timeout=SECONDS)
    attention = Attention(lambda q, k, v: (meet.wait(), q + k + v)[1])

    def run(number: int) -> list[float]:
        seen: list[float] = []
        attention.watching.enter(seen, lambda q: seen.append(float(q)))
        meet.wait()
        attention(*torch.full((3, 1), float(number)))
        meet.wait()
        attention.watching.leave(seen)
        return seen

    assert at_once([lambda: run(1), lambda: run(2)]) == [[1.0], [2.0]]


def test_one_who_is_detached_is_forgotten_by_the_thread_whose_layer_runs() -> None:
    attention, owner = Attention(lambda *_: None), object()
    entered, forgotten = (threading.Barrier(2, timeout=SECONDS) for _ in range(2))

    def run() -> object:
        attention.watching.enter(owner, owner)
        entered.wait()
        forgotten.wait()
        return attention.watching.innermost

    def detach() -> None:
        entered.wait()
        attention.watching.forget(owner)
        forgotten.wait()

    assert at_once([run, detach]) == [None, None]
