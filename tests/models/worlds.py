"""Layers that go on like a world, for the snapshot tests, and all that one of them holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantwm_models import LayerCache, Offload, Workspace, snapshot
from tests.models.chunks import bits, chunk, normal
from tests.models.chunks import snapshot as held
from tests.models.rolling_host import Pipeline

# Settings by which every method seals within a few small chunks.
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


def world(path: Path) -> Path:
    """A snapshot of two layers, three units and an active chunk."""
    caches = layers(window=96)
    go_on(caches, 0, 4)
    snapshot.save(caches, path)
    return path


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


def allocated(host: Pipeline) -> list[Any]:
    """Caches as a host makes them, or an adapter under it."""
    caches = host._initialize_kv_cache(1, torch.bfloat16, torch.device("cpu"))
    assert caches is not None
    return caches
