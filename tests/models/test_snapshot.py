"""A cache in a file: what goes on from it is what would have been, and no failure costs either the file or the cache."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from quantwm_core import methods
from quantwm_core.errors import DeviceError, FormatError, QuantWMError, ShapeError, StateError
from quantwm_kernels import tensor_file as tensors_in_file
from quantwm_models import LayerCache, Offload, Workspace, attach, snapshot
from quantwm_models.store import pair
from tests.models.chunks import bits, chunk, fill, normal
from tests.models.chunks import snapshot as held
from tests.models.longcat_host import TOKENS, WIDTH, LongCatVideoPipeline
from tests.models.rolling_host import Pipeline, Settings
from tests.models.test_attach import ADAPTER

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
SHAPES: list[dict[str, Any]] = [{}, {"sink": 5, "window": 80, "chunks_per_seal": 2, "decay": 0.5}]
PARAMETERS: dict[str, dict[str, Any]] = {"kivi": {"residual_length": 24}}


def layers(method: str = "quantwm", count: int = 2, *, offloaded: bool = False, **settings: Any) -> list[LayerCache]:
    shared: dict[str, Any] = {"workspace": Workspace(), "offload": Offload() if offloaded else None}
    settings = PARAMETERS.get(method, {}) | settings
    return [LayerCache(method, layer=layer, **shared, **settings) for layer in range(count)]


def value(cache: LayerCache) -> dict[str, Any]:
    """All that a cache holds, but not which objects hold it."""
    whole = held(cache)
    whole["units"], whole["exact"] = list(whole["units"]), [each[1:] for each in whole["exact"]]
    return {name: part for name, part in whole.items() if name != "version"}


def go_on(caches: list[LayerCache], first: int, count: int, device: str = "cpu") -> list[bytes]:
    """Chunks, each written twice and asked in between; all that is read."""
    seen = []
    for number in range(first, first + count):
        for cache in caches:
            seed = 100 * cache.layer + number
            cache.append(*(each.to(device) for each in chunk(seed + 50, 16 + number % 3)))
            cache.observe(normal(1, 4, 8, 16, seed=seed).to(device))
            cache.overwrite(*(each.to(device) for each in chunk(seed, 16 + number % 3)))
            seen += [bits(each.cpu()) for each in cache.read()]
            cache.observe(normal(1, 2, 4, 16, seed=seed + 7).to(device))
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
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


def allocated(host: Pipeline) -> list[Any]:
    caches = host._initialize_kv_cache(1, torch.bfloat16, torch.device("cpu"))
    assert caches is not None
    return caches


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


# What fails.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of two layers, three units and an active chunk."""
    caches = layers(window=96)
    go_on(caches, 0, 4)
    snapshot.save(caches, tmp_path / "world")
    return tmp_path / "world"


class Interrupted(BaseException):
    """A crash."""


