"""LingBot-World's pipeline in small: dicts that live as long as a video, and three ways of running the model."""

import types
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.wan_host import (
    CHANNELS,
    FRAME,
    HEADS,
    WIDTH,
    Entry,
    Model,
    SelfAttention,
    attention,
    entry,
    put,
)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The other function, which the parallel forward calls."""
    return attention(q, k, v)


def parallel_forward(self: Any, x: Tensor, kv_cache: Entry, current_start: int, max_attention_size: int) -> Tensor:
    """Takes the place of a layer's forward on the instance; places are tensors of one number."""
    q, k, v, _ = self.project(x, current_start)
    rolls = self.local_attn_size > 0
    end = put(kv_cache, k, v, current_start + torch.tensor(x.shape[1]), self.sink_size * FRAME, rolls=rolls)
    begin = max(0, end - max_attention_size)
    return x + flash_attention(q, kv_cache["k"][:, begin:end], kv_cache["v"][:, begin:end]).flatten(2)


class LocalSelfAttention(SelfAttention):
    """Attends to as much as it is told."""

    def forward(
        self, x: Tensor, kv_cache: Entry | None = None, current_start: int = 0, max_attention_size: int = 1_000_000
    ) -> Tensor:
        """One call on a chunk ``[B, n, width]``."""
        q, k, v, _ = self.project(x, current_start)
        assert kv_cache is not None
        rolls = self.local_attn_size > 0
        end = put(kv_cache, k, v, current_start + x.shape[1], self.sink_size * FRAME, rolls=rolls)
        begin = max(0, end - max_attention_size)
        return x + attention(q, kv_cache["k"][:, begin:end], kv_cache["v"][:, begin:end]).flatten(2)


class Rebuilding(nn.Module):
    """Hands a model copies of the dicts that it is given, as sharded weights do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.wrapped = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.wrapped, name)

    def forward(self, x: Tensor, kv_cache: list[Entry], current_start: int, **options: Any) -> Any:
        """One call."""
        return self.wrapped(x, [dict(each) for each in kv_cache], current_start, **options)


class WanI2VCausal:
    """Generates with a distilled model, or with guidance."""

    def __init__(
        self,
        window: int = -1,
        sink: int = 0,
        chunk: int = 4,
        *,
        layers: int = 2,
        guided: bool = False,
        parallel: bool = False,
        sharded: bool = False,
    ) -> None:
        model: nn.Module = Model([LocalSelfAttention(seed, window, sink) for seed in range(layers)])
        if parallel:
            for block in model.get_submodule("blocks").children():
                vars(block.get_submodule("self_attn"))["forward"] = types.MethodType(
                    parallel_forward, block.get_submodule("self_attn")
                )
        self.model = Rebuilding(model) if sharded else model
        self.local_attn_size, self.chunk, self.layers, self.guided = window, chunk, layers, guided

    def _model(self, x: Tensor, cache: list[Entry], start: int, **options: Any) -> Any:
        return self.model(x, cache, start, **options)

    def _initialize_self_kv_cache(
        self, num_layers: int, shape: list[int], dtype: torch.dtype, device: Any
    ) -> list[Entry]:
        return [entry(shape[0], shape[1], device, dtype) for _ in range(num_layers)]

    def generate(self, noise: Tensor, limit: int | None = None) -> Tensor:
        """A video from ``[B, tokens, width]``."""
        return (self._generate_causal_pretrain if self.guided else self._generate_causal_fast)(noise, limit)

    def _generate_causal_fast(self, noise: Tensor, limit: int | None) -> Tensor:
        return self._denoise(noise, limit, [self._cache(noise)])

    def _generate_causal_pretrain(self, noise: Tensor, limit: int | None) -> Tensor:
        return self._denoise(noise, limit, [self._cache(noise), self._cache(noise)])

    def _cache(self, noise: Tensor) -> list[Entry]:
        tokens = self.local_attn_size * FRAME if self.local_attn_size > 0 else noise.shape[1]
        shape = [noise.shape[0], tokens, HEADS, CHANNELS]
        return self._initialize_self_kv_cache(self.layers, shape=shape, dtype=torch.bfloat16, device="cpu")

    def _denoise(self, noise: Tensor, limit: int | None, caches: list[list[Entry]]) -> Tensor:
        """All chunks; guidance leads away from what the second cache is for."""
        size, chunks = self.chunk * FRAME, []
        assert noise.shape[2] == WIDTH
        options = {"max_attention_size": limit or 1_000_000}
        for number, chunk in enumerate(noise.split(size, dim=1)):
            x = chunk
            for _ in range(2):
                first, *others = (
                    self._model(x + branch, cache, number * size, **options) for branch, cache in enumerate(caches)
                )
                x = 0.5 * x + 0.5 * sum((first - other for other in others), start=first)
            chunks.append(x)
            for branch, cache in enumerate(caches):
                self._model(x + branch, cache, number * size, **options)
        return torch.cat(chunks, dim=1)


class LingBotWorld2CausalFastGenerationStage(WanI2VCausal):
    """FastVideo's, which calls its model a transformer and cannot guide."""

    _generate_causal_pretrain = None  # type: ignore[assignment]  # the point of the class

    def __init__(self, window: int = -1, sink: int = 0, chunk: int = 4) -> None:
        super().__init__(window, sink, chunk)
        self.transformer = self.model
        del self.model

    def _model(self, x: Tensor, cache: list[Entry], start: int, **options: Any) -> Any:
        return self.transformer(x, cache, start, **options)
