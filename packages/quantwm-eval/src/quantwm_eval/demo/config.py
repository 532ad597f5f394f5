"""Sizes of the model, and what its numbers mean: normalized pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantwm_eval.demo.rendering import IMAGE_SIZE


@dataclass(frozen=True)
class ModelConfig:
    """Sizes; the defaults are those of the bundled weights.

    Attributes:
        width: channels of a token.
        heads: attention heads; ``width // heads`` channels each, an even number.
        blocks: transformer blocks, and so layers of the KV cache.
        mlp_width: hidden channels of a block's MLP.
        patch: side of a square patch, pixels.
        chunk_frames: frames made at once.
        past_chunks: chunks before the current one that training let a chunk see.
        max_frames: length of the RoPE table, frames.
        mean, deviation: of pixel values in [0, 1], for normalization.
        last_level: noise level of the last Euler step; the others lie evenly between it and 1.
    """

    width: int = 384
    heads: int = 3
    blocks: int = 8
    mlp_width: int = 1024
    patch: int = 8
    chunk_frames: int = 4
    past_chunks: int = 7
    max_frames: int = 1024
    mean: float = 0.47
    deviation: float = 0.20
    last_level: float = 0.5

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    @property
    def grid(self) -> int:
        """Patches along one side of a frame."""
        return IMAGE_SIZE // self.patch

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame."""
        return self.grid**2

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.chunk_frames * self.frame_tokens


def normalize(frames: Tensor, config: ModelConfig) -> Tensor:
    """float32 pixels of about zero mean and unit deviation from uint8 frames."""
    return (frames.float() / 255.0 - config.mean) / config.deviation


def denormalize(frames: Tensor, config: ModelConfig) -> Tensor:
    """uint8 frames from normalized pixels, rounded and clipped."""
    return ((frames.float() * config.deviation + config.mean) * 255.0).round().clamp(0, 255).to(torch.uint8)
