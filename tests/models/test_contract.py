"""What every adapter must prove, by its name, under a small host of its own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_models import CacheObserver, LayerCache, adapters, attach
from quantwm_models.patching import module_of
from tests.hosts.live import Live, changed, footprint, formula_nbytes
from tests.models import wan_host
from tests.models.chunks import bits
from tests.models.miniatures import MINIATURES, Miniature
from tests.models.test_adapters import OWN

VIDEOS = ((0, 6), (1, 2), (2, 5))  # seed and chunks


class Sealed(CacheObserver):
    """All units, in the order in which they were sealed, and that no live token is sealed again."""

    def __init__(self) -> None:
        self.live: set[tuple[int, int]] = set()
        self.units: list[tuple[int, list[Tensor], list[bytes]]] = []

    def sealed(self, cache: LayerCache, chunk: Any, keys: Tensor, values: Tensor) -> None:
        tokens = {(id(cache), token) for token in range(chunk.start, chunk.stop)}
        assert not tokens & self.live
        self.live |= tokens
        arrays = [array for half in (chunk.keys, chunk.values) for array in half.arrays.values()]
        self.units.append((cache.layer, arrays, [bits(array) for array in arrays]))

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        self.live -= {(id(cache), token) for token in range(start, stop)}


def look(small: Miniature) -> dict[str, Any]:
    """All that the host is made of; a cache that it leaves for the next video is its own."""
    notes = ("kv_cache_dict", "_kv_cache", "kv_cache1", "kv_cache_mouse", "kv_cache_keyboard", "crossattn_cache")
    own = ("causal_kv_cache", "freqs_dict", "sink_tokens", "__warningregistry__")
    modules = (wan_host, module_of(small.host), module_of(small.layer))
    return footprint(Live(small.host, modules, small.video, (*notes, *own)))


def videos(small: Miniature, wanted: Sequence[tuple[int, int]] = VIDEOS) -> list[bytes]:
    with torch.no_grad():
        made = [small.video(*each) for each in wanted]
    assert all(each.isfinite().all() for each in made)
    return [bits(each) for each in made]


def test_every_adapter_has_a_small_host() -> None:
    assert sorted(MINIATURES) == sorted(OWN)


@pytest.mark.parametrize("name", OWN)
def test_bf16_gives_the_hosts_bits_and_leaves_nothing_behind(name: str) -> None:
    small, untouched = MINIATURES[name](), videos(MINIATURES[name]())
    assert adapters.find(small.host) is adapters.get(name)
    before = look(small)
    with attach(small.host, "bf16"):
        assert videos(small) == untouched
    assert not changed(before, look(small))
    assert videos(small) == untouched


@pytest.mark.parametrize("name", OWN)
def test_units_are_sealed_once_by_what_came_before_and_have_the_formulas_bytes(name: str) -> None:
    runs = []
    for chunks in (5, 6):
        small, seen = MINIATURES[name](), Sealed()
        with attach(small.host, "quantwm", iterations=2, observers=[seen]) as attachment:
            videos(small, [(0, chunks)])
        units, report = list(formula_nbytes(attachment)), attachment.report()
        assert units
        assert all(stated == stored for stated, stored in units)
        assert report.sealed_nbytes == sum(stored for _, stored in units)
        assert report.tokens - report.sealed_tokens == small.chunk * sum(
            cache.tokens > 0 for cache in attachment.caches
        )
        assert all([bits(array) for array in arrays] == then for _, arrays, then in seen.units)
        runs.append(seen.units)
    shorter, longer = ([[unit[2] for unit in run if unit[0] == layer] for layer in (0, 1)] for run in runs)
    # The longer video goes on as the shorter one began: what came later changed no byte.
    assert all(more[: len(less)] == less for less, more in zip(shorter, longer, strict=True))
    assert all(len(more) > len(less) > 0 for less, more in zip(shorter, longer, strict=True))


class HostFailureError(Exception):
    """Something goes wrong inside the host."""


@pytest.mark.parametrize("name", OWN)
def test_an_exception_inside_leaves_no_patch_and_the_host_usable(name: str) -> None:
    small, untouched = MINIATURES[name](), videos(MINIATURES[name]())
    before, calls = look(small), []

    def fail(*_: object) -> None:
        calls.append(0)
        if len(calls) == 8:
            raise HostFailureError

    hook = small.layer.register_forward_hook(fail)
    with pytest.raises(HostFailureError), attach(small.host, "quantwm", iterations=2):
        videos(small)
    hook.remove()
    assert not changed(before, look(small))
    with attach(small.host, "bf16"):
        assert videos(small) == untouched


@pytest.mark.parametrize("name", [name for name in OWN if name != "demo"])  # which switches them off itself
def test_gradients_are_refused_with_what_to_do(name: str) -> None:
    small = MINIATURES[name]()
    for weight in small.weights or small.layer.parameters():
        weight.requires_grad_(True)
    with attach(small.host, "bf16"), pytest.raises(StateError, match=r"torch\.no_grad"):
        small.video(0, 2)
