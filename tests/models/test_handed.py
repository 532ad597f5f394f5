"""What is handed over to be saved or loaded and is none of that is refused before anything happens."""

from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from quantwm_core import methods
from quantwm_core.errors import DtypeError, ParameterError
from quantwm_core.method import Scheme
from quantwm_models import LayerCache, snapshot
from quantwm_models.store import pair
from tests.models.chunks import chunk
from tests.models.worlds import go_on, layers, value, world


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of two layers, three units and an active chunk."""
    return world(tmp_path / "world")


ONE = LayerCache()
NONE: tuple[Any, ...] = (None, 3, "x", [], {}, LayerCache)
NO_CACHES: list[tuple[Any, str]] = [
    *((each, r"caches .*: need an Attachment, or caches in an order") for each in NONE),
    ([ONE, None], "caches, number 1: got None, need a LayerCache"),
    ([LayerCache], "caches, number 0: got <class"),
    (b"x", "caches, number 0: got 120"),
    ([ONE, LayerCache(layer=1), ONE], "caches, number 2: layer 0 came before; name each cache once"),
    (list(pair(LayerCache(layer=4), (1, 8, 2, 16))), "caches, number 1: layer 4 came before"),
]


@pytest.mark.parametrize(("caches", "message"), NO_CACHES)
def test_what_are_no_caches_is_refused_and_the_file_stays(caches: Any, message: str, saved: Path) -> None:
    before = saved.read_bytes()
    for call in (snapshot.save, snapshot.load):
        with pytest.raises(ParameterError, match=message):
            call(caches, saved)
    assert saved.read_bytes() == before


@pytest.mark.parametrize("layer", ["a", None, [1], 1.5, True, 10**40, -1])
def test_a_layer_that_no_file_holds_is_refused_before_it_is_made(layer: Any) -> None:
    with pytest.raises(ParameterError, match=r"layer .*: need a whole number from 0 to"):
        LayerCache(layer=layer)


@pytest.mark.parametrize("layer", [0, 2**63 - 1, np.int64(3)])
def test_any_other_layer_is_saved(layer: int, tmp_path: Path) -> None:
    cache, other = LayerCache("bf16", layer=layer), LayerCache("bf16", layer=layer)
    cache.append(*chunk(0))
    snapshot.save(cache, tmp_path / "world")
    snapshot.load(other, tmp_path / "world")
    assert other.tokens == cache.tokens


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent/world: its folder is not there; make it first"):
        snapshot.save(ONE, tmp_path / "absent" / "world")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 3, 1.5, b"x", [], "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for call in (snapshot.save, snapshot.load):
        with pytest.raises(ParameterError, match=r"path .*: need the path of a file, as text or a Path"):
            call(LayerCache(), path)


NO_EXTRAS: list[tuple[Any, str]] = [
    *((none, r"extra .*: need a dictionary of tensors by name") for none in (3, "x", [], [("a", torch.ones(1))])),
    *(({name: torch.ones(1)}, r"extra .*: need a name of printable") for name in (3, None, "\ud800", "a\0b")),
    ({"a": 3}, r"extra 'a': got 3, need a dense tensor, as torch\.tensor\(3\) is one"),
    ({"a": None}, "extra 'a': got None"),
    ({"a": torch.eye(2).to_sparse()}, r"extra 'a': got a tensor of .*sparse.*, need a dense one"),
    ({"a": torch.ones(1, device="meta")}, r"extra 'a': got a tensor of .* on meta"),
]


@pytest.mark.parametrize(("extra", "message"), NO_EXTRAS)
def test_what_are_no_tensors_by_name_is_refused_and_the_file_stays(extra: Any, message: str, saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(ParameterError, match=message):
        snapshot.save(LayerCache(), saved, extra)
    with pytest.raises(DtypeError, match=r"extra\.a: got torch\.complex64"):
        snapshot.save(LayerCache(), saved, {"a": torch.ones(1, dtype=torch.complex64)})
    assert saved.read_bytes() == before


def test_settings_may_be_numbers_of_numpy_and_nothing_that_json_cannot_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # where the tests of core run in the same process
    window: Any = np.int64(96)
    go_on(caches := layers(window=window), 0, 3)
    for cache in caches:
        cache.evict(np.int64(3), np.int64(20))  # type: ignore[arg-type]  # whole numbers, too
    snapshot.save(caches, tmp_path / "world")
    snapshot.load(resumed := layers(window=96), tmp_path / "world")
    assert [value(each) for each in resumed] == [value(each) for each in caches]
    odd: Any = LayerCache(Scheme(methods.get("bf16"), methods.get("bf16")))
    object.__setattr__(odd.scheme, "decay", {1.0})
    with pytest.raises(ParameterError, match=r"a cache has the setting \{1\.0\}, which JSON cannot say"):
        snapshot.save(odd, tmp_path / "odd")
