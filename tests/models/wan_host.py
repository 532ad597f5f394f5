"""Self-attention of the Self-Forcing lineage in small: modules, frames and positions, for hosts of several kinds.

The pipelines stand in files of their own. Sizes are in frames of ``FRAME`` tokens; keys are rotated by the number of
their frame before they are cached.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

FRAME, HEADS, CHANNELS = 8, 2, 16
WIDTH = HEADS * CHANNELS
Entry = dict[str, Any]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention on ``[B, tokens, heads, head_dim]``."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def turned(x: Tensor, frame: int) -> Tensor:
    """Rotate pairs of channels by the number of each token's frame; ``x`` begins with frame ``frame``."""
    frames, pairs = (torch.arange(size, device=x.device) for size in (x.shape[1], CHANNELS // 2))
    angles = (frame + frames // FRAME)[:, None, None] * 0.7**pairs
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).type_as(x)


def entry(batch: int, tokens: int, device: Any, dtype: torch.dtype = torch.bfloat16) -> Entry:
    """One layer's dict."""
    return {
        "k": torch.zeros(batch, tokens, HEADS, CHANNELS, dtype=dtype, device=device),
        "v": torch.zeros(batch, tokens, HEADS, CHANNELS, dtype=dtype, device=device),
        "global_end_index": torch.tensor([0], device=device),
        "local_end_index": torch.tensor([0], device=device),
    }


def put(cache: Entry, k: Tensor, v: Tensor, stop: Any, sink: int, *, rolls: bool = True) -> Any:
    """Write a chunk that ends at absolute token ``stop``; a full window rolls, if it does. Returns the slot after it."""
    new, known, local = k.shape[1], int(cache["global_end_index"]), int(cache["local_end_index"])
    evicted = max(0, new + local - cache["k"].shape[1]) if rolls and stop > known else 0
    if evicted:
        kept = local - evicted - sink
        for half in ("k", "v"):
            cache[half][:, sink : sink + kept] = cache[half][:, sink + evicted : sink + evicted + kept].clone()
    end = local + stop - known - evicted
    cache["k"][:, end - new : end] = k
    cache["v"][:, end - new : end] = v
    cache["global_end_index"].fill_(stop)
    cache["local_end_index"].fill_(end)
    return end


class SelfAttention(nn.Module):
    """Attends to its cache, or to itself where none is given."""

    def __init__(self, seed: int, window: int = -1, sink: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(3, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.weights = nn.Parameter(weights.to(torch.bfloat16), requires_grad=False)
        self.local_attn_size, self.sink_size = window, sink
        self.max_attention_size = (window if window > 0 else 8) * FRAME

    def project(self, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated queries and keys, values, and the keys as they were before."""
        q, k, v = ((x @ weight).unflatten(-1, (HEADS, CHANNELS)) for weight in self.weights)
        return turned(q, start // FRAME), turned(k, start // FRAME), v, k

    def forward(self, x: Tensor, kv_cache: Entry | None = None, current_start: int = 0) -> Tensor:
        """One call on a chunk ``[B, n, width]``."""
        q, k, v, _ = self.project(x, current_start)
        if kv_cache is None:
            return x + attention(q, k, v).flatten(2)
        end = put(kv_cache, k, v, current_start + x.shape[1], self.sink_size * FRAME, rolls=self.local_attn_size > 0)
        begin = max(0, end - self.max_attention_size)
        return x + attention(q, kv_cache["k"][:, begin:end], kv_cache["v"][:, begin:end]).flatten(2)


class Block(nn.Module):
    """A layer with its self-attention."""

    def __init__(self, self_attn: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn

    def forward(self, x: Tensor, **options: Any) -> Any:
        """One call."""
        return self.self_attn(x, **options)


class Model(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, layers: Sequence[nn.Module], window: int = -1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(layer) for layer in layers)
        self.local_attn_size = window
        self.freqs = torch.zeros(64, 1)  # one row a temporal position

    def forward(self, x: Tensor, kv_cache: list[Entry], current_start: int, **options: Any) -> Tensor:
        """One call on a chunk ``[B, n, width]``."""
        for block, cache in zip(self.blocks, kv_cache, strict=False):
            x = block(x, kv_cache=cache, current_start=current_start, **options)
        return x


def noise(seed: int, frames: int, batch: int = 1) -> Tensor:
    """What a video begins with, ``[B, tokens, width]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, frames * FRAME, WIDTH, generator=generator).to(torch.bfloat16)
