"""Keys, queries and values of the bundled demo world while a video is generated with a BF16 cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.activations.recording import Recording
from quantwm_core.rotary import Turning
from quantwm_eval.demo import model as world_model
from quantwm_eval.demo import sampler
from quantwm_eval.demo_host import DemoHost

FRAMES = 32
CHUNK_TOKENS = 256
PASSES = 3
"""Calls of a chunk: two denoising steps, and the clean pass, which writes what the cache keeps."""


@contextmanager
def listening() -> Iterator[list[tuple[Tensor, ...]]]:
    """Collect what every call of the model's attention was given for the chunk it works on."""
    calls: list[tuple[Tensor, ...]] = []
    native = world_model.attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(tuple(part[:, -CHUNK_TOKENS:].clone() for part in (q, k, v)))
        return native(q, k, v)

    world_model.attention = attention
    try:
        yield calls
    finally:
        world_model.attention = native


def record(count: int) -> Iterator[Recording]:
    """Generate the random walks of scenes 0 to ``count - 1`` and yield what each layer wrote and asked in its clean passes."""
    host = DemoHost(sampler.load())
    for episode in host.episodes("walk", range(count), FRAMES, degrees=100):
        with listening() as calls:
            host.generate([episode], [0], lambda: None)
        layers, model = len(host.pipeline.model.blocks), host.pipeline.model
        turned = torch.atan2(model.sin[1, 0], model.cos[1, 0])  # the first token of frame 1: by time alone
        turning = Turning(model.config.frame_tokens, tuple(turned.tolist()))
        passes = [0, *range(PASSES, len(calls) // layers, PASSES)]
        for layer in range(layers):
            chunks = [calls[layers * each + layer] for each in passes]
            queries, keys, values = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*chunks, strict=True))
            yield Recording("room", f"scene {episode.scene}", layer, queries, keys, values, turning)
