"""LongCat-Video's stack: a segment's history is passed through once, and read, and rotated anew, at every denoising step.

Two prompts share the history. The host can keep it in its memory and bring each layer's to the device at each step, which
waits for the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantwm_eval.true_shapes.layers import Beside, Projections, Weights, angles, rotated
from quantwm_eval.true_shapes.shape import Shape
from quantwm_eval.true_shapes.stack import Pass, Stack

Grid = tuple[int, int, int]
Pair = tuple[Any, Any]


class Rotation(nn.Module):
    """Rotates queries and keys of a grid of frames, rows and columns.

    Args:
        channels: Of a head.
        known: Angles of the grids so far, which all layers share.
    """

    def __init__(self, channels: int, known: dict[Grid, Tensor]) -> None:
        super().__init__()
        self.channels = channels
        self.freqs_dict = known

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Both are ``[B, H, N, D]``."""
        if grid not in self.freqs_dict:
            by = angles(0, grid[0], grid[1] * grid[2], self.channels, q.device)
            self.freqs_dict[grid] = by.repeat_interleave(2, dim=-1)
        by = self.freqs_dict[grid][:, ::2]
        return rotated(q, by), rotated(k, by)


class Attention(nn.Module):
    """Self-attention that can show its keys and values, or be given those of a history."""

    def __init__(self, shape: Shape, weights: Weights, rotation: Rotation) -> None:
        super().__init__()
        self.project = Projections(shape, weights)
        self.rope_3d = rotation

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Pair]:
        """A history alone, and its keys and values before rotation."""
        q, k, v = (each.transpose(1, 2).contiguous() for each in self.project.split(x))
        turned_q, turned_k = self.rope_3d(q, k, grid)
        attended = F.scaled_dot_product_attention(turned_q, turned_k, v)
        return self.project.join(attended.transpose(1, 2)), (k, v)

    def after(self, x: Tensor, grid: Grid, frames: int, cache: Pair) -> Tensor:
        """New frames behind a history, for each prompt the same."""
        q, k, v = (each.transpose(1, 2) for each in self.project.split(x))
        past = [each.repeat(len(x), 1, 1, 1) for each in cache]
        keys, values = (torch.cat([old, new], dim=2) for old, new in zip(past, (k, v), strict=True))
        queries = torch.cat([torch.empty_like(past[0]), q], dim=2)
        queries, keys = self.rope_3d(queries, keys, (grid[0] + frames, *grid[1:]))
        attended = F.scaled_dot_product_attention(queries[:, :, -q.shape[2] :], keys, values)
        return self.project.join(attended.transpose(1, 2))


class Block(nn.Module):
    """A layer, called as the host calls it."""

    def __init__(self, shape: Shape, weights: Weights, rotation: Rotation) -> None:
        super().__init__()
        self.attn = Attention(shape, weights, rotation)
        self.beside = Beside(shape, weights)

    def forward(
        self,
        x: Tensor,
        prompt: Tensor | None,
        latent_shape: Grid,
        frames: int = 0,
        return_kv: bool = False,
        kv_cache: Any = None,
    ) -> Any:
        """The output, with keys and values if they are asked for."""
        given = self.beside.before(x)
        if kv_cache is not None:
            cache = (kv_cache[0].to(x.device), kv_cache[1].to(x.device))
            return self.beside.after(x, self.attn.after(given, latent_shape, frames, cache), prompt)
        attended, made = self.attn(given, latent_shape)
        x = self.beside.after(x, attended, prompt)
        return (x, made) if return_kv else x


class Transformer(nn.Module):
    """All layers."""

    def __init__(self, shape: Shape, weights: Weights, layers: int) -> None:
        super().__init__()
        known: dict[Grid, Tensor] = {}
        rotations = (Rotation(shape.channels, known) for _ in range(layers))
        self.blocks = nn.ModuleList(Block(shape, weights, each) for each in rotations)

    def forward(self, x: Tensor, prompt: Tensor, grid: Grid, frames: int, cache: dict[int, Pair]) -> Tensor:
        """New frames behind a history."""
        for number, block in enumerate(self.blocks):
            x = block(x, prompt, latent_shape=grid, frames=frames, kv_cache=cache.get(number))
        return x

    def histories(self, x: Tensor, grid: Grid, *, offload: bool) -> dict[int, Pair]:
        """Keys and values of a history in all layers, here or in the host's memory; nobody needs the output."""
        made: dict[int, Pair] = {}
        for number, block in enumerate(self.blocks):
            x, (keys, values) = block(x, None, latent_shape=grid, return_kv=True)
            made[number] = tuple(each.cpu() if offload else each.contiguous() for each in (keys, values))
        return made


class LongCatVideoPipeline(Stack):
    """The loop over segments.

    Args:
        shape, weights, layers, latents, frame_tokens: As :class:`Stack` takes them.
        offload: Keep the history in the host's memory.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        *,
        layers: int,
        latents: int,
        frame_tokens: int,
        offload: bool = False,
    ) -> None:
        super().__init__(shape, weights, layers=layers, latents=latents, frame_tokens=frame_tokens)
        self.dit = Transformer(shape, weights, layers)
        self.offload = offload
        self.prompts = weights.normal(shape.prompts, shape.context, shape.width)
        self.kv_cache_dict: dict[int, Pair] = {}
        self.newest: Tensor | None = None

    def chunk(self, number: int, steps: int) -> Iterator[Pass]:
        """A segment: its history's pass, and those of its new frames."""
        past, new = self.cached, self.shape.chunk
        history = self._drawn(1, past)
        if number and self.newest is not None:
            history = torch.cat([history[:, self.newest.shape[1] :], self.newest[:, -history.shape[1] :]], dim=1)
        self.kv_cache_dict = self.dit.histories(history, (past, 1, self.frame_tokens), offload=self.offload)
        yield "build", history
        x = self._drawn(1, new)
        for _ in range(steps):
            made = self.dit(
                x.repeat(self.shape.prompts, 1, 1),
                self.prompts,
                (new, 1, self.frame_tokens),
                past,
                self.kv_cache_dict,
            )
            x = 0.5 * x + 0.5 * (made[:1] + (made[:1] - made[-1:]))
            yield "step", x
        self.newest = x

    def own_nbytes(self) -> int:
        """Bytes of the cache tensors that this host holds itself."""
        held = (each for pair in self.kv_cache_dict.values() for each in pair)
        return sum(each.nbytes for each in held if isinstance(each, Tensor))

    def forget(self) -> None:
        """Let go of the cache."""
        super().forget()
        self.kv_cache_dict, self.newest = {}, None

    def _model(self) -> Any:
        return self.dit
