"""A host of the rolling-dict lineage in small: no weights worth the name, but the cache protocol to the letter.

Several writes per chunk into the same slots, one of them a clean pass; a window that rolls by cloning; a sink; keys and
values read apart; indices in tensors. Two ways of keeping the dicts: made anew for every video, or kept on the pipeline
with only the indices replaced. Attention is this module's global, looked up at call time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Entry = dict[str, Any]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Dense attention on ``[B, tokens, heads, head_dim]``."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


@dataclass
class Settings:
    """What hosts of this lineage differ in; sizes in tokens."""

    batch: int = 1
    layers: int = 2
    heads: int = 2
    query_heads: int = 2
    head_dim: int = 16
    chunk: int = 24
    window: int = 96
    sink: int = 0
    steps: int = 2
    reuse: bool = False
    tensor_bounds: bool = False
    read_limit: int | None = None
    values_first: bool = False
    dtype: torch.dtype = torch.bfloat16


class Layer:
    """Self-attention with a cache."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings = settings
        generator = torch.Generator().manual_seed(seed)
        width = settings.query_heads * settings.head_dim
        outputs = (settings.query_heads, settings.heads, settings.heads)
        self.weights = [
            (torch.randn(width, heads * settings.head_dim, generator=generator) / width**0.5).to(settings.dtype)
            for heads in outputs
        ]

    def forward(self, x: Tensor, cache: Entry, start: int) -> Tensor:
        """One call on a chunk ``[B, n, width]`` that starts at absolute token ``start``."""
        s = self.settings
        q, k, v = ((x @ weight).unflatten(-1, (-1, s.head_dim)) for weight in self.weights)
        end = self.write(cache, k, v, start)
        begin = 0 if s.read_limit is None else max(0, end - s.read_limit)
        bounds: Any = (torch.tensor(begin), torch.tensor(end)) if s.tensor_bounds else (begin, end)
        out = attention(q, cache["k"][:, bounds[0] : bounds[1]], cache["v"][:, bounds[0] : bounds[1]])
        return x + out.flatten(2)

    def write(self, cache: Entry, k: Tensor, v: Tensor, start: int) -> int:
        """Put a chunk in its slots and return where it ends."""
        s = self.settings
        new, size = k.shape[1], cache["k"].shape[1]
        global_end, local_end = int(cache["global_end_index"].item()), int(cache["local_end_index"].item())
        stop = start + new
        evicted = max(0, new + local_end - size) if stop > global_end else 0
        halves = ("v", "k") if s.values_first else ("k", "v")
        if evicted:
            kept = local_end - evicted - s.sink
            for name in halves:
                old = cache[name][:, s.sink + evicted : s.sink + evicted + kept].clone()
                cache[name][:, s.sink : s.sink + kept] = old
        local = local_end + stop - global_end - evicted
        for name in halves:
            cache[name][:, local - new : local] = k if name == "k" else v
        cache["global_end_index"].fill_(stop)
        cache["local_end_index"].fill_(local)
        return local


class Pipeline:
    """Generates videos of ``[B, tokens, width]``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layers = [Layer(settings, seed) for seed in range(settings.layers)]
        self.kv_cache1: list[Entry] | None = None
        self.after_chunk: Callable[[int], None] = lambda _: None

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> list[Entry] | None:
        s = self.settings
        shape = (batch_size, s.window, s.heads, s.head_dim)
        made = [
            {
                "k": torch.zeros(shape, dtype=dtype, device=device),
                "v": torch.zeros(shape, dtype=dtype, device=device),
                "global_end_index": torch.tensor([0], dtype=torch.long, device=device),
                "local_end_index": torch.tensor([0], dtype=torch.long, device=device),
            }
            for _ in self.layers
        ]
        if s.reuse:
            self.kv_cache1 = made
            return None
        return made

    def inference(self, seed: int, chunks: Sequence[int] | int) -> Tensor:
        """One video: every chunk's clean output side by side."""
        s = self.settings
        lengths = [s.chunk] * chunks if isinstance(chunks, int) else list(chunks)
        generator = torch.Generator().manual_seed(seed)
        caches = self._caches()
        outputs, start = [], 0
        for number, length in enumerate(lengths):
            shape = (s.batch, length, s.query_heads * s.head_dim)
            x = torch.randn(shape, generator=generator).to(s.dtype)
            for _ in range(s.steps):
                x = (0.5 * x + 0.5 * self._model(x, caches, start)).to(s.dtype)
            outputs.append(self._model(x, caches, start))
            self.after_chunk(number)
            start += length
        return torch.cat(outputs, dim=1)

    def _caches(self) -> list[Entry]:
        s = self.settings
        if not s.reuse:
            made = self._initialize_kv_cache(s.batch, s.dtype, torch.device("cpu"))
            assert made is not None
            return made
        if self.kv_cache1 is None:
            self._initialize_kv_cache(s.batch, s.dtype, torch.device("cpu"))
        else:
            for entry in self.kv_cache1:
                entry["global_end_index"] = torch.tensor([0], dtype=torch.long)
                entry["local_end_index"] = torch.tensor([0], dtype=torch.long)
        assert self.kv_cache1 is not None
        return self.kv_cache1

    def _model(self, x: Tensor, caches: list[Entry], start: int) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.forward(x, cache, start)
        return x
