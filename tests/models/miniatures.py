"""A small host for each adapter, by the adapter's name, all asked for videos in the same way."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.models import causal_forcing_host, lingbot_world_host, matrix_game_host
from tests.models.hy_world_host import WanPipeline
from tests.models.longcat_host import LongCatVideoPipeline
from tests.models.sglang_host import CausalDMDDenoisingStage
from tests.models.test_fastvideo import CausalDMDDenosingStage
from tests.models.wan_host import FRAME, noise


class Miniature(NamedTuple):
    """A host.

    Attributes:
        host: What an adapter attaches to.
        layer: A module that runs in every pass.
        video: Makes one, given a seed and a number of chunks.
        chunk: Tokens of one layer's active chunk; 0 where a cache is sealed as a whole.
        weights: Of the layer, where they are no parameters.
    """

    host: Any
    layer: nn.Module
    video: Callable[[int, int], Tensor]
    chunk: int
    weights: Sequence[Tensor] = ()


def causal_forcing() -> Miniature:
    host = causal_forcing_host.CausalInferencePipeline(9, 3)
    layer = host.generator.model.blocks[1].self_attn
    return Miniature(host, layer, lambda seed, chunks: host.inference(noise(seed, 3 * chunks)), 3 * FRAME)


def world() -> Any:
    """The bundled world's pipeline around a tiny model of which every weight matters."""
    if importlib.util.find_spec("quantwm_eval") is None:
        pytest.skip("quantwm-eval is not installed; its own tests include this path")
    model = importlib.import_module("quantwm_eval.demo.model")
    generator = torch.Generator().manual_seed(0)
    net = model.VideoTransformer(model.ModelConfig(width=64, heads=2, blocks=2, mlp_width=64, patch=16))
    for weight in net.parameters():
        weight.data.normal_(0, 0.3, generator=generator)
    return importlib.import_module("quantwm_eval.demo.sampler").WorldPipeline(net)


def demo() -> Miniature:
    host = world()
    host.local_attn_chunks, host.sink_frames = 3, 4

    def video(seed: int, chunks: int) -> Tensor:
        drawn = torch.Generator().manual_seed(seed)
        first = torch.randint(0, 256, (1, 4, 64, 64, 3), dtype=torch.uint8, generator=drawn)
        made: Tensor = host.generate(first, torch.randint(0, 7, (1, 4 * chunks), generator=drawn), seeds=[seed])
        return made

    return Miniature(host, host.model.blocks[1].attention.qkv, video, host.config.chunk_tokens)


def fastvideo() -> Miniature:
    host = CausalDMDDenosingStage(sink_size=1)
    layer = host.transformer.blocks[1].attn1
    return Miniature(host, layer, host.inference, 24, layer.projection.weights)


def hy_world() -> Miniature:
    host = WanPipeline()
    return Miniature(host, host.transformer.blocks[1], host.video, 0)


def lingbot_world() -> Miniature:
    host = lingbot_world_host.WanI2VCausal(9, 3, 3)
    layer = host.model.get_submodule("blocks.1.self_attn")
    return Miniature(host, layer, lambda seed, chunks: host.generate(noise(seed, 3 * chunks)), 3 * FRAME)


def longcat_video() -> Miniature:
    host = LongCatVideoPipeline()
    return Miniature(host, host.dit.blocks[1], host.video, 0)


def matrix_game() -> Miniature:
    host = matrix_game_host.CausalInferencePipeline(9, sink=3)
    layer = host.generator.model.blocks[1].self_attn
    return Miniature(host, layer, lambda seed, chunks: host.inference(noise(seed, 3 * chunks)), 3 * FRAME)


def sglang() -> Miniature:
    host = CausalDMDDenoisingStage(sink=3)
    return Miniature(
        host, host.transformer.blocks[1].attn1, lambda seed, chunks: host.video(seed, 3 * chunks), 3 * FRAME
    )


MINIATURES: dict[str, Callable[[], Miniature]] = {
    each.__name__: each
    for each in (causal_forcing, demo, fastvideo, hy_world, lingbot_world, longcat_video, matrix_game, sglang)
}
