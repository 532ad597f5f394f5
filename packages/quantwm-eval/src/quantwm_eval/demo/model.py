"""An action-conditioned, chunk-wise causal video diffusion transformer.

Of the family of the large ones: RMS-normed queries and keys, 3-D RoPE with absolute frame index, modulation of every
block by noise level and action, few Euler steps a chunk and one clean pass that leaves the chunk's keys and values in
the cache. It predicts the clean picture, not the velocity.

Two paths through the same weights. *Training* (``VideoTransformer.forward``) takes a whole sequence, clean frames
followed by noisy ones, under one block mask. *Generation* (``VideoTransformer.denoise``) takes one chunk and a cache of
the chunks before it; its attention is this module's global ``attention``, looked up at call time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from quantwm_eval.demo.config import ModelConfig
from quantwm_eval.demo.masking import masked_attention
from quantwm_eval.demo.room import ACTIONS
from quantwm_eval.demo.rope import rotate, rotation_table

LayerCache = dict[str, Tensor]

# Prefilled frames carry no action: nothing in the prompt says what led to them.
NO_ACTION = len(ACTIONS)
_LEVEL_CHANNELS = 128


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention of a chunk's queries over the cached tokens and itself.

    Args:
        q: ``[B, tokens, heads, head_dim]``.
        k, v: ``[B, cached tokens, heads, head_dim]``.

    Returns:
        ``[B, tokens, heads, head_dim]``.
    """
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32, returned in the input's type."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalized ``x``, any shape ending in ``width``."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight.float()).type_as(x)


