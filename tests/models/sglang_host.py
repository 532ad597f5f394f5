"""SGLang's stage in small: a cache object for each layer, which takes new keys and values and gives those to attend to."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.models.wan_host import CHANNELS, FRAME, HEADS, SelfAttention, attention, noise, put


class View(NamedTuple):
    """What to attend to."""

    k: Tensor
    v: Tensor


@dataclass(slots=True)
class Cache:
    """One layer's; with ``recent``, attention sees the sink and so many tokens."""

    k: Tensor
    v: Tensor
    global_end_index: Tensor
    local_end_index: Tensor
    sink_tokens: int
    recent: int | None

    def update_and_get_attention_kv(self, *, key: Tensor, value: Tensor, current_chunk_start: int) -> View:
        """Write a chunk, and give what it attends to."""
        names = ("k", "v", "global_end_index", "local_end_index")
        held = {name: getattr(self, name) for name in names}
        end = put(held, key, value, current_chunk_start + key.shape[1], self.sink_tokens)
        begin = 0 if self.recent is None else end - self.recent
        if begin <= self.sink_tokens:
            return View(self.k[:, :end], self.v[:, :end])
        return View(*(torch.cat([each[:, : self.sink_tokens], each[:, begin:end]], dim=1) for each in (self.k, self.v)))


class Local(nn.Module):
    """Attention as a module."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """On ``[B, tokens, heads, head_dim]``."""
        return attention(q, k, v)


class CachedSelfAttention(SelfAttention):
    """Attends to what its cache gives."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.attn = Local()

    def forward(self, x: Tensor, kv_cache: Any = None, current_start: int = 0) -> Tensor:
        """One call on a chunk ``[B, n, width]``."""
        q, k, v, _ = self.project(x, current_start)
        view = kv_cache.update_and_get_attention_kv(key=k, value=v, current_chunk_start=current_start)
        attended: Tensor = self.attn(q, view.k, view.v)
        return x + attended.flatten(2)


class Block(nn.Module):
    """Holds the layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.attn1 = CachedSelfAttention(seed)


class CausalDMDDenoisingStage:
    """Denoises chunks of three frames; its caches are made once and reset."""

    def __init__(self, window: int = 9, sink: int = 0, recent: int | None = None, *, guided: bool = False) -> None:
        self.transformer: Any = nn.Module()
        self.transformer.blocks = nn.ModuleList(Block(seed) for seed in range(2))
        self.window, self.sink, self.recent, self.guided = window, sink, recent, guided
        self.causal_kv_cache: list[Cache] | None = None
        self.causal_kv_cache_neg: list[Cache] | None = None

    def _get_causal_sink_tokens(self) -> int:
        return self.sink * FRAME

    def _allocate_causal_kv_cache(self, *, kv_cache_size: int, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        shape, recent = (1, kv_cache_size, HEADS, CHANNELS), None if self.recent is None else self.recent * FRAME

        def made() -> Cache:
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            known, local = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
            return Cache(keys, values, known, local, self._get_causal_sink_tokens(), recent)

        return [made() for _ in self.transformer.blocks]

    def _initialize_kv_cache(self) -> None:
        self.causal_kv_cache = self._allocate_causal_kv_cache(
            kv_cache_size=self.window * FRAME, dtype=torch.bfloat16, device=torch.device("cpu")
        )

    def _new_causal_cache_pair(self) -> list[Cache]:
        before = self.causal_kv_cache
        try:
            self._initialize_kv_cache()
            assert self.causal_kv_cache is not None
            return self.causal_kv_cache
        finally:
            self.causal_kv_cache = before

    def video(self, seed: int, frames: int) -> Tensor:
        """Every chunk's clean output side by side."""
        if self.causal_kv_cache is None:
            self._initialize_kv_cache()
        if self.guided and self.causal_kv_cache_neg is None:
            self.causal_kv_cache_neg = self._new_causal_cache_pair()
        branches = [each for each in (self.causal_kv_cache, self.causal_kv_cache_neg) if each is not None]
        for cache in (cache for branch in branches for cache in branch):
            cache.global_end_index.zero_()
            cache.local_end_index.zero_()
        made = []
        for number, chunk in enumerate(noise(seed, frames).split(3 * FRAME, dim=1)):
            x = chunk
            for _ in range(3):
                first, *others = (
                    self._model(x + place, branch, 3 * FRAME * number) for place, branch in enumerate(branches)
                )
                x = 0.5 * x + 0.5 * sum((first - other for other in others), start=first)
            made.append(x)
        return torch.cat(made, dim=1)

    def _model(self, x: Tensor, caches: list[Cache], start: int) -> Tensor:
        for block, cache in zip(self.transformer.blocks, caches, strict=True):
            x = block.attn1(x, kv_cache=cache, current_start=start)
        return x
