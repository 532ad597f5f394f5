"""Sealed units in host memory: the same bytes, in the same place of a read, asked for one layer ahead."""

import gc
from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

import pytest
import torch

from quantwm_core import methods
from quantwm_core.errors import StateError
from quantwm_core.method import scheme
from quantwm_kernels.methods import seal_chunk
from quantwm_kernels.recipe import VECTOR_NBYTES
from quantwm_kernels.sealing import forget_recordings
from quantwm_models import CacheReport, LayerCache, Offload, Workspace, attach
from quantwm_models import offload as offload_module
from quantwm_models.packed import in_block, layout, packed, packed_nbytes
from tests.models.chunks import bits, chunk, fill, normal, snapshot
from tests.models.longcat_host import LongCatVideoPipeline

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def layers(count: int, offload: Offload | None, method: str = "quantwm", **settings: Any) -> list[LayerCache]:
    workspace = Workspace()
    return [LayerCache(method, layer=each, workspace=workspace, offload=offload, **settings) for each in range(count)]


def run(caches: list[LayerCache], device: str, chunks: int = 5, rounds: int = 3, hook: Any = None) -> list[bytes]:
    """All that the layers give back while they take chunks, in the order of a host."""
    seen = []
    for number in range(chunks):
        for cache in caches:
            keys, values = chunk(100 * cache.layer + number, 32)
            cache.append(keys.to(device), values.to(device))
        for step in range(rounds):
            for cache in caches:
                seen += [each.clone() for each in cache.read()]
                cache.observe(normal(1, 2, 8, 16, seed=7 * number + step).to(device))
                if hook is not None:
                    hook()
    return [bits(each.cpu()) for each in seen]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", methods.names())
def test_reads_and_sealed_bytes_are_those_of_a_cache_that_keeps_them(method: str, device: str) -> None:
    settings: dict[str, Any] = {"sink": 16, "window": 96}
    here, there = layers(3, None, method, **settings), layers(3, Offload(), method, **settings)
    assert run(there, device) == run(here, device)
    for one, other in zip(here, there, strict=True):
        both = [
            {(kind, name): bits(each.cpu()) for unit in cache.chunks for kind, name, each, _ in layout(unit)}
            for cache in (one, other)
        ]
        assert both[0] == both[1]
        assert all(each.device.type == "cpu" for unit in other.chunks for _, _, each, _ in layout(unit))


@pytest.mark.parametrize("device", DEVICES)
def test_the_report_says_where_the_bytes_are(device: str) -> None:
    here, there = layers(3, None), layers(3, Offload())
    for caches in (here, there):
        run(caches, device, chunks=3, rounds=1)
    reports = [[cache.report() for cache in caches] for caches in (here, there)]
    for one, other in zip(*reports, strict=True):
        assert other.host_nbytes == other.sealed_nbytes == one.sealed_nbytes > 0
        assert (one.host_nbytes, one.staging_nbytes) == (0, 0)
        # Two slots for a layer's units, each unit padded to the widest load at most.
        assert 0 <= other.staging_nbytes - 2 * other.sealed_nbytes < 2 * 16 * 2
        assert replace(other, host_nbytes=0, staging_nbytes=0, seal_seconds=0, decode_seconds=0) == replace(
            one, seal_seconds=0, decode_seconds=0
        )


def test_units_are_asked_for_one_layer_ahead() -> None:
    offload = Offload()
    caches = layers(3, offload)
    for number in range(3):
        for cache in caches:
            cache.append(*chunk(number))
    for cache in caches * 4:
        cache.read()
    assert (offload.late, offload.ahead) == (1, 11)
    for cache in caches:
        cache.append(*chunk(9))
    for cache in caches * 2:
        cache.read()
    assert (offload.late, offload.ahead) == (2, 16)
    caches[2].read()  # nothing to bring: the workspace holds it
    assert (offload.late, offload.ahead) == (2, 16)


