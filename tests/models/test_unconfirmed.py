"""A GPU seals a unit while it is read already; whether it could be sealed is asked when a layer changes next.

Here sealings that are late by decree stand in for a GPU's, and a GPU's own are held against those of a CPU's kind at the end.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import DomainError
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.methods import begin_chunk
from quantwm_models import Attachment, LayerCache, Offload, Workspace, attach, snapshot
from quantwm_models.errors import CacheMemoryError
from quantwm_models.observer import CacheObserver
from quantwm_models.store import pair
from tests.models import chunks
from tests.models.causal_forcing_host import CausalInferencePipeline
from tests.models.chunks import bits, chunk, fill
from tests.models.test_memory import exhausted
from tests.models.wan_host import noise

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Late:
    """A unit that can be read before it is waited for, in memory of its own if another comes of it."""

    def __init__(self, chunk: SealedChunk, waited: list[int], error: BaseException | None, other: bool) -> None:
        self.chunk, self.waited, self.error = chunk, waited, error
        self.early = elsewhere(chunk) if other else chunk

    def readable(self) -> SealedChunk:
        return self.early

    def wait(self) -> SealedChunk:
        self.waited.append(self.chunk.start)
        if self.error is not None:
            raise self.error
        return self.chunk


class Decree(Protocol):
    """Makes sealings late from now on; returns the begins of units that were waited for."""

    def __call__(self, error: BaseException | None, *, since: int = 0, other: bool = False) -> list[int]: ...


def elsewhere(chunk: SealedChunk) -> SealedChunk:
    """The same unit in other memory."""
    keys, values = (
        replace(each, arrays={name: array.clone() for name, array in each.arrays.items()})
        for each in (chunk.keys, chunk.values)
    )
    return replace(chunk, keys=keys, values=values)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Decree:
    """Sealings that are late, and fail with ``error`` if they begin at token ``since`` or later."""

    def decree(error: BaseException | None, *, since: int = 0, other: bool = False) -> list[int]:
        waited: list[int] = []

        def begin(*args: Any) -> Late:
            chunk = begin_chunk(*args).wait()
            return Late(chunk, waited, error if chunk.start >= since else None, other)

        monkeypatch.setattr("quantwm_models.settling.begin_chunk", begin)
        return waited

    return decree


def layers(count: int = 2, **settings: Any) -> list[LayerCache]:
    workspace = Workspace()
    return [LayerCache("quantwm", layer=layer, workspace=workspace, iterations=1, **settings) for layer in range(count)]


def read(cache: LayerCache) -> list[bytes]:
    return [bits(half) for half in cache.read()]


def test_a_unit_is_read_at_once_and_waited_for_when_the_next_layer_changes(late: Decree) -> None:
    expected = layers(1)[0]
    fill(expected, 2)
    waited = late(None)
    first, second = layers()
    fill(first, 2)
    assert read(first) == read(expected)
    assert waited == []
    fill(second, 1)
    assert waited == [0]
    assert read(first) == read(expected)
    fill(second, 1)
    assert waited == [0]
    second.overwrite(*chunk(5))
    assert waited == [0, 0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda cache: cache.report(),
        lambda cache: cache.chunks,
        lambda cache: cache.contents,
        lambda cache: cache.seal(),
        lambda cache: cache.evict(0, 1),
        lambda cache: cache.store_in(None) or cache.report(),
        lambda cache: cache.rebuild(*chunk(1), None, [16]),
        lambda cache: cache.restart(*chunk(1)),
    ],
)
def test_whoever_needs_to_know_waits(late: Decree, ask: Callable[[LayerCache], object]) -> None:
    waited = late(None)
    (cache,) = layers(1)
    fill(cache, 2)
    assert waited == []
    ask(cache)
    assert 0 in waited


def test_a_cleared_cache_waits_for_nothing(late: Decree) -> None:
    waited = late(DomainError("keys hold NaN"))
    (cache,) = layers(1)
    fill(cache, 2)
    cache.clear()
    cache.append(*chunk(0))
    assert waited == []
    assert cache.tokens == 16


def test_observers_hear_of_what_is_certain(late: Decree) -> None:
    waited = late(None)
    told: list[int] = []

    class Listener(CacheObserver):
        def sealed(self, cache: LayerCache, chunk: SealedChunk, keys: Tensor, values: Tensor) -> None:
            told.append(chunk.start)

    (cache,) = layers(1, observers=[Listener()])
    fill(cache, 3)
    assert told == waited == [0, 16], "each was waited for before anybody was told"


@pytest.mark.parametrize(
    ("error", "seen"),
    [(DomainError("keys hold NaN"), DomainError), (torch.OutOfMemoryError("CUDA is full"), CacheMemoryError)],
)
def test_a_unit_that_could_not_be_sealed_leaves_the_cache_as_it_was(
    late: Decree, error: Exception, seen: type[Exception]
) -> None:
    first, second = layers()
    fill(first, 1)
    before = read(first)
    late(error)
    first.append(*chunk(1))
    first.observe(torch.ones(1, 2, 4, 16))
    assert first.tokens == 32
    with pytest.raises(seen, match="layer 0") as caught:
        second.append(*chunk(0))
    assert "layer 1" not in str(caught.value)
    assert second.tokens == 0
    assert first.tokens == 16
    assert read(first) == before
    late(None)
    second.append(*chunk(0))
    first.overwrite(*chunk(3))
    first.append(*chunk(4))
    assert first.report().chunks_sealed == 1


NAN = DomainError("keys hold NaN")


def test_an_interrupted_wait_is_begun_again(late: Decree) -> None:
    waited = late(KeyboardInterrupt())
    first, second = layers()
    fill(first, 2)
    for count in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            second.append(*chunk(0))
        assert waited == [0] * count, "who interrupts does not make a unit believed"
        assert (first.tokens, second.tokens) == (32, 0)


def test_what_goes_wrong_otherwise_is_not_believed_either(late: Decree) -> None:
    first, second = layers()
    fill(first, 1)
    before = snapshot_of(first)
    late(RuntimeError("CUDA error"))
    first.append(*chunk(1))
    with pytest.raises(RuntimeError, match="CUDA error"):
        second.append(*chunk(0))
    assert snapshot_of(first) == before
    late(None)
    fill(second, 2)
    assert second.report().chunks_sealed == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.append(*chunk(3)),
        lambda cache: cache.seal(),
        lambda cache: cache.evict(4, 30),
        lambda cache: cache.evict(0, cache.tokens),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"window": 48}, {"window": 32, "sink": 8}, {"chunks_per_seal": 2}])
def test_one_of_several_units_leaves_all_as_it_was(
    late: Decree, call: Callable[[LayerCache], None], settings: dict[str, int]
) -> None:
    """Units that are sealed together, or whose tokens the same call evicts."""
    (cache,) = layers(1, **settings)
    fill(cache, 3)
    cache.workspace.confirm()
    before = snapshot_of(cache)
    waited = late(NAN, since=cache.stream.sealed_end)
    call(cache)
    cache.read()
    cache.observe(torch.ones(1, 2, 4, 16))
    sealed = cache._unconfirmed is not None
    with pytest.raises(DomainError, match="layer 0: chunk") if sealed else nullcontext():
        cache.workspace.confirm()
    assert bool(waited) == sealed
    if sealed:
        assert snapshot_of(cache) == before
        late(None)
        call(cache)
    expected = layers(1, **settings)[0]
    fill(expected, 3)
    call(expected)
    assert read(cache) == read(expected)
    assert counts(cache) == counts(expected)


def test_two_units_that_one_call_seals_are_both_waited_for(late: Decree) -> None:
    (cache,) = layers(1, sink=8, window=64)
    fill(cache, 1)
    before = snapshot_of(cache)
    for since, called in ((0, [0]), (8, [0, 8]), (16, [0, 8])):
        waited = late(NAN, since=since)
        fill(cache, 1, first=1)
        assert [len(cache.stream.units), waited] == [2, []]
        with pytest.raises(DomainError, match="layer 0: chunk 0") if since < 16 else nullcontext():
            cache.workspace.confirm()
        assert waited == called
        assert (snapshot_of(cache) == before) == (since < 16)
    assert cache.report().chunks_sealed == 2


def test_what_memory_ran_out_for_is_not_taken_for_what_is_being_sealed(
    late: Decree, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = layers()
    fill(second, 1)
    late(NAN)
    fill(first, 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", exhausted)
        with pytest.raises(CacheMemoryError, match=r"^layer 1: out of memory"):
            second.read()
    with pytest.raises(DomainError, match=r"^layer 0: chunk 0: keys hold NaN"):
        second.overwrite(*chunk(3))


def test_a_cache_is_freed_at_once_and_what_it_sealed_is_told_of(late: Decree) -> None:
    late(NAN)
    first, second = layers()
    fill(first, 2)
    gone = weakref.ref(first)
    gc.collect()
    gc.disable()
    try:
        del first
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(DomainError, match=r"^layer 0: chunk 0: keys hold NaN"):
        second.append(*chunk(0))
    second.append(*chunk(0))
    assert second.tokens == 16


def test_caches_of_two_workspaces_wait_each_for_itself(late: Decree) -> None:
    waited = late(NAN)
    (first,), (second,) = layers(1), layers(1)
    for cache in (first, second):
        fill(cache, 2)
    assert waited == []
    for cache in (first, second):
        with pytest.raises(DomainError):
            cache.append(*chunk(2))
        assert cache.tokens == 16
    assert waited == [0, 0]


def test_what_is_held_instead_is_not_mistaken_for_what_was_sealed(late: Decree, tmp_path: Path) -> None:
    (saved,) = layers(1)
    fill(saved, 3)
    snapshot.save(saved, tmp_path / "saved")
    waited = late(NAN)
    first, second = layers()
    fill(first, 2)
    snapshot.load(first, tmp_path / "saved")
    assert first.workspace.unconfirmed is None, "whose BF16 tokens would be kept"
    second.append(*chunk(0))
    assert waited == []
    assert read(first) == read(saved)


def test_a_rewound_cache_keeps_its_statistics(late: Decree) -> None:
    waited = late(NAN)
    (cache,) = layers(1)
    fill(cache, 2)
    asked = cache.queries.folded().past
    cache.rewind()
    late(None)
    cache.append(*chunk(0))
    assert waited == []
    assert asked is not None
    assert cache.queries.past is not None
    assert cache.queries.past.queries == asked.queries


def test_a_unit_that_becomes_another_is_planned_anew(late: Decree) -> None:
    late(None, other=True)
    (cache,) = layers(1)
    fill(cache, 2)
    before, version = read(cache), cache.version
    early = next(iter(cache._contents.units.values()))
    (chunk,) = cache.chunks
    assert not set(places(early.chunk)) & set(places(chunk))
    cache.workspace.release()
    assert read(cache) == before
    assert cache.version == version, "what hosts cloned stays current"
    assert cache._contents.units[cache.stream.units[0]].serial == early.serial


@pytest.mark.parametrize("error", [None, DomainError("keys hold NaN")], ids=["another", "refused"])
def test_no_plan_keeps_a_unit_that_is_not_held_any_more(late: Decree, error: DomainError | None) -> None:
    late(error, other=True)
    (cache,) = layers(1)
    fill(cache, 2)
    cache.read()
    gone = weakref.ref(next(iter(cache._contents.units.values())).chunk.keys.arrays["codes"])
    with nullcontext() if error is None else pytest.raises(DomainError):
        cache.workspace.confirm()
    late(None)
    if error is not None:
        error.__traceback__ = None  # whose frames hold the sealing
    gc.collect()
    assert gone() is None


def test_what_a_graph_holds_stays_where_it_is(late: Decree, monkeypatch: pytest.MonkeyPatch) -> None:
    late(None, other=True)
    (cache,) = layers(1)
    fill(cache, 2)
    early = places(next(iter(cache._contents.units.values())).chunk)
    with monkeypatch.context() as patch:
        patch.setattr("quantwm_models.reads.capturing", lambda: True)
        cache.read()
    (chunk,) = cache.chunks
    assert places(chunk) == early
    fill(cache, 1, first=2)
    assert places(cache.chunks[0]) == early
    assert not set(places(cache.chunks[1])) & set(early)


def test_halves_of_a_write_that_is_refused_begin_anew(late: Decree) -> None:
    workspace = Workspace()
    first, second = (LayerCache("quantwm", layer=layer, workspace=workspace, iterations=1) for layer in range(2))
    stores = [pair(cache, (1, 64, 2, 16)) for cache in (first, second)]

    def write(layer: int, number: int) -> None:
        for store, half in zip(stores[layer], chunk(number), strict=True):
            store[:, 16 * number : 16 * number + 16] = half.transpose(1, 2)

    write(0, 0)
    late(NAN)
    write(0, 1)
    first_keys, _ = stores[0]
    first_keys[:, 16:32] = chunk(5)[0].transpose(1, 2)  # the values are still to come
    with pytest.raises(DomainError, match=r"^layer 0"):
        write(1, 0)
    assert (first.tokens, second.tokens, first.half_written, second.half_written) == (16, 0, True, False)
    late(None)
    stores[0][1][:, 16:32] = chunk(5)[1].transpose(1, 2)
    assert (first.tokens, first.half_written) == (32, False)
    assert torch.equal(first.read(16, 32)[0], chunk(5)[0])
    write(1, 0)
    assert second.tokens == 16


def test_leaving_a_host_tells_what_was_not_to_be_believed(late: Decree) -> None:
    def attached() -> tuple[Attachment, CausalInferencePipeline]:
        """A host whose last unit is being sealed."""
        late(None)
        host = CausalInferencePipeline()
        attachment = attach(host, "quantwm", iterations=1)
        host.inference(noise(0, 6))
        attachment.caches[0].workspace.confirm()
        late(NAN)
        attachment.caches[0].append(*chunk(0, 24))
        return attachment, host

    known = vars(CausalInferencePipeline()).keys()
    attachment, host = attached()
    with pytest.raises(DomainError, match="layer 0: chunk"):
        attachment.detach()
    assert vars(host).keys() == known
    attachment.detach()
    attachment, host = attached()
    with pytest.raises(DomainError, match="layer 0: chunk"), attachment:
        pass
    assert vars(host).keys() == known
    attachment, host = attached()
    with pytest.raises(ValueError, match="of the host"), attachment:
        raise ValueError("of the host")
    assert vars(host).keys() == known


def test_a_history_that_host_memory_has_no_room_for_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (cache,) = layers(1, offload=Offload())
    cache.rebuild(*chunk(0, 32), None, [16, 16])
    before, held = read(cache), snapshot_of(cache)
    with monkeypatch.context() as patch:
        patch.setattr("quantwm_models.offload.packed", exhausted)
        with pytest.raises(CacheMemoryError):
            cache.rebuild(*chunk(1, 32), None, [16, 16])
    assert snapshot_of(cache) == held
    assert read(cache) == before


def snapshot_of(cache: LayerCache) -> dict[str, Any]:
    """All that a cache holds; its version only ever rises."""
    return chunks.snapshot(cache) | {"version": None}


def counts(cache: LayerCache) -> tuple[int, ...]:
    report = cache.report()
    return report.tokens, report.chunks_sealed, report.chunks_evicted, report.sealed_nbytes, report.active_nbytes


def places(chunk: SealedChunk) -> list[int]:
    """Where a unit's arrays lie, empty ones apart."""
    arrays = (*chunk.keys.arrays.values(), *chunk.values.arrays.values())
    return [array.data_ptr() for array in arrays if array.numel()]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("method", ["quantwm", "qvg", "kivi", "rtn", "klt"])
