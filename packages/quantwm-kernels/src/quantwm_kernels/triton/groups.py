"""Groups of channels in a program: how wide they stand there, and how their codes are stored.

A token's channels stand as ``[groups, channels of a group]``, both filled up to powers of two with zeros, which change no
range.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantwm_core import affine as core
from quantwm_core import packing as core_packing
from quantwm_kernels.triton.layer import Pair, padded
from quantwm_kernels.triton.packing import CODE_BITS, CODES_PER_BYTE

LEAST_CHANNELS = 16


@triton.jit
def packed_rows(codes, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """int32 codes, ``4 * BYTES`` a row, as bytes ``[ROWS, BYTES]`` in int32."""
    quads = tl.reshape(codes, (ROWS, BYTES, CODES_PER_BYTE))
    position = tl.arange(0, CODES_PER_BYTE)[None, None, :]
    return tl.sum(quads << (position * CODE_BITS), axis=2)


@triton.jit
def store_codes(codes, code, row, cell, group, FIRST: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
                GROUPS_2: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Pack and store int32 codes ``[TILE, GROUPS_2, LANES]`` of rows ``[TILE]``, which begin ``FIRST`` channels into a group."""
    QUADS: tl.constexpr = LANES // CODES_PER_BYTE
    quad = FIRST // CODES_PER_BYTE + tl.arange(0, QUADS)[None, None, :]
    byte = tl.reshape(packed_rows(code, TILE * GROUPS_2, QUADS), (TILE, GROUPS_2, QUADS))
    place = row[:, None, None] * (CHANNELS // CODES_PER_BYTE) + group[None, :, None] * (GROUP // CODES_PER_BYTE) + quad
    tl.store(codes + place, byte.to(tl.uint8), mask=cell[:, :, None] & (quad < GROUP // CODES_PER_BYTE))


@triton.jit
def store_zero_points(zero_points, zero, block, size, GROUPS_2: tl.constexpr, TILE: tl.constexpr):
    """Pack and store a tile's zero-points ``[TILE, GROUPS_2]``, which fill whole bytes of a stream's ``size``."""
    BYTES: tl.constexpr = TILE * GROUPS_2 // CODES_PER_BYTE
    byte = tl.reshape(packed_rows(zero.to(tl.int32), BYTES, 1), (BYTES,))
    place = block * BYTES + tl.arange(0, BYTES)
    tl.store(zero_points + place, byte.to(tl.uint8), mask=place < size)


def group_sizes(channels: int, group_size: int) -> tuple[int, int]:
    """Groups and channels of a group, filled up to powers of two, and to the 16 channels that a matrix product asks for."""
    groups, wide = core.check_group_size(channels, group_size), padded(group_size, core_packing.CODES_PER_BYTE)
    return padded(groups, max(1, LEAST_CHANNELS // wide)), wide


def as_e4m3(pair: Pair) -> Pair:
    """Bytes as E4M3."""
    return pair[0].view(torch.float8_e4m3fn), pair[1].view(torch.float8_e4m3fn)