class SelfAttention(nn.Module):
    """Self-attention with the two paths; keys are cached after norm and RoPE and never touched again.

    Attributes:
        sink_tokens: tokens at the front of the cache that eviction leaves alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.sink_tokens = 0
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm_q = RMSNorm(config.width)
        self.norm_k = RMSNorm(config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """Whole sequence ``[B, tokens, width]`` under a mask."""
        q, k, v = self._project(x, cos, sin)
        return self._merge(masked_attention(q, k, v, mask))

    def cached(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, current_start: int) -> Tensor:
        """One chunk ``[B, tokens, width]`` that starts at absolute token ``current_start``."""
        q, k, v = self._project(x, cos, sin)
        end = self._write(cache, k, v, current_start)
        return self._merge(attention(q, cache["k"][:, :end], cache["v"][:, :end]))

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _merge(self, attended: Tensor) -> Tensor:
        merged: Tensor = self.out(attended.flatten(2))
        return merged

    def _write(self, cache: LayerCache, k: Tensor, v: Tensor, current_start: int) -> int:
        """Puts the chunk in its slots, making room first where it is new and does not fit; returns where it ends."""
        tokens, size = k.shape[1], cache["k"].shape[1]
        global_end, local_end = int(cache["global_end_index"].item()), int(cache["local_end_index"].item())
        current_end = current_start + tokens
        is_new = current_end > global_end
        evicted = max(0, local_end + tokens - size) if is_new else 0
        if evicted:
            sink = self.sink_tokens
            for kind in ("k", "v"):
                cache[kind][:, sink : local_end - evicted] = cache[kind][:, sink + evicted : local_end].clone()
        end = local_end + current_end - global_end - evicted
        cache["k"][:, end - tokens : end] = k
        cache["v"][:, end - tokens : end] = v
        cache["global_end_index"].fill_(current_end)
        cache["local_end_index"].fill_(end)
        return end


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by noise level and action."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.attention = SelfAttention(config)
        self.up = nn.Linear(width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, width, bias=False)
        gate_offsets = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
        self.offsets = nn.Parameter(gate_offsets.unsqueeze(1).repeat(1, width))
        nn.init.zeros_(self.attention.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """Whole sequence ``[B, frames, frame_tokens, width]``; ``shared`` is ``[B, frames, 6, width]``."""
        parts = self._modulation(shared)
        attended = self.attention(_modulate(x, parts[0], parts[1]).flatten(1, 2), cos, sin, mask)
        return self._finish(x, attended, parts)

    def cached(
        self, x: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, current_start: int
    ) -> Tensor:
        """One chunk ``[B, chunk_frames, frame_tokens, width]`` against the cache."""
        parts = self._modulation(shared)
        entered = _modulate(x, parts[0], parts[1]).flatten(1, 2)
        return self._finish(x, self.attention.cached(entered, cos, sin, cache, current_start), parts)

    def _modulation(self, shared: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of attention, then of the MLP, each ``[B, frames, 1, width]``."""
        return (shared + self.offsets.type_as(shared)).unsqueeze(2).unbind(3)

    def _finish(self, x: Tensor, attended: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        x = x + parts[2] * attended.view_as(x)
        hidden = F.gelu(self.up(_modulate(x, parts[3], parts[4])), approximate="tanh")
        left: Tensor = x + parts[5] * self.down(hidden)
        return left


class VideoTransformer(nn.Module):
    """The model. Frames are normalized pixels ``[B, frames, 64, 64, 3]``; see ``normalize``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, pixels = config.width, config.patch**2 * 3
        self.embed = nn.Linear(pixels, width)
        self.level = nn.Sequential(nn.Linear(2 * _LEVEL_CHANNELS, width), nn.SiLU(), nn.Linear(width, width))
        self.action = nn.Embedding(len(ACTIONS) + 1, width)
        modulation, last, head = nn.Linear(width, 6 * width), nn.Linear(width, 2 * width), nn.Linear(width, pixels)
        for layer in (modulation, last, head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.modulation = nn.Sequential(nn.SiLU(), modulation)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.last = nn.Sequential(nn.SiLU(), last)
        self.head = head
        cos, sin = rotation_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self, clean: Tensor, noisy: Tensor, levels: Tensor, actions: Tensor, mask: BlockMask | Tensor
    ) -> Tensor:
        """The training path: every chunk but the first is denoised given the clean chunks before it.

        Args:
            clean: ``[B, F, 64, 64, 3]``, F a multiple of ``chunk_frames``.
            noisy: ``[B, F - chunk_frames, 64, 64, 3]``, the chunks from the second on.
            levels: ``[B, F / chunk_frames - 1]``, noise level of each noisy chunk, 0 clean to 1 noise.
            actions: int64 ``[B, F]``; those of the first chunk are taken for ``NO_ACTION``.
            mask: see ``sequence_mask``.

        Returns:
            Predicted clean frames, shape of ``noisy``.
        """
        chunk, frames = self.config.chunk_frames, clean.shape[1]
        actions = torch.cat([torch.full_like(actions[:, :chunk], NO_ACTION), actions[:, chunk:]], dim=1)
        frame_levels = levels.repeat_interleave(chunk, dim=1)
        levels = torch.cat([torch.zeros_like(frame_levels[:, :1]).expand(-1, frames), frame_levels], dim=1)
        condition = self._condition(levels, torch.cat([actions, actions[:, chunk:]], dim=1))
        index = torch.arange(frames, device=clean.device)
        index = torch.cat([index, index[chunk:]])
        cos, sin = self.cos[index].flatten(0, 1), self.sin[index].flatten(0, 1)
        x = self.embed(self._patches(torch.cat([clean, noisy], dim=1)))
        shared = self.modulation(condition).unflatten(-1, (6, -1))
        for block in self.blocks:
            x = block(x, shared, cos, sin, mask)
        return self._pixels(x[:, frames:], condition[:, frames:])

    def denoise(
        self, frames: Tensor, level: float, actions: Tensor, kv_cache: Sequence[LayerCache], current_start: int
    ) -> Tensor:
        """The generation path: one chunk against the cache, which takes the chunk's keys and values on the way.

        Args:
            frames: ``[B, chunk_frames, 64, 64, 3]``, noisy at ``level``.
            level: noise level, 0 in the clean pass that leaves the final keys and values.
            actions: int64 ``[B, chunk_frames]``.
            kv_cache: one dict per block, see ``WorldPipeline._initialize_kv_cache``.
            current_start: absolute index of the chunk's first token.

        Returns:
            Predicted clean frames, shape of ``frames``.
        """
        first = current_start // self.config.frame_tokens
        here = slice(first, first + frames.shape[1])
        cos, sin = self.cos[here].flatten(0, 1), self.sin[here].flatten(0, 1)
        levels = torch.full(actions.shape, level, device=frames.device)
        condition = self._condition(levels, actions)
        x = self.embed(self._patches(frames).to(self.embed.weight.dtype))
        shared = self.modulation(condition).unflatten(-1, (6, -1))
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            x = block.cached(x, shared, cos, sin, cache, current_start)  # type: ignore[operator]  # ModuleList yields Module
        return self._pixels(x, condition).to(frames.dtype)

    def _condition(self, levels: Tensor, actions: Tensor) -> Tensor:
        """``[B, frames, width]`` from levels and actions ``[B, frames]``."""
        rates = torch.exp(-math.log(10000.0) * torch.arange(_LEVEL_CHANNELS, device=levels.device) / _LEVEL_CHANNELS)
        angles = 1000.0 * levels.float().unsqueeze(-1) * rates
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.embed.weight.dtype)
        condition: Tensor = self.level(waves) + self.action(actions)
        return condition

    def _patches(self, frames: Tensor) -> Tensor:
        """``[B, frames, frame_tokens, patch * patch * 3]``, patches in row-major order."""
        patch, grid = self.config.patch, self.config.grid
        split: Tensor = frames.unflatten(3, (grid, patch)).unflatten(2, (grid, patch))
        return split.permute(0, 1, 2, 4, 3, 5, 6).flatten(4).flatten(2, 3)

    def _pixels(self, x: Tensor, condition: Tensor) -> Tensor:
        """Frames from tokens, the inverse of ``_patches`` after the modulated head."""
        patch, grid = self.config.patch, self.config.grid
        shift, scale = self.last(condition).unsqueeze(2).chunk(2, dim=-1)
        split: Tensor = self.head(_modulate(x, shift, scale)).unflatten(3, (patch, patch, 3)).unflatten(2, (grid, grid))
        return split.permute(0, 1, 2, 4, 3, 5, 6).flatten(4, 5).flatten(2, 3)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without weights, then scale and shift."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
