"""What every stack can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor

from quantwm_eval.true_shapes.layers import Weights
from quantwm_eval.true_shapes.shape import Shape

SEED = 1  # of noise: every video of a stack is of the same numbers
Pass: TypeAlias = tuple[str, Tensor]
"""A pass through all layers that was just launched: ``"build"``, ``"step"`` or ``"clean"``, and what it gave."""


class Stack:
    """A model's attention stack with its host's protocol; what a compressed cache is attached to.

    Args:
        shape: Sizes and schedule.
        weights: Where matrices come from.
        layers: Depth, the model's own or less.
        latents: Latent frames of a video.
        frame_tokens: Tokens of each.
    """

    def __init__(self, shape: Shape, weights: Weights, *, layers: int, latents: int, frame_tokens: int) -> None:
        self.shape = shape
        self.weights = weights
        self.layers = layers
        self.latents = latents
        self.frame_tokens = frame_tokens
        self.cached = shape.cached(latents)
        self.noise = Weights(weights.device, SEED)

    @property
    def chunks(self) -> int:
        """Chunks of a video; of LongCat-Video, segments: the first, and one whose history knows the queries of the first."""
        return 2 if self.shape.host == "segments" else self.latents // self.shape.chunk

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(each.nbytes for each in self._model().parameters())

    def chunk(self, number: int, steps: int) -> Iterator[Pass]:
        """Make one chunk, the first of which begins a video."""
        raise NotImplementedError

    def own_nbytes(self) -> int:
        """Bytes of the cache that this host holds itself, wherever it is."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of the cache and of the video; the next is of the same noise."""
        self.noise = Weights(self.weights.device, SEED)

    def _model(self) -> Any:
        raise NotImplementedError

    def _drawn(self, batch: int, frames: int) -> Tensor:
        """Noise of latent frames, ``[batch, tokens, width]``."""
        return self.noise.normal(batch, frames * self.frame_tokens, self.shape.width)