def failing(at: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that works until its call number ``at``."""
    calls = iter(range(at))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise Interrupted
        return real(*args, **kwargs)

    return call


PLACES = [
    *((tensors_in_file, "_pieces", at) for at in (0, 1, 7, 30)),
    (os, "fsync", 0),
    (Path, "replace", 0),
]


@pytest.mark.parametrize(("owner", "name", "at"), PLACES)
def test_an_interrupted_save_leaves_the_file_of_before(
    owner: Any, name: str, at: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, caches = saved.read_bytes(), layers(window=96)
    go_on(caches, 7, 5)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(at, getattr(owner, name)))
        with pytest.raises(Interrupted):
            snapshot.save(caches, saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
    snapshot.save(caches, saved)
    assert saved.read_bytes() != before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize("at", [0, 5, 20])
def test_a_process_that_dies_while_saving_leaves_the_file_of_before(
    at: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, caches = saved.read_bytes(), layers(window=96)
    go_on(caches, 7, 5)
    if (child := os.fork()) == 0:
        try:
            monkeypatch.setattr(tensors_in_file, "_pieces", failing(at, tensors_in_file._pieces))
            snapshot.save(caches, saved)
        finally:
            os._exit(9)  # nothing is tidied up
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert saved.read_bytes() == before
    snapshot.load(layers(window=96), saved)


def refused(caches: list[LayerCache], path: Path, error: type[Exception], message: str) -> None:
    """The file is refused, and the caches are what they were, to the byte and the object."""
    before = [held(cache) for cache in caches]
    with pytest.raises(error, match=message) as caught:
        snapshot.load(caches, path)
    assert type(caught.value) is error
    assert str(path) in str(caught.value)
    assert [held(cache) for cache in caches] == before


def changed(path: Path, change: Callable[[dict[str, Any]], object] = dict, **metadata: str) -> None:
    """Write the file anew with another state or metadata."""
    blob = path.read_bytes()
    size = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:size])
    state = json.loads(header["__metadata__"]["state"])
    change(state)
    header["__metadata__"] |= {"state": json.dumps(state)} | metadata
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob[size:])


OTHERS: list[tuple[Callable[[], list[LayerCache]], type[Exception], str]] = [
    (
        lambda: layers(window=96, count=1),
        StateError,
        r"caches: the file is of \[\('', 0\), \('', 1\)\], this is \[\('', 0\)\]",
    ),
    (lambda: layers(window=96)[::-1], StateError, "caches: the file is of"),
    (lambda: layers("rtn", window=96), StateError, "layer 0, keys.candidates: the file is of 4, this is 'nothing'"),
    (lambda: layers(window=96, rank=4), StateError, "layer 0, keys.rank: the file is of 8, this is 4"),
    (lambda: layers(window=96, values="bf16"), StateError, "layer 0, values"),
    (lambda: layers(window=96, chunks_per_seal=2), StateError, "chunks_per_seal: the file is of 1, this is 2"),
    (lambda: layers(window=96, decay=0.5), StateError, "decay: the file is of None, this is 0.5"),
    (layers, StateError, "window: the file is of 96, this is None"),
    (lambda: layers(window=96, sink=8), StateError, "sink: the file is of 0, this is 8"),
]


@pytest.mark.parametrize(("make", "error", "message"), OTHERS)
def test_a_snapshot_of_other_caches_is_refused(
    make: Callable[[], list[LayerCache]], error: type[Exception], message: str, saved: Path
) -> None:
    caches = make()
    go_on(caches, 20, 2)
    refused(caches, saved, error, message)


def test_a_snapshot_of_another_host_or_size_is_refused(saved: Path) -> None:
    (cache, other) = layers(window=96)
    for each in (cache, other):
        each.append(*chunk(0, heads=3))
    refused(
        [cache, other],
        saved,
        ShapeError,
        r"layer 0: the file holds .* \[1, 2, 16, 16\], this cache needs \[1, 3, 16, 16\]",
    )
    stores, _ = pair(layers(window=96)[0], (2, 96, 2, 16))
    cache = stores.halves.cache
    refused([cache, other], saved, ShapeError, r"this cache needs \[2, 2, 16, 16\]")
    host = Pipeline(Settings())
    with attach(host, "quantwm", adapter=ADAPTER) as attachment:
        allocated(host)
        with pytest.raises(StateError, match=r"the file is of 'no adapter', this is 'tests\.models"):
            snapshot.load(attachment, saved)


def test_a_file_of_another_version_or_kind_is_refused(saved: Path, tmp_path: Path) -> None:
    caches = layers(window=96)
    go_on(caches, 20, 2)
    blob = saved.read_bytes()
    changed(saved, format="quantwm-snapshot/2")
    refused(caches, saved, FormatError, "snapshot version 2, this release reads up to 1; upgrade quantwm")
    for stated in ("quantwm/1", "pt", "", "quantwm-snapshot/x"):
        changed(saved, format=stated)
        refused(caches, saved, FormatError, r"not a snapshot \(format '.*'\); snapshot\.save\(\) makes one")
    for content in (
        b"",
        b"hello",
        b"PK\3\4" + bytes(60),
        blob + b"\0",
        *(blob[: len(blob) * part // 9] for part in range(9)),
    ):
        saved.write_bytes(content)
        refused(caches, saved, FormatError, "truncated, or not a safetensors file")
    refused(caches, tmp_path, FormatError, "is a folder; name a file in it")
    with pytest.raises(FormatError, match="is a folder; name a file in it"):
        snapshot.save(caches, tmp_path)
    with pytest.raises(FileNotFoundError):
        snapshot.load(caches, tmp_path / "absent")


def test_a_device_that_is_not_there_is_refused(saved: Path) -> None:
    with pytest.raises(DeviceError, match=r"device 'cuda:99' is not there .*; name another one"):
        snapshot.load(layers(window=96), saved, device="cuda:99")
    changed(saved, lambda state: [each.update(device="cuda:98") for each in state["caches"]])
    with pytest.raises(DeviceError, match="device 'cuda:98' is not there"):
        snapshot.load(layers(window=96), saved)
    snapshot.load(layers(window=96), saved, device="cpu")


def entries(tree: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all that a JSON tree holds."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, each in pairs:
        yield (*where, key)
        yield from entries(each, (*where, key))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), junk=st.sampled_from([None, -1, 0, 1, 7, 0.5, "x", [], {}, [1, 2], 10**30, True]))
def test_a_damaged_state_is_refused_or_means_the_same(place: int, junk: Any, saved: Path) -> None:
    blob, caches = saved.read_bytes(), layers(window=96)

    def damage(state: dict[str, Any]) -> None:
        places = list(entries(state))
        *where, last = places[place % len(places)]
        tree: Any = state
        for key in where:
            tree = tree[key]
        tree[last] = junk

    changed(saved, damage)
    try:
        with contextlib.suppress(QuantWMError):
            snapshot.load(caches, saved)
            for cache in caches:
                assert len(bits(cache.read()[0])) == 2 * 2 * 16 * cache.tokens if cache.tokens else True
                cache.report()
        assert len({cache.tokens > 0 for cache in caches}) == 1
    finally:
        saved.write_bytes(blob)


def test_a_load_that_fails_late_changes_no_layer(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = layers(window=96)
    go_on(caches, 20, 2)
    for at in (0, 1, 12, 40):
        before = [held(cache) for cache in caches]
        with monkeypatch.context() as patch:
            patch.setattr(tensors_in_file.TensorFile, "read", failing(at, tensors_in_file.TensorFile.read))
            with pytest.raises(Interrupted):
                snapshot.load(caches, saved)
        assert [held(cache) for cache in caches] == before


def test_no_second_copy_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache,) = layers("bf16", count=1)
    for number in range(8):
        cache.append(*chunk(number, 2048, channels=64))
    staged: list[Tensor] = []
    real = tensors_in_file._staged

    def watched(flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part, stage in real(flat):
            staged.append(stage)
            assert stage.data_ptr() == part.data_ptr()
            yield part, stage

    monkeypatch.setattr(tensors_in_file, "_staged", watched)
    snapshot.save(cache, tmp_path / "world")
    own = {piece.data_ptr() for unit in cache.chunks for piece in unit.keys.arrays.values()}
    assert own <= {each.data_ptr() for each in staged}
    snapshot.load(layers("bf16", count=1), tmp_path / "world")


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
