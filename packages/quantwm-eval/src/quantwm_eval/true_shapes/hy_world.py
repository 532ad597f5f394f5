"""The stack of HY-World's 5B model, whose layers return keys and values after RoPE and after ProPE side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantwm_eval.true_shapes.layers import Beside, Projections, Weights, angles
from quantwm_eval.true_shapes.rebuilding import Rebuilding, prope_qkv
from quantwm_eval.true_shapes.shape import Shape

Rotation = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


def sageattn(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False) -> Tensor:
    """Attention on ``[B, H, N, D]``, by PyTorch; looked up at call time, so that the queries can be seen."""
    del tensor_layout, is_causal
    return F.scaled_dot_product_attention(q, k, v)


class Processor:
    """Self-attention of a layer."""

    def __call__(
        self, project: Projections, x: Tensor, kv_cache: Any, is_cache: bool, rotation: Rotation, views: Tensor
    ) -> tuple[Tensor, Any]:
        """What attention gives, ``[B, N, H, D]``, and keys and values if they are asked for."""
        q, k, v = (each.transpose(1, 2) for each in project.split(x))
        *projected, back = prope_qkv(q, k, v, viewmats=views, Ks=None)
        raw = (_turned(q, rotation), _turned(k, rotation), v)
        queries, keys, values = zip(raw, projected, strict=True)
        past, made = (kv_cache["k"], kv_cache["v"]), {}
        if past[0] is not None and not is_cache:
            keys, values = (_after(old, new) for old, new in zip(past, (keys, values), strict=True))
        if is_cache:
            made = {"k": torch.cat(keys, dim=-1), "v": torch.cat(values, dim=-1)}
        attended = sageattn(torch.cat(queries), torch.cat(keys), torch.cat(values), tensor_layout="HND")
        first, second = attended.chunk(2)
        return (first + back(second)).transpose(1, 2), made


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    """Neighbouring channels of ``[B, H, N, D]`` turned."""
    cosines, sines = rotation[0][..., ::2], rotation[1][..., 1::2]
    result, (even, odd) = torch.empty_like(x), x.unflatten(-1, (-1, 2)).unbind(-1)
    result[..., ::2] = even * cosines - odd * sines
    result[..., 1::2] = even * sines + odd * cosines
    return result


def _after(past: Tensor, new: Pair) -> Pair:
    """The two kinds of a history, ``[B, H, N, 2 D]``, and behind each that of the chunk."""
    roped, projected = (torch.cat([old, now], dim=-2) for old, now in zip(past.chunk(2, dim=-1), new, strict=True))
    return roped, projected


class Block(nn.Module):
    """A layer, called as the host calls it."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        self.attn1 = SimpleNamespace(processor=Processor())
        self.project, self.beside = Projections(shape, weights), Beside(shape, weights)

    def forward(
        self,
        x: Tensor,
        prompt: Tensor,
        temb: None,
        rotary_emb: Rotation,
        kv_cache: Any,
        is_cache: bool,
        views: Tensor,
    ) -> tuple[Tensor, Any]:
        """The output, and keys and values if they are asked for."""
        del temb
        attended, made = self.attn1.processor(
            self.project, self.beside.before(x), kv_cache, is_cache, rotary_emb, views
        )
        return self.beside.after(x, self.project.join(attended), prompt), made


class WanPipeline(Rebuilding):
    """The model."""

    made = ("k", "v")

    def __init__(self, shape: Shape, weights: Weights, *, layers: int, latents: int, frame_tokens: int) -> None:
        super().__init__(shape, weights, layers=layers, latents=latents, frame_tokens=frame_tokens)
        self.transformer.blocks = nn.ModuleList(Block(shape, weights) for _ in range(layers))
        self.prompt = weights.normal(1, shape.context, shape.width)

    def init_kv_cache(self) -> None:
        """Begin a video."""
        self._kv_cache = [{"k": None, "v": None} for _ in self.transformer.blocks]

    def _run(self, x: Tensor, first: int, *, is_cache: bool) -> Any:
        frames = x.shape[1] // self.frame_tokens
        rotation, views = self._rotation(first, frames), self._views(first, frames)
        made = []
        for block, cache in zip(self.transformer.blocks, self._kv_cache, strict=True):
            x, entry = block(x, self.prompt, None, rotation, cache, is_cache, views)
            made.append(entry)
        return made if is_cache else x

    def _rotation(self, first: int, frames: int) -> Rotation:
        by = angles(first, frames, self.frame_tokens, self.shape.channels, self.weights.device)
        twice = by.repeat_interleave(2, dim=-1)[None, None]
        return twice.cos(), twice.sin()