def test_an_order_that_changes_costs_time_and_nothing_else() -> None:
    offload = Offload()
    caches, plain = layers(4, offload), layers(4, None)
    for each in (*caches, *plain):
        fill(each, 3 + each.layer)
    for number in (0, 3, 1, 2, 2, 0, 1, 3, 0, 3, 1, 2):
        both = [[bits(half) for half in group[number].read()] for group in (caches, plain)]
        assert both[0] == both[1]
    assert offload.late + offload.ahead == 11


def test_reads_of_the_active_chunk_alone_bring_nothing() -> None:
    offload = Offload()
    (cache,) = layers(1, offload)
    fill(cache, 3)
    cache.read(32, 48)
    assert (offload.late, offload.ahead, offload.nbytes) == (0, 0, 0)


def test_it_moves_to_and_fro() -> None:
    (cache,) = layers(1, None)
    fill(cache, 4)
    kept, before = [bits(each) for each in cache.read()], snapshot(cache)
    cache.store_in(Offload())
    assert cache.report().host_nbytes == cache.report().sealed_nbytes
    assert snapshot(cache) == before
    cache.workspace.release()
    assert [bits(each) for each in cache.read()] == kept
    cache.store_in(None)
    cache.workspace.release()
    assert [bits(each) for each in cache.read()] == kept
    assert (cache.report().host_nbytes, cache.report().staging_nbytes) == (0, 0)
    fill(cache, 1, first=4)
    assert cache.report().host_nbytes == 0


def test_the_slots_can_be_given_back() -> None:
    offload = Offload()
    caches = layers(2, offload)
    first = run(caches, "cpu", chunks=2, rounds=1)
    offload.release()
    assert offload.nbytes == 0
    caches[0].workspace.release()
    assert [bits(each) for cache in caches for each in cache.read()] == first[-4:]


def test_nothing_outlives_the_layers_and_what_they_evicted() -> None:
    offload = Offload()
    caches = layers(2, offload)
    for cache in caches:
        fill(cache, 3)
        cache.read()
    caches[0].clear()
    assert len(offload._wanted) == 1
    del cache
    caches.clear()
    assert len(offload._wanted) == 0


def test_a_unit_that_host_memory_does_not_take_is_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    (cache,) = layers(1, Offload())
    fill(cache, 3)
    before = snapshot(cache)
    real = torch.empty

    def refused(*shape: int, **settings: Any) -> Any:
        if settings.get("dtype") is torch.uint8:
            raise RuntimeError("no host memory")
        return real(*shape, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refused)
        with pytest.raises(RuntimeError, match="no host memory"):
            cache.seal()
    assert snapshot(cache) == before
    cache.seal()
    assert cache.report().chunks_sealed == 3


def test_one_block_holds_a_unit_to_the_byte() -> None:
    unit = seal_chunk(scheme("quantwm"), *chunk(0, 33, heads=3, channels=20))
    there, block = packed(unit)
    assert block.numel() == packed_nbytes(unit) == unit.nbytes == there.nbytes
    for kind, name, tensor, place in layout(unit):
        copied = getattr(there, kind).arrays[name]
        assert torch.equal(copied.view(torch.uint8), tensor.contiguous().view(torch.uint8))
        assert copied.data_ptr() == block.data_ptr() + place
        assert place % tensor.element_size() == place % gcd(tensor.nbytes, VECTOR_NBYTES) == 0
    elsewhere = in_block(there, block.clone())
    assert elsewhere.nbytes == unit.nbytes
    assert elsewhere.keys.arrays["codes"].data_ptr() != there.keys.arrays["codes"].data_ptr()


def test_a_unit_in_one_block_is_read_by_as_wide_loads() -> None:
    unit = seal_chunk(scheme("quantwm"), *chunk(0, 256, heads=3, channels=128))
    there, _ = packed(unit)
    assert there.keys.row.aligned == unit.keys.row.aligned
    assert unit.keys.row.aligned, "of any other this says nothing"


