"""Hosts whose models are compiled: the same bits, and nothing of the cache in a graph.

Causal-Forcing, with which Matrix-Game shares its seams, and FastVideo are held to this among their own tests.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from quantwm_models import attach
from tests.models.chunks import bits
from tests.models.graphs import compiled
from tests.models.hy_world_host import HunyuanVideo_1_5_Pipeline, WanPipeline
from tests.models.lingbot_world_host import WanI2VCausal
from tests.models.longcat_host import LongCatVideoPipeline
from tests.models.sglang_host import CausalDMDDenoisingStage
from tests.models.wan_host import noise


class Compiled(NamedTuple):
    """A host, what of it is compiled, and how it makes a video."""

    host: Any
    modules: list[nn.Module]
    video: Callable[[], Tensor]


def lingbot_world() -> Compiled:
    host = WanI2VCausal(6, 3, 3, layers=1, parallel=True)
    return Compiled(host, [host.model], lambda: host.generate(noise(0, 9)))


def sglang() -> Compiled:
    host = CausalDMDDenoisingStage(window=6)
    return Compiled(host, [block.attn1 for block in host.transformer.blocks], lambda: host.video(0, 9))


def longcat_video() -> Compiled:
    host = LongCatVideoPipeline(1)
    return Compiled(host, [host.dit], lambda: host.video(0, 2))


def wan() -> Compiled:
    host = WanPipeline(1)
    return Compiled(host, list(host.transformer.blocks), lambda: host.video(0, 2))


def hunyuan() -> Compiled:
    host = HunyuanVideo_1_5_Pipeline(1)
    return Compiled(host, list(host.transformer.double_blocks), lambda: host.video(0, 2))


HOSTS: dict[str, Callable[[], Compiled]] = {
    "lingbot_world, parallel": lingbot_world,
    "sglang": sglang,
    "longcat_video": longcat_video,
    "hy_world, 5B": wan,
    "hy_world, 8B": hunyuan,
}


@pytest.mark.parametrize("name", HOSTS)
def test_the_cache_is_in_no_graph(name: str) -> None:
    plain, ours = HOSTS[name](), HOSTS[name]()
    with attach(plain.host, "quantwm", iterations=1):
        expected = bits(plain.video())
    with compiled(ours.modules) as graphs, attach(ours.host, "quantwm", iterations=1):
        assert bits(ours.video()) == expected
    assert any("_host.py" in graph for graph in graphs)
    assert not any("quantwm_models" in graph for graph in graphs)
