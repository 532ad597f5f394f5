"""Layers that go on like a world, for the snapshot tests, and all that one of them holds."""

from typing import Any

import torch

from quantwm_models import LayerCache, Offload, Workspace
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


def allocated(host: Pipeline) -> list[Any]:
    """Caches as a host makes them, or an adapter under it."""
    caches = host._initialize_kv_cache(1, torch.bfloat16, torch.device("cpu"))
    assert caches is not None
    return caches
