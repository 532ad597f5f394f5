"""One or two tensors of a layer as one batch of streams, so that keys and values share every launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_core.errors import DtypeError, ShapeError
from quantwm_kernels.launch import Launch, ceil_div, next_power_of_two, processors
from quantwm_kernels.sealing import ACCEPTED


@triton.jit
def rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride):
    """Pointer to a stream's first token. Streams of the first tensor stand before those of the second."""
    own = stream % per_tensor
    offset = (own // heads).to(tl.int64) * batch_stride + (own % heads).to(tl.int64) * head_stride
    return first + offset if stream < per_tensor else second + offset


@triton.jit
def of_pair(first, second, stream, per_tensor):
    """Pointer to what a stream's tensor owns of a pair of results."""
    return first if stream < per_tensor else second


Pair = tuple[Tensor, Tensor]
"""A result of both tensors of a layer, each in memory of its own; twice the same where there is but one tensor."""

Arrays = dict[str, Tensor]
"""Storage of one sealed tensor, by name."""


@dataclass(frozen=True)
class Layer:
    """Tensors ``[B, H, N, D]`` of one shape, number format and strides, channels side by side in memory.

    Attributes:
        first: Keys, or the only tensor.
        second: Values, or ``first`` once more.
        tensors: 1 or 2.
    """

    first: Tensor
    second: Tensor
    tensors: int

    @classmethod
    def of(cls, *tensors: Tensor) -> Layer:
        """One or two tensors ``[*streams, N, D]``; what does not lie in memory as it must is copied.

        Raises:
            DtypeError: Another number format than BF16, FP16 or FP32, or two different ones.
            ShapeError: Two different shapes, fewer than two axes, or no element.
        """
        first, last = tensors[0], tensors[-1]
        if first.dtype not in ACCEPTED or last.dtype != first.dtype:
            raise DtypeError(f"got {first.dtype} and {last.dtype}, need one of bfloat16, float16, float32 for both")
        if first.ndim < 2 or first.numel() == 0 or last.shape != first.shape:
            raise ShapeError(
                f"got shapes {tuple(first.shape)} and {tuple(last.shape)}, need [*streams, tokens, channels], not empty"
            )
        wide = [_four_axes(tensor) for tensor in tensors]
        if any(tensor.stride() != wide[0].stride() or tensor.stride(3) != 1 for tensor in wide):
            wide = [tensor.contiguous() for tensor in wide]
        return cls(wide[0], wide[-1], len(tensors))

    @cached_property
    def streams(self) -> int:
        """Streams of all tensors together."""
        return self.tensors * self.per_tensor

    @cached_property
    def per_tensor(self) -> int:
        """Streams of one tensor."""
        return self.first.shape[0] * self.first.shape[1]

    @cached_property
    def tokens(self) -> int:
        """Tokens of a stream."""
        return self.first.shape[2]

    @cached_property
    def channels(self) -> int:
        """Head dimension."""
        return self.first.shape[3]

    @cached_property
    def source(self) -> tuple[Tensor, Tensor, int, int, int, int, int]:
        """What a kernel needs to find a row: tensors, streams per tensor, heads, strides of batch, head and token."""
        batch, head, token, _ = self.first.stride()
        return self.first, self.second, self.per_tensor, self.first.shape[1], batch, head, token

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Fresh memory ``[streams, *shape]`` where the tensors live."""
        return torch.empty((self.streams, *shape), dtype=dtype, device=self.first.device)

    def pair(self, *shape: int, dtype: torch.dtype) -> Pair:
        """Fresh memory ``[streams of a tensor, *shape]`` for each tensor."""
        parts = [
            torch.empty((self.per_tensor, *shape), dtype=dtype, device=self.first.device) for _ in range(self.tensors)
        ]
        return parts[0], parts[-1]

    def by_tensor(self, named: Mapping[str, Pair]) -> list[Arrays]:
        """Pairs ``[streams of a tensor, ...]`` as arrays ``[B, H, ...]`` of each tensor."""
        streams = self.first.shape[:2]
        return [
            {name: pair[tensor].view(*streams, *pair[tensor].shape[1:]) for name, pair in named.items()}
            for tensor in range(self.tensors)
        ]

    def split(self, launch: Launch, streams: int | None = None) -> tuple[int, int]:
        """Tokens per piece, whole tiles, and pieces of a stream, so that about as many programs run as ``launch`` wants.

        Args:
            launch: Tile and programs per processor.
            streams: Programs per piece, where that is not the number of streams.
        """
        tile = launch.blocks["TILE"]
        tiles = ceil_div(self.tokens, tile)
        programs = launch.programs * processors(self.first.device)
        per_piece = ceil_div(tiles, max(1, min(tiles, programs // (streams or self.streams)))) * tile
        return per_piece, ceil_div(self.tokens, per_piece)


def _four_axes(tensor: Tensor) -> Tensor:
    """``[*streams, N, D]`` as ``[B, H, N, D]``."""
    if tensor.ndim == 4:
        return tensor
    return tensor.reshape(1, -1, *tensor.shape[-2:])


def padded(size: int, least: int = 16) -> int:
    """Smallest power of two that holds ``size`` and is at least ``least``, which a matrix product asks for.

    >>> [padded(size) for size in (1, 16, 80, 256)]
    [16, 16, 128, 256]
    """
    return max(least, next_power_of_two(size))