def test_a_host_has_its_units_in_host_memory_by_option() -> None:
    reports: list[CacheReport] = []
    videos, memories = [], []
    for offload in (False, True):
        host = LongCatVideoPipeline(layers=3)
        with attach(host, "quantwm", iterations=2, offload=offload) as attachment:
            videos.append(bits(host.video(0, 3)))
            memories.append(attachment.offload)
            reports.append(attachment.report())
    assert videos[0] == videos[1]
    assert reports[1].host_nbytes == reports[1].sealed_nbytes == reports[0].sealed_nbytes > 0
    assert reports[0].host_nbytes == reports[0].staging_nbytes == 0
    assert memories[0] is None
    assert memories[1] is not None
    assert reports[1].staging_nbytes == memories[1].nbytes > 0


class Stream:
    """A stream that notes what is done when its next work begins."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def wait_event(self, event: "Event") -> None:
        self.done |= event.done


class Event:
    """An event that notes what was done when it was recorded."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def record(self, stream: Stream | None = None) -> None:
        self.done = set() if stream is None else set(stream.done)


def test_the_next_units_wait_for_readers_on_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {name: Stream() for name in ("first", "second", "copies")}
    slot = offload_module._Slot(torch.device("cpu"))
    monkeypatch.setattr(slot, "_filled", Event())
    monkeypatch.setattr(slot, "_read", Event())
    for name in ("first", "second"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, name=name: streams[name])
        slot.wait()
        streams[name].done.add(name)
        slot.release()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams["copies"])
    slot.fill([])
    assert streams["copies"].done == {"first", "second"}


# What only a GPU can show.


@gpu
def test_the_copy_runs_while_the_layer_before_is_at_work() -> None:
    offload = Offload()
    caches = layers(2, offload, "bf16")
    for cache in caches:
        cache.append(*(each.cuda() for each in chunk(cache.layer, 4096, heads=4, channels=64)))
        cache.seal()
    for cache in caches * 2:
        cache.read()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # the host at work, about a second
    caches[0].read()
    done = torch.cuda.Event()
    done.record()
    (slots,) = offload._slots.values()
    latest = max(slots, key=lambda each: each.used)
    following = slots[1 - slots.index(latest)]
    assert following._filled is not None
    following._filled.synchronize()
    assert not done.query(), "the next layer's units came only after the layer before was done"
    torch.cuda.synchronize()


@gpu
@pytest.mark.parametrize("slow", [lambda: torch.cuda._sleep(200_000), None])
def test_nothing_is_overwritten_while_it_is_read(slow: Callable[[], None] | None) -> None:
    expected = run(layers(5, None), "cuda", hook=None)
    assert run(layers(5, Offload()), "cuda", hook=slow) == expected


@gpu
def test_blocks_are_pinned_and_reads_wait_for_nothing() -> None:
    caches = layers(2, Offload())
    for cache in caches:
        for number in range(3):
            cache.append(*(each.cuda() for each in chunk(number, 32)))
    for cache in caches * 2:
        cache.read()
    assert all(unit.block is not None and unit.block.is_pinned() for unit in caches[0]._contents.units.values())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for cache in caches * 2:
            cache.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_that_is_captured_is_refused_what_it_could_not_replay() -> None:
    caches: list[LayerCache] = layers(2, Offload())
    for cache in caches:
        for number in range(3):
            cache.append(*(each.cuda() for each in chunk(number, 32)))
        cache.read()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(StateError, match="layer 0: a CUDA graph is being captured"):
        caches[0].read()


@gpu
def test_memory_on_the_device_is_the_slots_and_no_more() -> None:
    def held(offload: Offload | None) -> int:
        gc.collect()  # what other tests left must not go in between
        torch.cuda.synchronize()
        forget_recordings()
        before = torch.cuda.memory_allocated()
        caches = layers(4, offload)
        for cache in caches:
            keys, values = (each.cuda() for each in chunk(cache.layer, 2048, heads=4, channels=64))
            cache.append(keys, values)
            cache.seal()
            del keys, values
        for cache in caches * 2:
            cache.read()
        caches[0].workspace.release()
        forget_recordings()
        after = torch.cuda.memory_allocated() - before
        report: CacheReport = caches[0].report()
        assert after >= report.staging_nbytes
        return after - report.staging_nbytes

    there, here = held(Offload()), held(None)
    assert there < here / 4
