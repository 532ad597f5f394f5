"""Coefficients of an error along a basis, where a kernel has the error at hand; formulas in :mod:`quantwm_core.psac`."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quantwm_kernels.launch import LAUNCHES, ceil_div
from quantwm_kernels.triton.arithmetic import product
from quantwm_kernels.triton.domain import to_bf16


@triton.jit
def projected(error, projection, channel, known, share, RANK: tl.constexpr, RANK_2: tl.constexpr):
    """``share + error @ projection`` of errors ``[TILE, groups, lanes]``, both in two parts of BF16."""
    WIDE: tl.constexpr = error.shape[1] * error.shape[2]
    flat, exists = tl.reshape(channel, (WIDE, 1)), tl.reshape(known, (WIDE, 1))
    direction = tl.arange(0, RANK_2)[None, :]
    matrix = tl.load(projection + flat * RANK + direction, mask=exists & (direction < RANK), other=0.0)
    lost = tl.reshape(error, (error.shape[0], WIDE))
    near, close = to_bf16(lost), to_bf16(matrix)
    share = product(to_bf16(lost - near.to(tl.float32)), close, share)
    share = product(near, to_bf16(matrix - close.to(tl.float32)), share)
    return product(near, close, share)


@triton.jit
def store_coefficients(coefficients, peaks, share, row, inside, RANK: tl.constexpr, RANK_2: tl.constexpr):
    """Store the coefficients ``[TILE, RANK_2]`` of rows, and the largest magnitude along each direction."""
    direction = tl.arange(0, RANK_2)
    present = inside[:, None] & (direction[None, :] < RANK)
    tl.store(coefficients + row[:, None] * RANK + direction[None, :], share, mask=present)
    tl.store(peaks + direction, tl.max(tl.abs(share), axis=0), mask=direction < RANK)


@dataclass(frozen=True)
class Projection:
    """What becomes of the error of the first streams.

    Attributes:
        matrix: FP32 ``[streams, D, r]``; coefficients are ``error @ matrix``.
        coefficients: FP32 ``[streams, N, r]``, written.
        peaks: FP32 ``[streams, blocks, r]``, their largest magnitudes per block of tokens, written.
    """

    matrix: Tensor
    coefficients: Tensor
    peaks: Tensor

    @classmethod
    def onto(cls, matrix: Tensor, tokens: int) -> Projection:
        """Memory for the coefficients of ``tokens`` along a matrix ``[streams, D, r]``."""
        streams, _, rank = matrix.shape
        blocks = ceil_div(tokens, LAUNCHES["encode_groups"].blocks["TILE"])
        return cls(matrix, matrix.new_empty(streams, tokens, rank), matrix.new_empty(streams, blocks, rank))