@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_a_gpu_seals_the_same_bytes_early_and_late(method: str, threshold: float, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"threshold": threshold} if method == "quantwm" else {}
    workspace, reads = Workspace(), []
    early = LayerCache(method, workspace=workspace, **settings)
    late = LayerCache(method, observers=[CacheObserver()], **settings)
    for number in range(4):
        pair = [each.repeat(1, 1, 40, 1).cuda() for each in chunk(number)]
        for cache in (early, late):
            cache.append(*pair)
            cache.observe(pair[0][:, :, :64])
            reads.append([bits(half.cpu()) for half in cache.read()])
    assert reads[0::2] == reads[1::2]
    one, other = early.report(), late.report()
    assert one.sealed_nbytes == other.sealed_nbytes
    assert read_cpu(early) == read_cpu(late)
    for cache, name in ((early, "early"), (late, "late")):
        snapshot.save(cache, tmp_path / name)
    assert early.report().chunks_sealed == 3


@gpu
@pytest.mark.gpu
def test_a_gpu_tells_late_of_a_nan_and_the_cache_is_as_it_was() -> None:
    first, second = layers()
    bad = [each.cuda() for each in chunk(0)]
    bad[0][0, 1, 3, 2] = torch.nan
    first.append(*bad)
    first.append(*(each.cuda() for each in chunk(1)))
    with pytest.raises(DomainError, match="layer 0: chunk 0: keys"):
        second.append(*(each.cuda() for each in chunk(0)))
    assert first.tokens == 16
    first.overwrite(*(each.cuda() for each in chunk(0)))
    first.append(*(each.cuda() for each in chunk(1)))
    assert first.report().chunks_sealed == 1


@gpu
@pytest.mark.gpu
def test_a_graph_replays_what_was_not_confirmed_when_it_was_captured() -> None:
    first, second = layers(2, threshold=0.9)  # few coefficients: stored sparse once the status has come
    for number in range(3):
        keys, values = (each.repeat(1, 1, 40, 1).cuda() for each in chunk(number))
        first.append(keys, values)
        first.observe(keys[:, :, :64])
    expected, views = read_cpu(first), first.read()
    graph = torch.cuda.CUDAGraph()
    first.workspace.holds(())
    with torch.cuda.graph(graph):
        first.read()
    second.append(*(each.cuda() for each in chunk(0)))
    for view in views:
        view.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert [bits(view.cpu()) for view in views] == expected


def read_cpu(cache: LayerCache) -> list[bytes]:
    return [bits(half.cpu()) for half in cache.read()]
