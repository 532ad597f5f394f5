"""Stacks that keep a dict of tensors per layer, into which each pass writes: Causal-Forcing, LingBot-World, Matrix-Game.

Every denoising pass overwrites the chunk's keys and values; a window that is full rolls before a new chunk's first pass.
Keys are cached after their rotation by absolute positions. Where a pass begins and ends is told by tensors on the device,
which each layer reads, and waits for, as the hosts do.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from quantwm_eval.true_shapes.layers import DTYPE, Beside, Projections, Weights, angles, dense, rotated
from quantwm_eval.true_shapes.shape import Shape
from quantwm_eval.true_shapes.stack import Pass, Stack

Entry = dict[str, Any]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention on ``[B, N, H, D]``; looked up at call time, so that what takes its place may read another cache."""
    return dense(q, k, v)


class SelfAttention(nn.Module):
    """Self-attention that writes its chunk into a cache and attends to all of it.

    Args:
        shape: Sizes.
        weights: Where matrices come from.
        frame_tokens: Tokens of a latent frame.
        frames: Latent frames that the cache has room for.
    """

    def __init__(self, shape: Shape, weights: Weights, frame_tokens: int, frames: int) -> None:
        super().__init__()
        self.project = Projections(shape, weights)
        self.frame_tokens = frame_tokens
        self.local_attn_size = -1 if shape.window is None else frames
        self.sink_size = shape.sink
        self.max_attention_size = frames * frame_tokens

    def forward(self, x: Tensor, kv_cache: Entry, current_start: int, rotation: Tensor) -> Tensor:
        """One call on a chunk ``[B, n, width]`` that begins at an absolute token."""
        q, k, v = self.project.split(x)
        q, k = (rotated(each.transpose(1, 2), rotation).transpose(1, 2) for each in (q, k))
        end = self._put(kv_cache, k, v, current_start + x.shape[1])
        begin = max(0, end - self.max_attention_size)
        attended = attention(q, kv_cache["k"][:, begin:end], kv_cache["v"][:, begin:end])
        return self.project.join(attended)

    def _put(self, cache: Entry, k: Tensor, v: Tensor, stop: int) -> int:
        """Write a chunk that ends at absolute token ``stop``; returns the slot after it."""
        new, known, local = k.shape[1], int(cache["global_end_index"].item()), int(cache["local_end_index"].item())
        sink, evicted = self.sink_size * self.frame_tokens, 0
        if self.local_attn_size > 0 and stop > known:
            evicted = max(0, new + local - cache["k"].shape[1])
        if evicted:
            kept = local - evicted - sink
            for half in ("k", "v"):
                cache[half][:, sink : sink + kept] = cache[half][:, sink + evicted : sink + evicted + kept].clone()
        end = local + stop - known - evicted
        for half, made in (("k", k), ("v", v)):
            cache[half][:, end - new : end] = made
        cache["global_end_index"].fill_(stop)
        cache["local_end_index"].fill_(end)
        return end


class Block(nn.Module):
    """A layer."""

    action_model: nn.Module | None = None  # Matrix-Game's hosts have one, whose caches are the host's own

    def __init__(self, shape: Shape, weights: Weights, frame_tokens: int, frames: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(shape, weights, frame_tokens, frames)
        self.beside = Beside(shape, weights)

    def forward(self, x: Tensor, prompt: Tensor, **told: Any) -> Tensor:
        """One call on a chunk."""
        return self.beside.after(x, self.self_attn(self.beside.before(x), **told), prompt)


class Model(nn.Module):
    """All layers, and what adapters ask of a model."""

    def __init__(self, shape: Shape, weights: Weights, layers: int, frame_tokens: int, frames: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape, weights, frame_tokens, frames) for _ in range(layers))
        self.local_attn_size = -1 if shape.window is None else frames
        self.freqs = torch.empty(1024, 0)  # a row for each temporal position of the hosts

    def forward(self, x: Tensor, prompt: Tensor, kv_cache: list[Entry], **told: Any) -> Tensor:
        """One call on a chunk."""
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            x = block(x, prompt, kv_cache=cache, **told)
        return x


