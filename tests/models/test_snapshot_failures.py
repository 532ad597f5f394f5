"""No failure of a snapshot costs the file of before, or what a cache holds."""

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
from torch import Tensor

from quantwm_core.errors import DeviceError, FormatError, QuantWMError, ShapeError, StateError
from quantwm_kernels import tensor_file
from quantwm_models import LayerCache, attach, snapshot
from quantwm_models.errors import CacheMemoryError
from quantwm_models.store import pair
from tests.models.chunks import chunk
from tests.models.chunks import snapshot as held
from tests.models.rolling_host import Pipeline, Settings
from tests.models.test_attach import ADAPTER
from tests.models.worlds import allocated, go_on, layers, value


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of two layers, three units and an active chunk."""
    caches = layers(window=96)
    go_on(caches, 0, 4)
    snapshot.save(caches, tmp_path / "world")
    return tmp_path / "world"


class Interrupted(BaseException):
    """A crash."""


def failing(at: int, real: Callable[..., Any], error: type[BaseException] = Interrupted) -> Callable[..., Any]:
    """A function that works until its call number ``at``."""
    calls = iter(range(at))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return real(*args, **kwargs)

    return call


PLACES = [
    *((tensor_file, "_pieces", at) for at in (0, 1, 7, 30)),
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
            monkeypatch.setattr(tensor_file, "_pieces", failing(at, tensor_file._pieces))
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
    (lambda: layers("rtn", window=96), StateError, "layer 0, keys.method: the file is of 'quantwm', this is 'rtn'"),
    (lambda: layers(window=96, rank=4), StateError, "layer 0, keys.rank: the file is of 8, this is 4"),
    (
        lambda: layers(window=96, values="bf16"),
        StateError,
        r"layer 0, values\.method: the file is of 'quantwm', this is 'bf16'",
    ),
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
    with pytest.raises(DeviceError, match=r"device 'meta': .*quantwm serves CPU tensors and CUDA tensors"):
        snapshot.load(layers(window=96), saved, device="meta")
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


def put(tree: Any, where: tuple[Any, ...], junk: Any) -> None:
    """Put something else where ``where`` leads in a JSON tree."""
    *inner, last = where
    for key in inner:
        tree = tree[key]
    tree[last] = junk


# Four chunks that end at 16, 33, 51 and 67, of which the last is active.
STREAM, UNIT = ("caches", 1, "stream"), ("caches", 1, "units", 0)
JUNK: dict[tuple[Any, ...], tuple[list[Any], str]] = {
    ("adapter",): ([None, 0, [], False], "adapter: got"),
    ("caches", 1, "place", 1): ([1.0, True, "1"], "place: got"),
    ("caches", 1, "device"): ([None, 0, []], "device: got"),
    ("caches", 1, "geometry"): ([[True, 2, 16, 16], [1, 2, 16, 0], [1.0, 2, 16, 16], {}], "geometry: got"),
    (*STREAM, "ends"): (
        [[], [16, 33, 51], [33, 16, 51, 67], [16, 16, 51, 67], [0, 33, 51, 67], {}, [16, 33, 51, 67.0], [True, 33, 51, 67]],
        "ends?: got|live: got|chunks of|active: tokens|sealed_end: got",
    ),
    (*STREAM, "active"): (["x", [], 0, 1, None, float("nan"), False], "active: got|sealed_end: got"),
    (*STREAM, "live"): (
        [[], [[0, 66]], [[0, 68]], [[-1, 67]], [[16, 67]], [[0, 20], [20, 67]], [[0, 30], [29, 67]], [[9, 9], [0, 67]]],
        "live: got|active: tokens|are there, and none of them|are not the live tokens",
    ),
    (*STREAM, "units"): ([[], [[0, 16]], [[0, 16], [16, 33]], [[0, 51]], [[16, 33], [0, 16], [33, 51]], {}], "units"),
    (*STREAM, "sealed_end"): ([0, -1, True, 16, 50, 52, 67, 10**12, 51.0, None], "sealed_end: got"),
    ("caches", 1, "exact", 0, "span"): ([[51, 66], [52, 67], [50, 67], [51, 51], [51, True]], "exact|BF16 tokens"),
    ("caches", 1, "exact"): ([[], {}], "BF16 tokens|exact: got"),
    ("caches", 1, "groups"): ([[], {}], "groups: got"),
    ("caches", 1, "groups", 0, "start"): ([-1, 0, 16, 67, True, 10**12, 10**30], "groups: got"),
    ("caches", 1, "past", "queries"): ([-1, True, 1.5, 10**30, float("nan")], "queries: got"),
    ("caches", 1, "chunks_sealed"): ([-1, 0, 4, 3.0, 10**12], "chunks_sealed"),
    ("caches", 1, "chunks_evicted"): ([-1, 1, False, 10**12], "chunks_evicted"),
    ("caches", 1, "seal_seconds"): ([-1, float("nan"), float("inf"), 10**400, True, None], "seal_seconds: got"),
    (*UNIT, "start"): ([-1, 1, False, 16], "start: got|units .* are there"),
    (*UNIT, "version"): ([-1, 0, 2, 10**12, True, "1"], "version: got"),
    (*UNIT, "keys", "method"): (["rtn", "bf16", 3, []], "keys: "),
    (*UNIT, "keys", "parameters"): ([{}, [], None, {"rank": 8}], "keys: "),
    (*UNIT, "values", "parameters", "rank"): ([4, 10**12, 8.0, None], "values: "),
    (*UNIT, "values", "shape"): ([[True, 2, 16, 16], [1, 2, 0, 16], [1, 2, 16], [1, 2, 16, 16, 1]], "shape|unit's values|damaged"),
    (*UNIT, "values", "names"): ([["x"], [], {}], "values: |damaged|names: got"),
}  # fmt: skip


@pytest.mark.parametrize("where", JUNK, ids=lambda where: ".".join(map(str, where)))
def test_what_cannot_be_so_is_refused(where: tuple[Any, ...], saved: Path) -> None:
    caches, blob = layers(window=96), saved.read_bytes()
    junks, message = JUNK[where]
    for junk in junks:
        saved.write_bytes(blob)
        changed(saved, lambda state, junk=junk: put(state, where, junk))  # type: ignore[misc]  # the loop's own
        refused(caches, saved, FormatError, message)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, 10**6),
    junk=st.sampled_from(
        [None, -1, 0, 1, 7, 0.5, "x", [], {}, [1, 2], 10**12, 10**30, True, False, float("nan"), "fewer", "next"]
    ),
)
def test_a_damaged_state_is_refused_or_its_live_tokens_are_what_they_were(place: int, junk: Any, saved: Path) -> None:
    blob, caches, sound = saved.read_bytes(), layers(window=96), layers(window=96)
    snapshot.load(sound, saved)

    def damage(state: dict[str, Any]) -> None:
        places = list(entries(state))
        where = places[place % len(places)]
        old: Any = state
        for key in where:
            old = old[key]
        if junk == "fewer" and isinstance(old, list):
            old.pop()
        elif junk == "next" and isinstance(old, int):
            put(state, where, old + 1)
        else:
            put(state, where, junk)

    changed(saved, damage)
    try:
        with contextlib.suppress(QuantWMError):
            snapshot.load(caches, saved)
            for cache, whole in zip(caches, sound, strict=True):
                came, want = value(cache), value(whole)
                assert all(came[name] == want[name] for name in ("units", "sealed", "exact", "counters"))
                # Oldest tokens that are not live any more can have been evicted.
                for half, other in zip(cache.read(), whole.read(), strict=True):
                    assert torch.equal(half, other[:, :, whole.tokens - cache.tokens :])
                cache.report()
        assert len({cache.tokens > 0 for cache in caches}) == 1
    finally:
        saved.write_bytes(blob)


@pytest.mark.parametrize("at", [0, 1, 12, 40])
@pytest.mark.parametrize(
    ("error", "seen"), [(Interrupted, Interrupted), (torch.OutOfMemoryError, CacheMemoryError), (OSError, OSError)]
)
def test_a_load_that_fails_late_changes_no_layer(
    at: int, error: type[BaseException], seen: type[BaseException], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = layers(window=96)
    go_on(caches, 20, 2)
    before = [held(cache) for cache in caches]
    monkeypatch.setattr(tensor_file.TensorFile, "read", failing(at, tensor_file.TensorFile.read, error))
    with pytest.raises(seen, match="as it was: clear" if seen is CacheMemoryError else None):
        snapshot.load(caches, saved)
    assert [held(cache) for cache in caches] == before


def test_no_second_copy_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache,) = layers("bf16", count=1)
    for number in range(8):
        cache.append(*chunk(number, 2048, channels=64))
    staged: list[Tensor] = []
    real = tensor_file._staged

    def watched(flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part, stage in real(flat):
            staged.append(stage)
            assert stage.data_ptr() == part.data_ptr()
            yield part, stage

    monkeypatch.setattr(tensor_file, "_staged", watched)
    snapshot.save(cache, tmp_path / "world")
    own = {piece.data_ptr() for unit in cache.chunks for piece in unit.keys.arrays.values()}
    assert own <= {each.data_ptr() for each in staged}
    snapshot.load(layers("bf16", count=1), tmp_path / "world")
