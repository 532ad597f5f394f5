"""Causal-Forcing's pipelines in small, by their names and their cache protocol."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.wan_host import FRAME, Entry, Model, SelfAttention, attention, entry, put, turned

STOCK_FRAMES = 7


class CausalInferencePipeline(nn.Module):
    """Two denoising steps and a clean pass a chunk; the dicts are kept between videos."""

    def __init__(self, window: int = -1, sink: int = 0, chunk: int = 3, layers: int = 2) -> None:
        super().__init__()
        model = Model([SelfAttention(seed, window, sink) for seed in range(layers)], window)
        self.generator = SimpleNamespace(model=model)
        self.frame_seq_length, self.num_frame_per_block, self.local_attn_size = FRAME, chunk, window
        self.kv_cache1: list[Entry] | None = None

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        frames = self.local_attn_size if self.local_attn_size > 0 else STOCK_FRAMES
        self.kv_cache1 = [entry(batch_size, frames * FRAME, device, dtype) for _ in self.generator.model.blocks]

    def inference(self, noise: Tensor) -> Tensor:
        """A video from ``[B, tokens, width]``."""
        if self.kv_cache1 is None:
            self._initialize_kv_cache(noise.shape[0], noise.dtype, noise.device)
            self.crossattn_cache = [{"is_init": False}]
        else:
            rewind(self.kv_cache1)
        assert self.kv_cache1 is not None
        return self.denoise(noise, self.kv_cache1)

    def denoise(self, noise: Tensor, *caches: list[Entry]) -> Tensor:
        """All chunks; several caches are of several prompts, and guidance leads away from the later ones."""
        model, size, chunks = self.generator.model, self.num_frame_per_block * FRAME, []
        for number, chunk in enumerate(noise.split(size, dim=1)):
            x = chunk
            for _ in range(2):
                first, *others = (model(x + branch, cache, number * size) for branch, cache in enumerate(caches))
                x = 0.5 * x + 0.5 * sum((first - other for other in others), start=first)
            chunks.append(x)
            for branch, cache in enumerate(caches):
                model(x + branch, cache, number * size)
        return torch.cat(chunks, dim=1)


class CausalDiffusionInferencePipeline(CausalInferencePipeline):
    """With a cache for the prompt and one for the negative prompt."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        del self.kv_cache1
        self.kv_cache_pos: list[Entry] | None = None
        self.kv_cache_neg: list[Entry] | None = None

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        super()._initialize_kv_cache(batch_size, dtype, device)
        self.kv_cache_pos = self.kv_cache1
        super()._initialize_kv_cache(batch_size, dtype, device)
        self.kv_cache_neg = self.kv_cache1
        del self.kv_cache1

    def inference(self, noise: Tensor) -> Tensor:
        """A video from ``[B, tokens, width]``."""
        if self.kv_cache_pos is None:
            self._initialize_kv_cache(noise.shape[0], noise.dtype, noise.device)
        else:
            rewind(self.kv_cache_pos, self.kv_cache_neg or [])
        assert self.kv_cache_pos
        assert self.kv_cache_neg
        return self.denoise(noise, self.kv_cache_pos, self.kv_cache_neg)


class AnchoredSelfAttention(SelfAttention):
    """Caches the first block before rotation, and rotates it for each read to stand right before the window."""

    block_length = 2 * FRAME

    def forward(
        self, x: Tensor, kv_cache: Entry | None = None, current_start: int = 0, updating_cache: bool = False
    ) -> Tensor:
        """One call on several blocks, of which the first is cached."""
        q, k, v, plain = self.project(x, current_start)
        assert kv_cache is not None
        size, stop = self.block_length, current_start + self.block_length
        first = current_start == 0
        end = put(kv_cache, (plain if first else k)[:, :size], v[:, :size], stop, size)
        if first:
            return x + attention(q, k, v).flatten(2)
        if updating_cache:
            begin = max(0, end - self.max_attention_size)
            keys, values = kv_cache["k"][:, begin:end].clone(), kv_cache["v"][:, begin:end]
            if begin == 0:
                keys[:, :size] = turned(keys[:, :size], 0)
            return x + attention(q, keys, values).flatten(2)
        begin = max(size, end - size - self.max_attention_size + size + x.shape[1])
        window = kv_cache["k"][:, begin : end - size]
        past = (current_start - window.shape[1] - size) // FRAME
        keys = torch.cat([turned(kv_cache["k"][:, :size], past), window, k], dim=1)
        values = torch.cat([kv_cache["v"][:, :size], kv_cache["v"][:, begin : end - size], v], dim=1)
        return x + attention(q, keys, values).flatten(2)


class RollingInferencePipeline(nn.Module):
    """The variant for long videos: two blocks at a time, the first of which is cached, noisy and then clean."""

    def __init__(self, layers: int = 2, frames: int = 10) -> None:
        super().__init__()
        self.generator = SimpleNamespace(model=Model([AnchoredSelfAttention(seed) for seed in range(layers)]))
        self.frame_seq_length, self.frames = FRAME, frames
        self.kv_cache_clean: list[Entry] | None = None

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        self.kv_cache_clean = [
            entry(batch_size, self.frames * FRAME, device, dtype) for _ in self.generator.model.blocks
        ]

    def inference_rolling_forcing(self, noise: Tensor) -> Tensor:
        """A video from ``[B, tokens, width]``."""
        if self.kv_cache_clean is None:
            self._initialize_kv_cache(noise.shape[0], noise.dtype, noise.device)
        else:
            rewind(self.kv_cache_clean)
        assert self.kv_cache_clean is not None
        model, size, x = self.generator.model, AnchoredSelfAttention.block_length, noise.clone()
        for start in range(0, noise.shape[1], size):
            both = slice(start, start + 2 * size)
            x[:, both] = 0.5 * x[:, both] + 0.5 * model(x[:, both], self.kv_cache_clean, start)
            model(x[:, start : start + size], self.kv_cache_clean, start, updating_cache=True)
        return x


def rewind(*caches: list[Entry]) -> None:
    """Begin a new video in the same dicts."""
    for each in (each for cache in caches for each in cache):
        each["global_end_index"], each["local_end_index"] = torch.tensor([0]), torch.tensor([0])


# The host calls the variant by the same name.
RollingInferencePipeline.__name__ = "CausalInferencePipeline"
