"""Stacks whose cache is made anew before each chunk, and attended to by two encodings at once.

A history of the newest latent frames passes all layers, each of which returns its keys and values, after RoPE and after
ProPE. The denoising steps of the chunk read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quantwm_eval.true_shapes.layers import DTYPE, Weights
from quantwm_eval.true_shapes.shape import Shape
from quantwm_eval.true_shapes.stack import Pass, Stack

TILE = 4  # channels that a camera's matrix turns together


def prope_qkv(
    q: Tensor, k: Tensor, v: Tensor, *, viewmats: Tensor, Ks: None = None
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Queries, keys and values ``[B, H, N, D]`` seen from each frame's camera, and the way back for what attention gives."""
    del Ks
    inverse = viewmats.float().inverse().to(viewmats.dtype)
    return _tiled(q, viewmats.mT), _tiled(k, inverse), _tiled(v, inverse), lambda x: _tiled(x, viewmats)


def _tiled(x: Tensor, matrices: Tensor) -> Tensor:
    """Each four neighbouring channels of ``[B, H, N, D]`` times the matrix ``[B, frames, 4, 4]`` of the token's frame."""
    tiles = x.unflatten(-1, (-1, TILE)).unflatten(2, (matrices.shape[1], -1)).flatten(3, 4)
    return (tiles @ matrices.mT[:, None]).reshape(x.shape)


class Rebuilding(Stack):
    """The loop over chunks.

    Attributes:
        made: What an entry of the cache calls the keys and values that are made anew.
        transformer: The layers.
        history: Chunks so far, ``[1, tokens, width]`` each.
    """

    made: tuple[str, str]

    def __init__(self, shape: Shape, weights: Weights, *, layers: int, latents: int, frame_tokens: int) -> None:
        super().__init__(shape, weights, layers=layers, latents=latents, frame_tokens=frame_tokens)
        self.transformer: Any = torch.nn.Module()
        self.history: list[Tensor] = []
        self._kv_cache: list[Any] = []

    def init_kv_cache(self) -> None:
        """Begin a video."""
        raise NotImplementedError

    def chunk(self, number: int, steps: int) -> Iterator[Pass]:
        """The history's pass, which makes the cache, and the chunk's."""
        if number == 0:
            self.init_kv_cache()
            self.history = []
        past = min(number * self.shape.chunk, self.cached)
        if number:
            known = torch.cat(self.history, dim=1)[:, -past * self.frame_tokens :]
            self._kv_cache = self._run(known, 0, is_cache=True)
            yield "build", known
        x = self._drawn(1, self.shape.chunk)
        for _ in range(steps):
            x = 0.5 * x + 0.5 * self._run(x, past, is_cache=False)
            yield "step", x
        self.history.append(x)

    def own_nbytes(self) -> int:
        """Bytes of the cache tensors that this host holds itself."""
        held = (each for entry in self._kv_cache for name, each in entry.items() if name in self.made)
        return sum(each.nbytes for each in held if isinstance(each, Tensor))

    def forget(self) -> None:
        """Let go of the cache."""
        super().forget()
        self.history, self._kv_cache = [], []

    def _run(self, x: Tensor, first: int, *, is_cache: bool) -> Any:
        """Pass all layers; positions count from the first latent frame that is seen.

        Returns:
            The output, or the cache if it is asked for.
        """
        raise NotImplementedError

    def _views(self, first: int, frames: int) -> Tensor:
        """A camera that turns and moves on, ``[1, frames, 4, 4]``."""
        frame = torch.arange(first, first + frames, device=self.weights.device)
        views = torch.eye(TILE, device=self.weights.device).repeat(1, frames, 1, 1)
        views[0, :, 0, 0], views[0, :, 0, 1] = (0.02 * frame).cos(), (0.02 * frame).sin()
        views[0, :, 1, 0], views[0, :, 1, 1] = -(0.02 * frame).sin(), (0.02 * frame).cos()
        views[0, :, 2, 3] = 0.01 * frame
        return views.to(DTYPE)

    def _model(self) -> Any:
        return self.transformer
