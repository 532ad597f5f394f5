"""Keys, queries and values of the bundled demo world while a video is generated with a BF16 cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.activations.recording import Recording
from quantwm_core.rotary import Turning
from quantwm_eval.demo import model as world_model
from quantwm_eval.demo import sampler
from quantwm_eval.demo_host import DemoHost

FRAMES = 32
LONG_FRAMES, LONG_LAYERS = 352, (0, 3, 7)
"""A video of 89 chunks: eight units of 2816 tokens, as large models have them, and one chunk more."""
CHUNK_TOKENS = 256
PASSES = 3
"""Calls of a chunk: two denoising steps, and the clean pass, which writes what the cache keeps."""


@contextmanager
def listening(layers: int) -> Iterator[dict[int, list[tuple[Tensor, ...]]]]:
    """Collect, by layer, what the model's attention was given in its clean passes for the chunk it works on."""
    heard: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in range(layers)}
    native, numbers = world_model.attention, itertools.count()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number, layer = divmod(next(numbers), layers)
        if number % PASSES == 0:  # of the first chunk, which is real, there is no other
            heard[layer].append(tuple(part[:, -CHUNK_TOKENS:].clone() for part in (q, k, v)))
        return native(q, k, v)

    world_model.attention = attention
    try:
        yield heard
    finally:
        world_model.attention = native


def record(count: int, frames: int = FRAMES, chosen: Sequence[int] = ()) -> Iterator[Recording]:
    """Generate the random walks of scenes 0 to ``count - 1`` and yield what each layer wrote and asked in its clean passes.

    Args:
        count: Scenes.
        frames: Of each, beside the four that are real.
        chosen: Layers; none for all.
    """
    host = DemoHost(sampler.load())
    model = host.pipeline.model
    for episode in host.episodes("walk", range(count), frames, degrees=100):
        with listening(len(model.blocks)) as heard:
            host.generate([episode], [0], lambda: None)
        turned = torch.atan2(model.sin[1, 0], model.cos[1, 0])  # the first token of frame 1: by time alone
        turning = Turning(model.config.frame_tokens, tuple(turned.tolist()))
        for layer in chosen or heard:
            queries, keys, values = (
                torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*heard[layer], strict=True)
            )
            yield Recording("room", f"scene {episode.scene}", layer, queries, keys, values, turning)
