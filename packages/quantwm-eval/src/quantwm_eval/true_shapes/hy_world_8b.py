"""The stack of HY-World's 8B model, on HunyuanVideo 1.5: two streams of tokens in each layer, of what is read and what is seen.

What is read, the prompt and the first picture, passes the layers once, and its keys and values stay as they are. What is
seen attends to them, to the history and to itself; keys and values after RoPE and after ProPE are stacked on the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantwm_eval.true_shapes.layers import Projections, Weights, angles, rotated
from quantwm_eval.true_shapes.rebuilding import Rebuilding, prope_qkv
from quantwm_eval.true_shapes.shape import Shape

MODULATIONS = 6
Pair = tuple[Tensor, Tensor]


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor, head_first: bool = False) -> Pair:
    """Queries and keys ``[B, N, H, D]``, neighbouring channels turned by angles ``[N, D / 2]``."""
    del head_first
    turned_q, turned_k = (rotated(each.transpose(1, 2), freqs_cis).transpose(1, 2) for each in (xq, xk))
    return turned_q, turned_k


def sequence_parallel_attention_vision(
    q: Pair, k: Pair, v: Pair, block_idx: int, kv_cache: Any, cache_vision: bool = False
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Attention of what is seen, on pairs ``[B, N, H, D]``; looked up at call time, so that it can be replaced.

    Returns:
        What each kind gives, ``[B, N, H D]``, and keys and values ``[2 B, H, N, D]`` if they are asked for.
    """
    query, key, value = (torch.cat(each).transpose(1, 2) for each in (q, k, v))
    entry = kv_cache[block_idx]
    made = {"k_vision": key, "v_vision": value} if cache_vision else {}
    if entry["k_vision"] is not None and not cache_vision:
        key, value = torch.cat([entry["k_vision"], key], dim=2), torch.cat([entry["v_vision"], value], dim=2)
    key, value = (
        torch.cat([entry[half].repeat(2, 1, 1, 1), each], dim=2) for half, each in (("k_txt", key), ("v_txt", value))
    )
    attended = F.scaled_dot_product_attention(query, key, value)
    first, second = attended.transpose(1, 2).flatten(2).chunk(2)
    return first, second, made


class Stream(nn.Module):
    """A layer's weights for one of the two streams; each token's modulations come of a matrix."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        self.project = Projections(shape, weights)
        self.modulation = weights.matrix(MODULATIONS * shape.width, shape.width)
        self.up, self.down = (
            weights.matrix(*sizes) for sizes in ((shape.feed_forward, shape.width), (shape.width, shape.feed_forward))
        )

    def modulations(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of either part, ``[B, N, width]`` each."""
        return F.linear(F.silu(condition), self.modulation).chunk(MODULATIONS, dim=-1)

    def split(self, x: Tensor, by: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, N, H, D]``."""
        return self.project.split(F.layer_norm(x, x.shape[-1:]) * (1 + by[1]) + by[0])

    def after(self, x: Tensor, attended: Tensor, by: tuple[Tensor, ...]) -> Tensor:
        """The layer's output, given what self-attention gave."""
        x = x + attended * by[2]
        y = F.layer_norm(x, x.shape[-1:]) * (1 + by[4]) + by[3]
        return x + F.linear(F.gelu(F.linear(y, self.up), approximate="tanh"), self.down) * by[5]


class Block(nn.Module):
    """A layer, called as the host calls it."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        self.heads = shape.heads
        self.seen, self.read = Stream(shape, weights), Stream(shape, weights)
        self.projected = weights.matrix(shape.width, shape.width)

    def reading(self, x: Tensor, condition: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What is read, and its keys and values ``[B, H, N, D]``."""
        by = self.read.modulations(condition)
        q, k, v = (each.transpose(1, 2) for each in self.read.split(x, by))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.read.after(x, self.read.project.join(attended.transpose(1, 2)), by), {"k_txt": k, "v_txt": v}

    def forward(
        self,
        *,
        img: Tensor,
        vec: Tensor,
        freqs_cis: Tensor,
        block_idx: int,
        viewmats: Tensor,
        kv_cache: Any,
        cache_vision: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What is seen, and keys and values if they are asked for."""
        by = self.seen.modulations(vec)
        q, k, v = self.seen.split(img, by)
        *projected, back = prope_qkv(*(each.transpose(1, 2) for each in (q, k, v)), viewmats=viewmats, Ks=None)
        raw = (*apply_rotary_emb(q, k, freqs_cis, head_first=False), v)
        queries, keys, values = ((one, other.transpose(1, 2)) for one, other in zip(raw, projected, strict=True))
        first, second, made = sequence_parallel_attention_vision(
            queries, keys, values, block_idx=block_idx, kv_cache=kv_cache, cache_vision=cache_vision
        )
        second = back(second.unflatten(-1, (self.heads, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)
        attended = F.linear(first, self.seen.project.outward) + F.linear(second, self.projected)
        return self.seen.after(img, attended, by), made


class HunyuanVideo_1_5_Pipeline(Rebuilding):  # noqa: N801  # the host's name
    """The model, distilled, so that there is no second cache for guidance."""

    made = ("k_vision", "v_vision")

    def __init__(self, shape: Shape, weights: Weights, *, layers: int, latents: int, frame_tokens: int) -> None:
        super().__init__(shape, weights, layers=layers, latents=latents, frame_tokens=frame_tokens)
        self.transformer.double_blocks = nn.ModuleList(Block(shape, weights) for _ in range(layers))
        self.conditions = weights.normal(1, self.cached + shape.chunk, shape.width)
        self.texts = self._texts()

    def init_kv_cache(self) -> None:
        """Begin a video: what is read is the same, in other tensor objects, by which caches are told apart."""
        vision = dict.fromkeys(self.made)
        self._kv_cache = [vision | {name: each.view_as(each) for name, each in text.items()} for text in self.texts]

    def _texts(self) -> list[dict[str, Tensor]]:
        """Keys and values of what is read, a layer each."""
        x, condition = (self.weights.normal(1, tokens, self.shape.width) for tokens in (self.shape.context, 1))
        found = []
        for block in self.transformer.double_blocks:
            x, made = block.reading(x, condition)
            found.append(made)
        return found

    def _run(self, x: Tensor, first: int, *, is_cache: bool) -> Any:
        frames = x.shape[1] // self.frame_tokens
        given: dict[str, Any] = {
            "vec": self.conditions[:, first : first + frames].repeat_interleave(self.frame_tokens, dim=1),
            "freqs_cis": angles(first, frames, self.frame_tokens, self.shape.channels, self.weights.device),
            "viewmats": self._views(first, frames),
            "kv_cache": self._kv_cache,
            "cache_vision": is_cache,
        }
        made = []
        for number, block in enumerate(self.transformer.double_blocks):
            x, vision = block(img=x, block_idx=number, **given)
            made.append(self._kv_cache[number] | vision)
        return made if is_cache else x
