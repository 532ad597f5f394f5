"""2-bit codes and 4-bit integers <-> bytes on a GPU. The layout is drawn in :mod:`quantwm_core.packing`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_core import packing as core
from quantwm_core.errors import DtypeError, ShapeError
from quantwm_kernels.launch import LAUNCHES, ceil_div, on_device
from quantwm_kernels.packing import packed_shape, unpacked_shape
from quantwm_kernels.triton.kernel import Kernel, kernel

CODES_PER_BYTE: tl.constexpr = tl.constexpr(core.CODES_PER_BYTE)
CODE_BITS: tl.constexpr = tl.constexpr(8 // core.CODES_PER_BYTE)
CODE_MASK: tl.constexpr = tl.constexpr((1 << 8 // core.CODES_PER_BYTE) - 1)


@triton.jit
def code_in(word, position):
    """Code ``position`` of an integer that holds packed codes in order."""
    return (word >> (position * CODE_BITS)) & CODE_MASK


@kernel(do_not_specialize=["codes_per_row", "bytes_per_row", "total"])
def pack_kernel(codes, packed, codes_per_row, bytes_per_row, total, BLOCK: tl.constexpr):
    """Each lane writes one byte; a row's last byte is filled up with zeros."""
    byte_index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = byte_index // bytes_per_row, byte_index % bytes_per_row
    inside = byte_index < total
    byte = tl.zeros((BLOCK,), tl.uint8)
    for position in tl.static_range(CODES_PER_BYTE):
        code_index = column * CODES_PER_BYTE + position
        exists = inside & (code_index < codes_per_row)
        code = tl.load(codes + row * codes_per_row + code_index, mask=exists, other=0)
        byte |= (code & CODE_MASK) << (position * CODE_BITS)
    tl.store(packed + byte_index, byte, mask=inside)


@kernel(do_not_specialize=["codes_per_row", "bytes_per_row", "total"])
def unpack_kernel(packed, codes, codes_per_row, bytes_per_row, total, BLOCK: tl.constexpr):
    """Each lane writes one code."""
    code_index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = code_index // codes_per_row, code_index % codes_per_row
    inside = code_index < total
    byte = tl.load(packed + row * bytes_per_row + column // CODES_PER_BYTE, mask=inside, other=0)
    tl.store(codes + code_index, code_in(byte, (column % CODES_PER_BYTE).to(tl.uint8)), mask=inside)


def pack(codes: Tensor) -> Tensor:
    """Pack 2-bit codes along the last axis; bits above the lowest two are dropped.

    Args:
        codes: uint8 ``[..., n]`` of any strides.

    Returns:
        uint8 ``[..., ceil(n / 4)]``.

    Raises:
        DtypeError: ``codes`` is not uint8.
        ShapeError: It has no axis.
        DeviceError: No kernel runs where it lives.
    """
    if codes.dtype != torch.uint8:
        raise DtypeError(f"codes: got {codes.dtype}, need torch.uint8")
    if codes.ndim == 0:
        raise ShapeError("codes: got a tensor without an axis, need [..., n]")
    shape = packed_shape(codes.shape)
    packed = codes.new_empty(shape)
    with on_device(codes, "codes"):
        _launch(pack_kernel, "pack_codes", codes.contiguous(), packed, codes.shape[-1], shape[-1])
    return packed


def unpack(packed: Tensor, codes: int) -> Tensor:
    """Inverse of :func:`pack`.

    Args:
        packed: uint8 ``[..., ceil(codes / 4)]`` of any strides.
        codes: How many codes to read from the last axis.

    Returns:
        uint8 ``[..., codes]``.

    Raises:
        DtypeError: ``packed`` is not uint8.
        ShapeError: It does not hold that many codes.
        DeviceError: No kernel runs where it lives.
    """
    if packed.dtype != torch.uint8:
        raise DtypeError(f"packed codes: got {packed.dtype}, need torch.uint8")
    size = core.packed_size(codes)
    if packed.ndim == 0 or packed.shape[-1] != size:
        raise ShapeError(f"packed codes: got shape {tuple(packed.shape)}, need {size} bytes for {codes} codes")
    unpacked = packed.new_empty(unpacked_shape(packed.shape, codes))
    with on_device(packed, "packed codes"):
        _launch(unpack_kernel, "unpack_codes", packed.contiguous(), unpacked, codes, size)
    return unpacked


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Pack signed 4-bit integers, int8 ``[..., n]``, along the last axis; in torch operations, as so few need it.

    Returns:
        uint8 ``[..., ceil(n / 2)]``; an odd last byte is padded with 0.
    """
    filled = torch.nn.functional.pad(numbers, (0, numbers.shape[-1] % core.NIBBLES_PER_BYTE)).view(torch.uint8) & 15
    return filled[..., 0::2] | filled[..., 1::2] << 4


def unpack_nibbles(packed: Tensor, numbers: int) -> Tensor:
    """Inverse of :func:`pack_nibbles`: int8 ``[..., numbers]``."""
    wide = torch.stack([packed << 4, packed], dim=-1).view(torch.int8) >> 4
    return wide.flatten(-2)[..., :numbers]


def _launch(coder: Kernel, name: str, source: Tensor, target: Tensor, codes: int, size: int) -> None:
    """Launch a kernel with a lane per element of ``target``; nothing to write is no launch."""
    if target.numel():
        launch = LAUNCHES[name]
        grid = (ceil_div(target.numel(), launch.blocks["BLOCK"]),)
        coder[grid](source, target, codes, size, target.numel(), **launch.options)
