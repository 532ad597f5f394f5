"""Symmetric INT2 of residuals on a GPU, as QVG stores it; formulas in :mod:`quantwm_core.symmetric`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from quantwm_core.affine import check_group_size
from quantwm_core.packing import packed_size
from quantwm_kernels.launch import LAUNCHES, ceil_div
from quantwm_kernels.triton.grid import least_rounding_to, mirrored
from quantwm_kernels.triton.groups import as_e4m3, group_sizes, store_codes
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.layer import Layer, Pair, of_pair, rows_of
from quantwm_kernels.triton.residual import Residual
from quantwm_kernels.triton.scales import E4M3_MAX, e4m3_bits, e4m3_number


class SymmetricCode(NamedTuple):
    """Encoded groups of a layer's streams; fields as in :class:`quantwm_core.symmetric.SymmetricCode`."""

    codes: Pair
    scales: Pair


@kernel(do_not_specialize=["tokens", "centroids"])
def encode_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, first_index, second_index,
    first_stored, second_stored, first_codes, second_codes, first_scales, second_scales, tokens, centroids,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, GROUPS_2: tl.constexpr, GROUP_2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a block of tokens."""
    stream, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    GROUPS: tl.constexpr = CHANNELS // GROUP
    own = stream % per_tensor
    index = of_pair(first_index, second_index, stream, per_tensor) + own * tokens
    stored = of_pair(first_stored, second_stored, stream, per_tensor) + own * centroids * CHANNELS
    codes = of_pair(first_codes, second_codes, stream, per_tensor)
    scales = of_pair(first_scales, second_scales, stream, per_tensor)
    token = block * TILE + tl.arange(0, TILE)
    group, lane = tl.arange(0, GROUPS_2), tl.arange(0, GROUP_2)
    channel = group[None, :, None] * GROUP + lane[None, None, :]
    cell = (token < tokens)[:, None] & (group[None, :] < GROUPS)
    inside = cell[:, :, None] & (lane[None, None, :] < GROUP)
    number = tl.load(rows + token.to(tl.int64)[:, None, None] * token_stride + channel, mask=inside, other=0.0)
    nearest = tl.load(index + token, mask=token < tokens, other=0).to(tl.int64)
    place = (nearest * CHANNELS)[:, None, None] + channel
    residual = number.to(tl.float32) - tl.load(stored + place, mask=inside, other=0.0).to(tl.float32)
    bits = e4m3_bits(tl.minimum(tl.max(tl.abs(residual), axis=2), E4M3_MAX))
    step = e4m3_number(bits)
    divisor = tl.where(step > 0, step, 1.0)
    bound = least_rounding_to(divisor, 1)
    code = (residual >= mirrored(bound)[:, :, None]).to(tl.int32) + (residual >= bound[:, :, None]).to(tl.int32)
    code = tl.where((step > 0)[:, :, None], code, 1)
    row = own * tokens + token
    tl.store(scales + row[:, None] * GROUPS + group[None, :], bits.to(tl.uint8), mask=cell)
    store_codes(codes, code, row, cell, group, 0, CHANNELS, GROUP, GROUPS_2, GROUP_2, TILE)


def encode_layer(layer: Layer, group_size: int, residual: Residual) -> SymmetricCode:
    """Code the residuals of all streams; uint8 codes ``[.., N, D / 4]``, E4M3 scales ``[.., N, D / G]``."""
    groups = check_group_size(layer.channels, group_size)
    launch = LAUNCHES["encode_symmetric"]
    codes = layer.pair(layer.tokens, packed_size(layer.channels), dtype=torch.uint8)
    scales = layer.pair(layer.tokens, groups, dtype=torch.uint8)
    encode_kernel[layer.streams, ceil_div(layer.tokens, launch.blocks["TILE"])](
        *layer.source, *residual.index, *residual.stored, *codes, *scales, layer.tokens, residual.stored[0].shape[1],
        layer.channels, group_size, *group_sizes(layer.channels, group_size), **launch.options,
    )  # fmt: skip
    return SymmetricCode(codes, as_e4m3(scales))
