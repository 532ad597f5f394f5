"""What centroids leave of a layer's tokens, in a kernel and in torch operations."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from quantwm_kernels.triton.grid import both_halves
from quantwm_kernels.triton.layer import Layer, Pair


@triton.jit
def residuals(rows, offset, index, inside, stored, channel, first, second, CLUSTERED: tl.constexpr, CHANNELS: tl.constexpr,
              SECOND: tl.constexpr):  # fmt: skip
    """Both halves of a tile's groups, FP32, less those of its centroids."""
    left, right = both_halves(rows, offset, channel, first, second, SECOND)
    left, right = left.to(tl.float32), right.to(tl.float32)
    if CLUSTERED:
        nearest = tl.load(index, mask=inside, other=0).to(tl.int32)[:, None, None] * CHANNELS
        near, far = both_halves(stored, nearest, channel, first, second, SECOND)
        left, right = left - near.to(tl.float32), right - far.to(tl.float32)
    return left, right


@dataclass(frozen=True)
class Residual:
    """What a layer is coded against, beside itself.

    Attributes:
        index: uint8 ``[streams of a tensor, N]`` of each tensor, the centroid of every token.
        stored: BF16 ``[streams of a tensor, C, D]`` of each tensor.
    """

    index: Pair
    stored: Pair


def subtracted(layer: Layer, residual: Residual) -> Layer:
    """What a stage of centroids leaves, FP32."""
    parts = []
    for tensor, index, stored in zip((layer.first, layer.second), residual.index, residual.stored, strict=True):
        rows = index.long()[..., None].expand(-1, -1, layer.channels)
        parts.append(tensor.float() - stored.float().gather(1, rows).view(tensor.shape))
    return Layer.of(*parts[: layer.tensors])
