"""A cache in a file: what goes on from it is what would have been."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from quantwm_core import methods
from quantwm_core.errors import FormatError, StateError
from quantwm_models import LayerCache, attach, snapshot
from quantwm_models.ranks import Rank
from quantwm_models.store import pair
from tests.models.chunks import bits, chunk, fill, normal
from tests.models.chunks import snapshot as held
from tests.models.golden import make as golden
from tests.models.longcat_host import TOKENS, WIDTH, LongCatVideoPipeline
from tests.models.rolling_host import Pipeline, Settings
from tests.models.test_attach import ADAPTER
from tests.models.worlds import PARAMETERS, allocated, changed, go_on, layers, refused, value

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
SHAPES: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"sink": 5, "window": 80, "chunks_per_seal": 2, "decay": 0.5}, True),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "offloaded"), SHAPES)
@pytest.mark.parametrize("method", methods.names())
def test_going_on_from_the_file_is_going_on(
    method: str, shape: dict[str, Any], offloaded: bool, device: str, tmp_path: Path
) -> None:
    straight = layers(method, offloaded=offloaded, **shape)
    path = tmp_path / "world"
    go_on(straight, 0, 5, device)
    snapshot.save(straight, path)
    resumed = layers(method, offloaded=offloaded, **shape)
    go_on(resumed, 90, 2, device)  # another world was there
    snapshot.load(resumed, path)
    if device == "cpu":
        assert [value(each) for each in resumed] == [value(each) for each in straight]
    reads = [[bits(half.cpu()) for cache in caches for half in cache.read()] for caches in (resumed, straight)]
    assert reads[0] == reads[1]
    assert go_on(resumed, 5, 4, device) == go_on(straight, 5, 4, device)
    for one, other in zip(resumed, straight, strict=True):
        assert one.report().sealed_nbytes == other.report().sealed_nbytes > 0
        assert one.report().host_nbytes == other.report().host_nbytes
        assert one.report().shared_nbytes == other.report().shared_nbytes
        assert one.report().chunks_evicted == other.report().chunks_evicted


def between_calls(cache: LayerCache) -> Iterator[str]:
    """Every kind of state that a cache can be in."""
    yield "empty"
    cache.foresee(normal(1, 2, 8, 16, seed=1))
    yield "foreseen"
    cache.append(*chunk(0))
    yield "the first chunk, unasked"
    cache.observe(normal(1, 2, 8, 16, seed=2))
    yield "the first chunk, asked"
    fill(cache, 3, first=1)
    yield "units, an incomplete one, and an active chunk"
    cache.seal()
    yield "no active chunk"
    cache.evict(3, 40)
    yield "a hole"
    cache.append(*chunk(7))
    cache.evict(cache.tokens - 20, cache.tokens - 4)
    yield "part of a chunk"
    cache.rewind()
    yield "statistics alone"


def test_any_state_can_be_saved_and_is_saved_again_as_the_same_bytes(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"chunks_per_seal": 2, "sink": 4}
    for name in between_calls(cache := layers(count=1, **shape)[0]):
        (resumed,) = layers(count=1, **shape)
        snapshot.save(cache, tmp_path / "one")
        snapshot.load(resumed, tmp_path / "one")
        assert value(resumed) == value(cache), name
        snapshot.save(resumed, tmp_path / "two")
        assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes(), name


def test_keys_and_values_that_lie_in_one_memory_stay_apart(tmp_path: Path) -> None:
    (cache,), (resumed,) = layers("bf16", count=1), layers("bf16", count=1)
    square = normal(1, 16, 16, 16)
    cache.append(square, square.transpose(1, 2), copy=False)
    snapshot.save(cache, tmp_path / "world")
    snapshot.load(resumed, tmp_path / "world")
    assert [bits(each) for each in resumed.read()] == [bits(square), bits(square.transpose(1, 2))]


def test_a_world_branches(tmp_path: Path) -> None:
    trunk, one, other = (layers(window=64) for _ in range(3))
    go_on(trunk, 0, 4)
    snapshot.save(trunk, tmp_path / "world")
    for branch in (one, other):
        snapshot.load(branch, tmp_path / "world")
    left = go_on(one, 10, 3)
    assert go_on(other, 20, 3) != left
    assert go_on(trunk, 10, 3) == left


@pytest.mark.parametrize("offloaded", [False, True])
def test_where_units_are_kept_is_not_part_of_the_world(offloaded: bool, tmp_path: Path) -> None:
    straight, resumed = layers("klt", offloaded=offloaded), layers("klt", offloaded=not offloaded)
    go_on(straight, 0, 5)
    snapshot.save(straight, tmp_path / "world")
    snapshot.load(resumed, tmp_path / "world")
    assert bool(resumed[0].report().host_nbytes) != offloaded
    assert go_on(resumed, 5, 3) == go_on(straight, 5, 3)


@pytest.mark.parametrize("offloaded", [False, True])
def test_what_units_share_is_there_once_and_stays_shared(offloaded: bool, tmp_path: Path) -> None:
    (cache,), (resumed,) = (layers("klt", count=1, offloaded=offloaded) for _ in range(2))
    fill(cache, 4, 256)
    snapshot.save(cache, tmp_path / "world")
    with safe_open(tmp_path / "world", "np") as file:
        assert sum(name.endswith("keys.shared_basis") for name in file.keys()) == 1  # noqa: SIM118  # not a mapping
    snapshot.load(resumed, tmp_path / "world")
    for each in (cache, resumed):
        fill(each, 2, 256, first=4)
    bases = {unit.keys.arrays["shared_basis"].data_ptr() for unit in resumed.chunks}
    assert len(bases) == 1 < len(resumed.chunks)
    assert value(resumed)["sealed"] == value(cache)["sealed"]
    assert resumed.report().shared_nbytes == cache.report().shared_nbytes > 0


def test_the_file_takes_the_bytes_of_the_cache(tmp_path: Path) -> None:
    caches = layers("quantwm", count=3)
    for cache in caches:
        cache.append(*chunk(cache.layer, 512, channels=64))
        cache.seal()
    path = tmp_path / "world"
    snapshot.save(caches, path)
    reports = [cache.report() for cache in caches]
    stored = sum(each.sealed_nbytes + each.active_nbytes + each.state_nbytes for each in reports)
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert path.stat().st_size == stored + header
    assert header < 8192 * len(caches)


def test_what_the_caller_adds_comes_back(tmp_path: Path) -> None:
    (cache,) = layers(count=1)
    fill(cache, 2)
    state = torch.Generator().manual_seed(3).get_state()
    snapshot.save(cache, tmp_path / "world", {"noise": state, "frame": torch.tensor(7)})
    extra = snapshot.load(layers(count=1), tmp_path / "world")
    assert sorted(extra) == ["frame", "noise"]
    assert int(extra["frame"]) == 7
    assert torch.equal(extra["noise"], state)
    with pytest.raises(StateError, match=r"extra\.noise: the tensor requires grad"):
        snapshot.save(cache, tmp_path / "world", {"noise": torch.ones(1, requires_grad=True)})


def test_a_rank_is_that_of_who_shares_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "world", layers(count=1)
    go_on(cache, 0, 2)

    def this_is(rank: Rank | None) -> None:
        monkeypatch.setattr(snapshot, "rank_here", lambda: rank)

    this_is(Rank(1, 2))
    snapshot.save(cache, path)
    this_is(Rank(0, 2))
    snapshot.load(cache, path)  # of a rank that shares nothing
    cache[0].ranks = 2
    this_is(None)
    snapshot.save(cache, path)
    this_is(Rank(0, 2))
    snapshot.load(cache, path)  # of a process that knew no ranks, as older files are
    snapshot.save(cache, path)
    for here in (Rank(1, 2), Rank(0, 4), Rank(0, 1)):
        this_is(here)
        refused(cache, path, StateError, f"the file is of 'rank 0 of 2', this is '{here}'")
    this_is(None)
    snapshot.load(cache, path)
    this_is(Rank(0, 2))
    snapshot.load(cache, path)
    wrong: list[Any] = [0, [0], [0, 2, 2], [2, 2], [-1, 2], [0, 0], ["0", 2], {}]
    for damaged in wrong:
        changed(path, partial(dict.update, rank=damaged))
        refused(cache, path, FormatError, "rank")


@pytest.mark.parametrize("version", range(1, snapshot.VERSION + 1))
def test_every_version_is_read(version: int) -> None:
    caches = golden.world()
    expected = snapshot.load(caches, golden.FOLDER / f"world.v{version}.safetensors")
    for cache in caches:
        assert [bits(half) for half in cache.read()] == [bits(expected[f"{cache.layer}.{kind}"]) for kind in (0, 1)]
        assert cache.report().chunks_sealed == 3
        assert cache.stream.live[0] == (0, 4)
    go_on(caches, 6, 2)


class Told:
    """Remembers what a cache told."""

    def __init__(self) -> None:
        self.gone: list[tuple[int, int]] = []

    def evicted(self, _: LayerCache, start: int, stop: int) -> None:
        self.gone.append((start, stop))


def test_observers_hear_that_the_tokens_of_before_are_gone(tmp_path: Path) -> None:
    (cache,), (resumed,) = layers(count=1), layers(count=1)
    fill(cache, 1)
    snapshot.save(cache, tmp_path / "world")
    fill(resumed, 3)
    told: Any = Told()
    resumed.observers.append(told)
    snapshot.load(resumed, tmp_path / "world")
    assert told.gone == [(0, 48)]


# Under hosts.


def video(host: Pipeline, caches: list[Any], numbers: range) -> list[bytes]:
    """Chunks of a video, as the host's own loop makes them; noise is of the chunk's number alone."""
    s, made = host.settings, []
    for number in numbers:
        x = normal(1, s.chunk, s.query_heads * s.head_dim, seed=number)
        for _ in range(s.steps):
            x = (0.5 * x + 0.5 * host._model(x, caches, number * s.chunk)).to(s.dtype)
        made.append(bits(host._model(x, caches, number * s.chunk)))
    return made


INDICES = ("global_end_index", "local_end_index")


@pytest.mark.parametrize("method", methods.names())
def test_a_host_goes_on_in_another_process(method: str, tmp_path: Path) -> None:
    path, settings = tmp_path / "world", Settings(sink=24)
    host = Pipeline(settings)
    with attach(host, method, adapter=ADAPTER, **PARAMETERS.get(method, {})) as attachment:
        caches = allocated(host)
        video(host, caches, range(6))
        own = {f"{layer}.{name}": each[name] for layer, each in enumerate(caches) for name in INDICES}
        snapshot.save(attachment, path, own)
        expected = video(host, caches, range(6, 9))
    again = Pipeline(settings)
    with attach(again, method, adapter=ADAPTER, **PARAMETERS.get(method, {})) as attachment:
        with pytest.raises(StateError, match="given no caches yet; let it allocate"):
            snapshot.load(attachment, path)
        caches = allocated(again)
        extra = snapshot.load(attachment, path)
        for layer, each in enumerate(caches):
            each |= {name: extra[f"{layer}.{name}"] for name in INDICES}
        assert video(again, caches, range(6, 9)) == expected
        assert attachment.report().chunks_evicted > 0


def test_a_detached_host_is_saved_and_not_loaded_into(tmp_path: Path) -> None:
    host = Pipeline(Settings(window=96))
    with attach(host, "rtn", adapter=ADAPTER) as attachment:
        video(host, allocated(host), range(4))
        snapshot.save(attachment, tmp_path / "inside")
    snapshot.save(attachment, tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "inside").read_bytes()
    before = [held(cache) for cache in attachment.caches]
    with pytest.raises(
        StateError, match=r"after: the host was detached and reads these caches no more; attach\(\) again"
    ):
        snapshot.load(attachment, tmp_path / "after")
    assert [held(cache) for cache in attachment.caches] == before


@pytest.mark.parametrize("offload", [False, True])
def test_a_host_that_builds_its_history_anew_keeps_what_is_known_of_its_queries(offload: bool, tmp_path: Path) -> None:
    history, *noises = normal(4, 1, 4 * TOKENS, WIDTH, seed=1)
    host = LongCatVideoPipeline(offload=offload)
    with attach(host, "quantwm") as attachment:
        for noise in noises[:2]:
            history = host.generate_vc(history, noise)
        snapshot.save(attachment, tmp_path / "world")
        expected = bits(host.generate_vc(history, noises[2]))
    videos = []
    for known in (True, False):
        host = LongCatVideoPipeline(offload=offload)
        with attach(host, "quantwm") as attachment:
            if known:
                snapshot.load(attachment, tmp_path / "world")
            videos.append(bits(host.generate_vc(history, noises[2])))
    assert videos[0] == expected != videos[1]


def test_a_store_is_saved_with_its_other_half_or_not_at_all(tmp_path: Path) -> None:
    keys, values = pair(LayerCache("quantwm"), (1, 96, 2, 16))
    new_keys, new_values = (each.transpose(1, 2) for each in chunk(0))
    keys[:, 0:16] = new_keys
    for call in (snapshot.save, snapshot.load):
        if call is snapshot.load:
            snapshot.save(LayerCache("quantwm"), tmp_path / "world")
        with pytest.raises(StateError, match="layer 0: keys or values were written, the other half not yet"):
            call(keys, tmp_path / "world")
    values[:, 0:16] = new_values
    snapshot.save(values, tmp_path / "world")
    resumed, _ = pair(LayerCache("quantwm"), (1, 96, 2, 16))
    snapshot.load(resumed, tmp_path / "world")
    assert bits(resumed[:, 0:16].tensor()) == bits(new_keys)
    stale = resumed[:, 0:16].clone()
    snapshot.load(resumed, tmp_path / "world")
    with pytest.raises(StateError, match="the cache changed after this was cloned"):
        stale.tensor()


# What only a GPU can show.


@gpu
@pytest.mark.parametrize("method", methods.names())
def test_it_moves_between_devices(method: str, tmp_path: Path) -> None:
    straight, moved = layers(method), layers(method)
    go_on(straight, 0, 4, "cuda")
    snapshot.save(straight, tmp_path / "world")
    snapshot.load(moved, tmp_path / "world", device="cpu")
    assert all(cache.geometry is not None and cache.geometry.device.type == "cpu" for cache in moved)
    stored = [
        [
            bits(each.cpu())
            for unit in cache.chunks
            for half in (unit.keys, unit.values)
            for each in half.arrays.values()
        ]
        for cache in (*straight, *moved)
    ]
    assert stored[:2] == stored[2:]
    snapshot.save(moved, tmp_path / "back")
    snapshot.load(moved, tmp_path / "back", device="cuda:0")
    assert go_on(moved, 4, 3, "cuda") == go_on(straight, 4, 3, "cuda")
