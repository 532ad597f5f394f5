"""The memory that reads share: allocated once, filled only where it must be."""

import copy
import weakref
from typing import Any

import pytest
import torch

from quantwm_kernels import methods, reading
from quantwm_kernels.reading import ReadPlan
from quantwm_models import LayerCache, Workspace
from quantwm_models.report import CacheReport, total
from tests.models.chunks import bits, chunk, fill
from tests.models.worlds import layers


class Counter:
    """Counts the tokens that are reconstructed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        original = ReadPlan.into

        def counted(plan: ReadPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
            self.tokens += 2 * sum(piece.stop - piece.start for piece in plan.pieces)
            original(plan, keys, values)

        monkeypatch.setattr(ReadPlan, "into", counted)

    def taken(self) -> int:
        """Tokens of keys and values since the last question."""
        tokens, self.tokens = self.tokens, 0
        return tokens


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def test_memory_is_allocated_once_for_all_layers() -> None:
    workspace = Workspace(80)
    caches = [LayerCache("rtn", layer=layer, workspace=workspace) for layer in range(3)]
    places = set()
    for number in range(5):
        for cache in caches:
            fill(cache, 1, first=number)
            places.add(cache.read()[0].data_ptr())
    assert len(places) == 1
    assert workspace.nbytes == 2 * 2 * 2 * 80 * 16
    assert total((cache.report() for cache in caches), workspace.nbytes).workspace_nbytes == workspace.nbytes


def test_an_unchanged_read_decodes_nothing(counter: Counter) -> None:
    cache = LayerCache("rtn")
    fill(cache, 4)
    counter.taken()
    first = cache.read()
    assert counter.taken() == 2 * 48
    assert cache.read()[0].data_ptr() == first[0].data_ptr()
    cache.observe(chunk(0)[0])
    assert cache.report().tokens == 64
    cache.read()
    assert counter.taken() == 0


def test_a_denoising_step_rewrites_the_active_chunk_alone(counter: Counter) -> None:
    cache = LayerCache("rtn")
    fill(cache, 4)
    cache.read()
    counter.taken()
    cache.overwrite(*chunk(77))
    keys, _ = cache.read()
    assert counter.taken() == 0
    assert torch.equal(keys[:, :, 48:], chunk(77)[0])


def test_a_new_chunk_decodes_the_unit_that_was_sealed(counter: Counter) -> None:
    cache = LayerCache("rtn", workspace=Workspace(80))
    fill(cache, 4)
    cache.read()
    counter.taken()
    fill(cache, 1, first=4)
    cache.read()
    assert counter.taken() == 2 * 16


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ReadPlan]:
    """Plans that were made."""
    plans = []
    original = ReadPlan.__init__

    def counted(plan: ReadPlan, *arguments: Any) -> None:
        plans.append(plan)
        original(plan, *arguments)

    monkeypatch.setattr(ReadPlan, "__init__", counted)
    return plans


def test_a_plan_is_made_once_until_a_unit_comes_or_goes(made: list[ReadPlan]) -> None:
    workspace = Workspace(64)
    caches = [LayerCache("rtn", layer=layer, workspace=workspace) for layer in range(2)]
    for cache in caches:
        fill(cache, 4)
    for step in range(3):
        for cache in caches:
            cache.overwrite(*chunk(step))
            cache.read()
            cache.read(5, 40)
    assert len(made) == 2 * 2
    unit = weakref.ref(caches[0].chunks[0])
    del made[:]
    caches[0].evict(0, 16)
    assert unit() is None
    caches[0].read()
    caches[0].read()
    assert len(made) == 1


def test_a_chunk_that_no_unit_comes_of_leaves_the_plan(made: list[ReadPlan]) -> None:
    workspace = Workspace(128)
    caches = [LayerCache("rtn", layer=layer, workspace=workspace, chunks_per_seal=2) for layer in range(2)]
    for number, plans in ((5, 2), (1, 0), (1, 2)):
        begun = caches[0].stream.end // 16
        del made[:]
        for cache in caches:
            fill(cache, number, first=begun)
            keys, _ = cache.read()
            assert torch.equal(keys[:, :, -16:], chunk(begun + number - 1)[0])
        assert len(made) == plans


def test_whatever_changes_in_front_is_read_again(counter: Counter) -> None:
    cache = LayerCache("rtn")
    fill(cache, 4)
    cache.read()
    counter.taken()
    cache.evict(0, 5)
    read = bits(cache.read()[0])
    assert counter.taken() == 2 * 43
    cache.read(3, 20)
    cache.read()
    counter.taken()
    assert bits(cache.read()[0]) == read
    fresh = LayerCache("rtn")
    fill(fresh, 4)
    fresh.evict(0, 5)
    assert bits(fresh.read()[0]) == read


def test_layers_do_not_take_each_others_contents() -> None:
    workspace = Workspace(64)
    caches = [LayerCache("bf16", layer=layer, workspace=workspace) for layer in range(2)]
    for layer, cache in enumerate(caches):
        fill(cache, 3, first=10 * layer)
    for layer in (0, 1, 0):
        assert torch.equal(caches[layer].read(0, 16)[0], chunk(10 * layer)[0])


def test_a_read_that_fails_midway_is_not_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LayerCache("rtn")
    fill(cache, 4)
    expected = bits(cache.read()[0])
    cache.workspace.release()
    original = methods.decode_into
    calls = []

    def broken(*args: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        original(*args)  # type: ignore[arg-type]  # handed on as it came

    monkeypatch.setattr(reading, "decode_into", broken)
    with pytest.raises(MemoryError):
        cache.read()
    assert bits(cache.read()[0]) == expected


def test_token_major_memory_gives_contiguous_host_layout() -> None:
    workspace = Workspace(64, token_major=True)
    cache = LayerCache("rtn", workspace=workspace)
    other = LayerCache("rtn")
    fill(cache, 4)
    fill(other, 4)
    keys, values = cache.read(3, 60)
    assert keys.transpose(1, 2).is_contiguous()
    assert values.transpose(1, 2).is_contiguous()
    assert bits(keys) == bits(other.read(3, 60)[0])
    assert cache.read(48, 64)[0].stride() == torch.empty(1, 16, 2, 16).transpose(1, 2).stride()


def test_memory_grows_with_room_to_spare_and_other_shapes_get_their_own() -> None:
    workspace = Workspace()
    cache = LayerCache("bf16", workspace=workspace)
    sizes = set()
    for number in range(12):
        fill(cache, 1, first=number)
        keys, _ = cache.read()
        assert torch.equal(keys[:, :, -16:], chunk(number)[0])
        sizes.add(workspace.nbytes)
    assert 1 < len(sizes) < 8
    wide = LayerCache("bf16", workspace=workspace)
    wide.append(*chunk(0, channels=64, heads=4))
    assert wide.read()[0].shape == (1, 4, 16, 64)
    assert torch.equal(cache.read(0, 16)[0], chunk(0)[0])


def test_memory_can_be_given_back() -> None:
    cache = LayerCache("bf16")
    fill(cache, 2)
    first = bits(cache.read()[0])
    cache.workspace.release()
    assert cache.workspace.nbytes == 0
    assert bits(cache.read()[0]) == first


def test_reports_of_layers_add_up() -> None:
    one = CacheReport(tokens=3, sealed_nbytes=10, sealed_bf16_nbytes=50, active_nbytes=5, seal_seconds=0.5)
    both = total([one, one], workspace_nbytes=7)
    assert (both.tokens, both.sealed_nbytes, both.seal_seconds, both.workspace_nbytes) == (6, 20, 1.0, 7)
    assert both.ratio == one.ratio == 5.0
    assert both.ratio_with_active == 55 / 15
    assert CacheReport().ratio == CacheReport().ratio_with_active == 1.0


@pytest.mark.parametrize("name", ["workspace", "offload", "layer"])
def test_what_reads_go_through_and_files_name_is_not_replaced(name: str) -> None:
    cache = LayerCache("rtn")
    fill(cache, 3)
    before = [bits(each) for each in cache.read()]
    with pytest.raises(AttributeError):
        setattr(cache, name, Workspace())
    assert [bits(each) for each in cache.read()] == before


def test_a_copied_cache_has_a_workspace_of_its_own() -> None:
    caches = layers(count=2)
    for cache in caches:
        fill(cache, 3)
    expected = [bits(half) for half in caches[1].read()]
    copies = copy.deepcopy(caches)
    assert copies[0].workspace is copies[1].workspace is not caches[0].workspace
    copies[0].read()
    assert [bits(half) for half in caches[1].read()] == [bits(half) for half in copies[1].read()] == expected
