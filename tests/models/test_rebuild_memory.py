"""While a host builds its cache anew, one layer at most is dense: each is sealed before the next is made."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_models import LayerCache, Workspace, attach
from quantwm_models.adapters.hy_world import HyWorld
from quantwm_models.rebuilt import rebuild
from tests.models import hy_world_host
from tests.models.chunks import normal
from tests.models.hy_world_host import HunyuanVideo_1_5_Pipeline, WanPipeline
from tests.models.longcat_host import LongCatVideoPipeline

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LAYERS = 4


class Made:
    """Keys and values that layers made, as long as somebody holds them."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def add(self, *tensors: Any) -> None:
        """Those that a layer made just now."""
        self.tensors += [weakref.ref(each) for each in tensors if isinstance(each, Tensor)]

    def count(self, *_: object) -> None:
        """A layer begins."""
        self.alive.append(sum(each() is not None for each in self.tensors))


def longcat(made: Made, patch: pytest.MonkeyPatch) -> Any:
    host = LongCatVideoPipeline(LAYERS)
    for block in host.dit.blocks:
        block.register_forward_pre_hook(made.count)
        block.get_submodule("attn").register_forward_hook(lambda _, __, output: made.add(*output[1]))
    return host


def wan(made: Made, patch: pytest.MonkeyPatch) -> Any:
    host = WanPipeline(LAYERS)
    for block in host.transformer.blocks:
        block.register_forward_pre_hook(made.count)
        block.register_forward_hook(lambda _, __, output: made.add(*output[1].values()))
    return host


def hunyuan(made: Made, patch: pytest.MonkeyPatch) -> Any:
    host, original = HunyuanVideo_1_5_Pipeline(LAYERS), hy_world_host.sequence_parallel_attention_vision

    def attend(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        made.add(*output[2].values())
        return output

    patch.setattr(hy_world_host, "sequence_parallel_attention_vision", attend)
    for block in host.transformer.double_blocks:
        block.register_forward_pre_hook(made.count)
    return host


HOSTS: dict[str, tuple[Callable[[Made, pytest.MonkeyPatch], Any], Any]] = {
    "LongCat-Video": (longcat, None),
    "HY-World, 5B": (wan, None),
    "HY-World, 5B, stored once": (wan, HyWorld(once=True)),
    "HY-World, 8B": (hunyuan, None),
    "HY-World, 8B, stored once": (hunyuan, HyWorld(once=True)),
}


@pytest.mark.parametrize("name", HOSTS)
def test_no_layer_is_dense_when_the_next_begins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (make, adapter), made = HOSTS[name], Made()
    host = make(made, monkeypatch)
    host.video(0, 3)
    assert max(made.alive) >= 2 * (LAYERS - 1), "the untouched host keeps the keys and values of every layer"
    vars(made).update(tensors=[], alive=[])
    with attach(host, "quantwm", adapter=adapter, iterations=1) as attachment:
        host.video(0, 3)
    assert len(made.tensors) >= 2 * 2 * LAYERS  # several passes
    assert max(made.alive) == 0
    assert attachment.report().sealed_tokens == attachment.report().tokens > 0


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("units", [1, 2])
def test_peak_memory_of_building_and_reading_is_within_the_model(units: int) -> None:
    layers, heads, tokens, channels = 8, 16, 8192, 128
    pair, workspace = 2 * 2 * heads * tokens * channels, Workspace()
    caches = [LayerCache("quantwm", layer=layer, workspace=workspace, iterations=2) for layer in range(layers)]
    queries = normal(1, heads, 256, channels, seed=1).cuda()

    def build_layer(cache: LayerCache) -> None:
        keys, values = torch.randn(2, 1, heads, tokens, channels, device="cuda", dtype=torch.bfloat16)
        rebuild(cache, keys, values, None, [tokens // units] * units)
        cache.observe(queries)

    def build() -> None:
        for cache in caches:
            build_layer(cache)

    def read() -> None:
        for cache in caches:
            cache.read()

    def peak(call: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    for _ in range(3):  # compiles, leaves statistics behind, and then records what is launched with them
        build()
    read()
    sealed = sum(cache.report().sealed_nbytes for cache in caches) // layers
    # A layer's keys and values, as much as a unit of them to work in, and its old units beside the new ones.
    assert peak(build) <= 1.03 * (pair + pair // units + sealed)
    assert peak(read) <= 0.03 * pair, "reads take no memory beyond the workspace, which is there"
    assert workspace.nbytes <= 1.03 * pair
