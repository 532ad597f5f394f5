"""What the stacks have in common: random weights, rotations, and all of a layer beside its self-attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantwm_eval.true_shapes.shape import Shape

DTYPE = torch.bfloat16


class Weights:
    """A source of BF16 matrices, drawn on their device by a generator of their own.

    Args:
        device: Where they are needed.
        seed: The same matrices for the same seed, on the same kind of device.

    >>> Weights("cpu").matrix(3, 2).shape
    torch.Size([3, 2])
    """

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.device = torch.empty(0, device=device).device  # with its number, as tensors there have it
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def matrix(self, outputs: int, inputs: int) -> nn.Parameter:
        """``[outputs, inputs]``, of a variance that keeps that of what is multiplied."""
        drawn = torch.empty(outputs, inputs, dtype=DTYPE, device=self.device)
        return nn.Parameter(drawn.normal_(std=inputs**-0.5, generator=self.generator), requires_grad=False)

    def normal(self, *sizes: int) -> Tensor:
        """BF16 normal numbers."""
        return torch.empty(sizes, dtype=DTYPE, device=self.device).normal_(generator=self.generator)


class Projections(nn.Module):
    """Queries, keys and values of a layer, the first two normalised, and the projection of what attention gives."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        self.heads, self.channels = shape.heads, shape.channels
        self.inward = weights.matrix(3 * shape.width, shape.width)
        self.outward = weights.matrix(shape.width, shape.width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, N, width]`` as queries, keys and values ``[B, N, H, D]``."""
        q, k, v = F.linear(x, self.inward).chunk(3, dim=-1)
        q, k = (F.rms_norm(each, each.shape[-1:]) for each in (q, k))
        q, k, v = (each.unflatten(-1, (self.heads, self.channels)) for each in (q, k, v))
        return q, k, v

    def join(self, attended: Tensor) -> Tensor:
        """``[B, N, H, D]`` as ``[B, N, width]``."""
        return F.linear(attended.flatten(2), self.outward)


class Beside(nn.Module):
    """Attention to the prompt and the feed-forward part, each with its norm and its modulation.

    Args:
        shape: Sizes.
        weights: Where matrices come from.
    """

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        self.heads, self.gated = shape.heads, shape.gated
        self.modulation = weights.matrix(6, shape.width)
        self.queries = weights.matrix(shape.width, shape.width)
        self.inward = weights.matrix(2 * shape.width, shape.width)
        self.outward = weights.matrix(shape.width, shape.width)
        self.up = weights.matrix((2 if shape.gated else 1) * shape.feed_forward, shape.width)
        self.down = weights.matrix(shape.width, shape.feed_forward)

    def before(self, x: Tensor) -> Tensor:
        """What self-attention is given."""
        return F.layer_norm(x, x.shape[-1:]) * (1 + self.modulation[0]) + self.modulation[1]

    def after(self, x: Tensor, attended: Tensor, prompt: Tensor | None) -> Tensor:
        """The layer's output, given what self-attention gave; without a prompt that part is left out."""
        x = x + attended * self.modulation[2]
        if prompt is not None:
            x = x + self._to_prompt(F.layer_norm(x, x.shape[-1:]), prompt)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + self.modulation[3]) + self.modulation[4]
        return x + self._fed_forward(y) * self.modulation[5]

    def _to_prompt(self, x: Tensor, prompt: Tensor) -> Tensor:
        q = F.linear(x, self.queries).unflatten(-1, (self.heads, -1))
        k, v = (each.unflatten(-1, (self.heads, -1)) for each in F.linear(prompt, self.inward).chunk(2, dim=-1))
        return F.linear(dense(q, k, v).flatten(2), self.outward)

    def _fed_forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.up)
        if self.gated:
            gate, y = y.chunk(2, dim=-1)
            return F.linear(F.silu(gate) * y, self.down)
        return F.linear(F.gelu(y, approximate="tanh"), self.down)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention on ``[B, N, H, D]``, by PyTorch."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def angles(first: int, frames: int, frame_tokens: int, channels: int, device: torch.device) -> Tensor:
    """FP32 angles ``[tokens, channels / 2]`` by which tokens of these latent frames are rotated, all of a frame alike.

    >>> angles(2, 1, 3, 4, torch.device("cpu")).tolist()
    [[2.0, 0.0199...], [2.0, 0.0199...], [2.0, 0.0199...]]
    """
    frame = torch.arange(first, first + frames, device=device).repeat_interleave(frame_tokens)
    steps = torch.arange(channels // 2, device=device)
    return frame[:, None] * (10_000.0 ** (-2 * steps / channels))


def rotated(x: Tensor, by: Tensor) -> Tensor:
    """Neighbouring channels of ``[.., N, D]`` turned by angles ``[N, D / 2]``, in FP32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(by), by)).flatten(-2).to(x.dtype)
