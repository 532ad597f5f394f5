"""Matrix-Game 2's pipelines in small: a window of frames, and two small caches of actions beside it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.wan_host import FRAME, WIDTH, Entry, Model, SelfAttention, attention, entry

__all__ = ["ActionModel", "CausalInferencePipeline", "CausalInferenceStreamingPipeline", "attention"]


class ActionModel(nn.Module):
    """Adds what the last frames' actions were, from a cache with a place a frame."""

    def __init__(self, window: int, *, mouse: bool = True, keyboard: bool = True) -> None:
        super().__init__()
        self.local_attn_size, self.enable_mouse, self.enable_keyboard = window, mouse, keyboard

    def forward(self, x: Tensor, start: int, mouse: Entry, keyboard: Entry) -> Tensor:
        """One call on a chunk that starts at token ``start``."""
        used = ((mouse, self.enable_mouse), (keyboard, self.enable_keyboard))
        for cache in (cache for cache, enabled in used if enabled):
            frame, frames = start // FRAME, cache["k"].shape[1]
            for each in range(frame, frame + x.shape[1] // FRAME):
                cache["k"][:, each % frames] = each
            x = x + cache["k"][:1, : self.local_attn_size, 0, 0].mean()
        return x


class CausalInferencePipeline(nn.Module):
    """Two denoising steps and a clean pass a chunk; the caches are made anew for every video."""

    def __init__(
        self, window: int = 6, *, actions: tuple[ActionModel | None, ...] | None = None, sink: int = 0, spare: int = 1
    ) -> None:
        super().__init__()
        model = Model([SelfAttention(seed, window, sink) for seed in range(2)], window)
        for block, action in zip(model.blocks, actions or (ActionModel(window), None), strict=True):
            vars(block)["action_model"] = action
        self.generator = SimpleNamespace(model=model)
        self.frame_seq_length, self.num_frame_per_block, self.local_attn_size = FRAME, 3, window
        self.num_transformer_blocks = 2 + spare
        self.kv_cache1: list[Entry] | None = None
        self.kv_cache_mouse: list[Entry] | None = None
        self.kv_cache_keyboard: list[Entry] | None = None

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        tokens = self.local_attn_size * self.frame_seq_length
        self.kv_cache1 = [entry(batch_size, tokens, device, dtype) for _ in range(self.num_transformer_blocks)]

    def _initialize_kv_cache_mouse_and_keyboard(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        layers, window = range(self.num_transformer_blocks), self.local_attn_size
        self.kv_cache_mouse = [entry(batch_size * FRAME, window, device, dtype) for _ in layers]
        self.kv_cache_keyboard = [entry(batch_size, window, device, dtype) for _ in layers]

    def inference(self, noise: Tensor) -> Tensor:
        """A video from ``[B, tokens, width]``."""
        self.kv_cache1 = self.kv_cache_mouse = self.kv_cache_keyboard = None
        arguments: dict[str, Any] = {"batch_size": noise.shape[0], "dtype": noise.dtype, "device": noise.device}
        self._initialize_kv_cache(**arguments)
        self._initialize_kv_cache_mouse_and_keyboard(**arguments)
        self.crossattn_cache = [{"is_init": False}]
        size, chunks = self.num_frame_per_block * FRAME, []
        for number, chunk in enumerate(noise.split(size, dim=1)):
            x = chunk
            for _ in range(2):
                x = 0.5 * x + 0.5 * self._model(x, number * size)
            chunks.append(x)
            self._model(x, number * size)
        return torch.cat(chunks, dim=1)

    def _model(self, x: Tensor, start: int) -> Tensor:
        caches = zip(self.kv_cache1 or [], self.kv_cache_mouse or [], self.kv_cache_keyboard or [], strict=True)
        assert x.shape[2] == WIDTH
        for block, (cache, mouse, keyboard) in zip(self.generator.model.blocks, caches, strict=False):
            x = block.self_attn(x, kv_cache=cache, current_start=start)
            x = x if block.action_model is None else block.action_model(x, start, mouse, keyboard)
        return x


class CausalInferenceStreamingPipeline(CausalInferencePipeline):
    """The same, asked chunk by chunk."""
