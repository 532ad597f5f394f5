"""No failure of a snapshot costs the file of before, or what a cache holds."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import DeviceError, FormatError, ShapeError, StateError
from quantwm_kernels import tensor_file
from quantwm_models import LayerCache, attach, snapshot
from quantwm_models.errors import CacheMemoryError
from quantwm_models.store import pair
from tests.models.chunks import chunk
from tests.models.chunks import snapshot as held
from tests.models.rolling_host import Pipeline, Settings
from tests.models.test_attach import ADAPTER
from tests.models.worlds import allocated, changed, go_on, layers, refused, world


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of two layers, three units and an active chunk."""
    return world(tmp_path / "world")


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