class Rolling(Stack):
    """The loop over chunks; how caches are allocated is said by the pipelines below.

    Args:
        shape, layers, latents, frame_tokens: As :class:`Stack` takes them.
        weights: Where matrices come from.
    """

    def __init__(self, shape: Shape, weights: Weights, *, layers: int, latents: int, frame_tokens: int) -> None:
        super().__init__(shape, weights, layers=layers, latents=latents, frame_tokens=frame_tokens)
        self.model = Model(shape, weights, layers, frame_tokens, self.cached)
        self.generator = SimpleNamespace(model=self.model)
        self.frame_seq_length, self.num_frame_per_block = frame_tokens, shape.chunk
        self.caches: list[Entry] = []
        self.prompt = weights.normal(1, shape.context, shape.width)

    def chunk(self, number: int, steps: int) -> Iterator[Pass]:
        """All passes of a chunk."""
        if number == 0:
            self.caches = self._allocate()
        tokens = self.shape.chunk * self.frame_tokens
        rotation = angles(
            number * self.shape.chunk, self.shape.chunk, self.frame_tokens, self.shape.channels, self.weights.device
        )
        x = self._drawn(1, self.shape.chunk)
        told = {"kv_cache": self.caches, "current_start": number * tokens, "rotation": rotation}
        for _ in range(steps):
            x = 0.5 * x + 0.5 * self.model(x, self.prompt, **told)
            yield "step", x
        if self.shape.clean:
            yield "clean", self.model(x, self.prompt, **told)

    def own_nbytes(self) -> int:
        """Bytes of the cache tensors that this host allocated itself."""
        held = (each[half] for each in self.caches for half in ("k", "v"))
        return sum(each.nbytes for each in held if isinstance(each, Tensor))

    def forget(self) -> None:
        """Let go of the cache."""
        super().forget()
        self.caches = []

    def _model(self) -> nn.Module:
        return self.model

    def _allocate(self) -> list[Entry]:
        raise NotImplementedError

    def _entry(self, sizes: tuple[int, ...], device: Any, dtype: torch.dtype = DTYPE) -> Entry:
        """One layer's dict."""
        return {
            "k": torch.zeros(sizes, dtype=dtype, device=device),
            "v": torch.zeros(sizes, dtype=dtype, device=device),
            "global_end_index": torch.tensor([0], device=device),
            "local_end_index": torch.tensor([0], device=device),
        }

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (1, self.cached * self.frame_tokens, self.shape.heads, self.shape.channels)


class CausalInferencePipeline(Rolling):
    """Allocates as Causal-Forcing does: the dicts are an attribute."""

    def __init__(self, shape: Shape, weights: Weights, **sizes: int) -> None:
        super().__init__(shape, weights, **sizes)
        self.kv_cache1: list[Entry] | None = None

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        sizes = (batch_size, *self._sizes[1:])
        self.kv_cache1 = [self._entry(sizes, device, dtype) for _ in self.model.blocks]

    def _allocate(self) -> list[Entry]:
        self._initialize_kv_cache(batch_size=1, dtype=DTYPE, device=self.weights.device)
        return self.kv_cache1 or []

    def forget(self) -> None:
        """Let go of the cache."""
        super().forget()
        self.kv_cache1 = None


class CausalInferenceStreamingPipeline(CausalInferencePipeline):
    """Allocates as Matrix-Game does; its small caches of actions are left out."""

    def __init__(self, shape: Shape, weights: Weights, **sizes: int) -> None:
        super().__init__(shape, weights, **sizes)
        self.local_attn_size = self.model.local_attn_size
        self.kv_cache_mouse: list[Entry] = []
        self.kv_cache_keyboard: list[Entry] = []

    def _initialize_kv_cache_mouse_and_keyboard(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        """There are none."""


class WanI2VCausal(Rolling):
    """Allocates as LingBot-World does: the method returns the dicts, which live as long as a video."""

    def _initialize_self_kv_cache(
        self, num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: Any
    ) -> list[Entry]:
        return [self._entry(shape, device, dtype) for _ in range(num_layers)]

    def _allocate(self) -> list[Entry]:
        return self._initialize_self_kv_cache(
            len(self.model.blocks), shape=self._sizes, dtype=DTYPE, device=self.weights.device
        )
