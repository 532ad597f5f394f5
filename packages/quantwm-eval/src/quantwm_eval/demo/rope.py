"""Rotary position embedding over frame, row and column."""

from __future__ import annotations

import torch
from torch import Tensor

from quantwm_eval.demo.config import ModelConfig


def rotation_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of 3-D RoPE, float32 ``[max_frames, frame_tokens, head_dim / 2]`` each, computed in float64.

    Of the head's channel pairs a third (rounded down) follow the row, as many the column, the rest the frame.
    """
    pairs = config.head_dim // 2
    spatial = pairs // 3
    temporal = pairs - 2 * spatial

    def angles(positions: int, count: int) -> Tensor:
        rates = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
        return torch.arange(positions, dtype=torch.float64).unsqueeze(1) * rates

    grid, frames = config.grid, config.max_frames
    shape = (frames, grid, grid)
    parts = (
        angles(frames, temporal).view(frames, 1, 1, temporal).expand(*shape, temporal),
        angles(grid, spatial).view(1, grid, 1, spatial).expand(*shape, spatial),
        angles(grid, spatial).view(1, 1, grid, spatial).expand(*shape, spatial),
    )
    table = torch.cat(parts, dim=-1).flatten(1, 2)
    return table.cos().float(), table.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on adjacent channel pairs.

    Args:
        x: ``[B, tokens, heads, head_dim]``.
        cos, sin: float32 ``[tokens, head_dim / 2]``.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).type_as(x)
