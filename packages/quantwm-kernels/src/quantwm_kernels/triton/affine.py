"""Group affine INT2 on a GPU, of plain values or of residuals; formulas in :mod:`quantwm_core.affine`.

The super-scale of a stream needs its largest range first, so there are two passes: ranges, then codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_core import affine as core
from quantwm_core.errors import DtypeError
from quantwm_kernels.affine import AffineCode, code_shapes, decoded_shape
from quantwm_kernels.launch import LAUNCHES, ceil_div, on_device
from quantwm_kernels.triton import packing
from quantwm_kernels.triton.grid import NARROW, codes_of, group_range, restored_residual, searched_grid, step_of_range
from quantwm_kernels.triton.groups import as_e4m3, group_sizes, store_codes, store_zero_points
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.layer import Layer, Pair, of_pair, padded, rows_of
from quantwm_kernels.triton.packing import CODES_PER_BYTE, code_in
from quantwm_kernels.triton.projection import Projection, projected, store_coefficients
from quantwm_kernels.triton.residual import Residual, residuals
from quantwm_kernels.triton.rounding import refined
from quantwm_kernels.triton.scales import step_of, super_scale_of


@triton.jit
def super_scale_over(largest, pieces, PIECES: tl.constexpr):
    """Super-scale ``[1]`` of a stream, of the largest ranges of its pieces."""
    piece = tl.arange(0, PIECES)
    span = tl.max(tl.load(largest + piece, mask=piece < pieces, other=0.0), keep_dims=True)
    return super_scale_of(step_of_range(span))


@kernel(do_not_specialize=["tokens", "per_piece"])
def range_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, largest, tokens, per_piece,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, GROUPS_2: tl.constexpr, GROUP_2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Largest range of a group in a piece of a stream's tokens."""
    stream, piece = tl.program_id(0), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    group, lane = tl.arange(0, GROUPS_2)[None, :, None], tl.arange(0, GROUP_2)[None, None, :]
    channel = group * GROUP + lane
    span = tl.zeros((TILE, GROUPS_2), tl.float32)
    for start in range(piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece), TILE):
        token = start + tl.arange(0, TILE)[:, None, None]
        inside = (token < tokens) & (channel < CHANNELS) & (lane < GROUP)
        number = tl.load(rows + token.to(tl.int64) * token_stride + channel, mask=inside, other=0.0).to(tl.float32)
        low, high = group_range(number)
        span = tl.maximum(span, high - low)
    tl.store(largest + stream * tl.num_programs(1) + piece, tl.max(span))


@kernel(do_not_specialize=["tokens", "centroids", "pieces", "zero_bytes", "fed_streams", "projected_streams"])
def encode_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, first_index, second_index,
    first_stored, second_stored, largest, matrix, projection, first_codes, second_codes, first_scales, second_scales,
    first_zeros, second_zeros, first_super, second_super, coefficients, peaks, tokens, centroids, pieces, zero_bytes,
    fed_streams, projected_streams,
    CLUSTERED: tl.constexpr, CANDIDATES: tl.constexpr, FED: tl.constexpr, RANK: tl.constexpr, RANK_2: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, GROUPS_2: tl.constexpr, GROUP_2: tl.constexpr, PIECES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Codes, scales and zero-points of a block of tokens, and the coefficients of what is lost along a basis.

    What is lost is ``(K - c) - x^``, where :mod:`quantwm_core.psac` takes ``K - K^`` with ``K^ = c + x^``: the residual is
    at hand, and this rounds once less, which is far below half a step of a coefficient (decision 0020).
    """
    stream, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    GROUPS: tl.constexpr = CHANNELS // GROUP
    HALF: tl.constexpr = GROUP_2 // 2 if GROUP_2 > NARROW and not FED else GROUP_2
    SECOND: tl.constexpr = GROUP_2 - HALF
    own, token = stream % per_tensor, block * TILE + tl.arange(0, TILE)
    group, lane = tl.arange(0, GROUPS_2), tl.arange(0, HALF)
    channel = group[:, None] * GROUP + lane[None, :]
    near = (group[:, None] < GROUPS) & (lane[None, :] < GROUP)
    far = (group[:, None] < GROUPS) & (lane[None, :] + SECOND < GROUP)
    inside = token < tokens
    nearer, farther = inside[:, None, None] & near[None, :, :], inside[:, None, None] & far[None, :, :]
    offset = token.to(tl.int64)[:, None, None] * token_stride
    index = of_pair(first_index, second_index, stream, per_tensor) + own * tokens + token
    stored = of_pair(first_stored, second_stored, stream, per_tensor) + own * centroids * CHANNELS
    left, right = residuals(
        rows, offset, index, inside, stored, channel[None, :, :], nearer, farther, CLUSTERED, CHANNELS, SECOND
    )
    super_scale = super_scale_over(largest + stream * pieces, pieces, PIECES)
    super_scales = of_pair(first_super, second_super, stream, per_tensor) + own + tl.arange(0, 1)
    tl.store(super_scales, super_scale, mask=(tl.arange(0, 1) + block) == 0)
    super_scale = super_scale[:, None]
    reciprocal = tl.div_rn(tl.full((1, 1), 1.0, tl.float32), super_scale)
    bits, step, zero, lower, middle, upper = searched_grid(left, right, super_scale, reciprocal, CANDIDATES, SECOND > 0)
    code = codes_of(left, lower, middle, upper)
    if FED:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if stream < fed_streams:
            own_matrix = matrix + stream * CHANNELS * CHANNELS
            code = refined(left, step, zero, own_matrix, channel, group, near, CHANNELS, GROUP).to(tl.int32)
    row = own * tokens + token
    cell = inside[:, None] & (group[None, :] < GROUPS)
    scales = of_pair(first_scales, second_scales, stream, per_tensor)
    tl.store(scales + row[:, None] * GROUPS + group[None, :], bits.to(tl.uint8), mask=cell)
    codes = of_pair(first_codes, second_codes, stream, per_tensor)
    store_codes(codes, code, row, cell, group, 0, CHANNELS, GROUP, GROUPS_2, HALF, TILE)
    if SECOND > 0:
        right_code = codes_of(right, lower, middle, upper)
        store_codes(codes, right_code, row, cell, group, SECOND, CHANNELS, GROUP, GROUPS_2, HALF, TILE)
    zero_points = of_pair(first_zeros, second_zeros, stream, per_tensor)
    if GROUPS == GROUPS_2:
        store_zero_points(zero_points + own * zero_bytes, zero, block, zero_bytes, GROUPS_2, TILE)
    else:
        tl.store(zero_points + row[:, None] * GROUPS + group[None, :], zero.to(tl.uint8), mask=cell)
    if RANK > 0:  # noqa: SIM102 - known when compiled
        if stream < projected_streams:
            share = projected(
                left - restored_residual(code, step, zero), projection + stream * CHANNELS * RANK, channel, near,
                tl.zeros((TILE, RANK_2), tl.float32), RANK, RANK_2,
            )  # fmt: skip
            if SECOND > 0:
                share = projected(
                    right - restored_residual(right_code, step, zero), projection + (stream * CHANNELS + SECOND) * RANK,
                    channel, far, share, RANK, RANK_2,
                )  # fmt: skip
            summit = peaks + (stream * tl.num_programs(1) + block) * RANK
            store_coefficients(coefficients, summit, share, row, inside, RANK, RANK_2)


@kernel(do_not_specialize=["tokens", "start", "stop", "zero_bytes"])
def decode_kernel(
    codes, scales, zero_points, super_scales, values, tokens, start, stop, zero_bytes,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUPS_2: tl.constexpr, GROUP_2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``(code - z) * s'`` of a block of tokens."""
    stream, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = start + block * TILE + tl.arange(0, TILE)
    group, lane = tl.arange(0, GROUPS_2), tl.arange(0, GROUP_2)
    cell = (token < stop)[:, None] & (group[None, :] < GROUPS)
    row = stream * tokens + token
    super_scale = tl.load(super_scales + stream)
    step = step_of(tl.load(scales + row[:, None] * GROUPS + group[None, :], mask=cell, other=0), super_scale)
    flat = token[:, None].to(tl.int64) * GROUPS + group[None, :]
    byte = tl.load(zero_points + stream * zero_bytes + flat // CODES_PER_BYTE, mask=cell, other=0).to(tl.int32)
    zero = code_in(byte, (flat % CODES_PER_BYTE).to(tl.int32))
    channel = group[None, :, None] * GROUP + lane[None, None, :]
    inside = cell[:, :, None] & (lane[None, None, :] < GROUP)
    place = row[:, None, None] * (GROUPS * GROUP // CODES_PER_BYTE) + channel // CODES_PER_BYTE
    code = code_in(tl.load(codes + place, mask=inside, other=0).to(tl.int32), channel % CODES_PER_BYTE)
    number = (code - zero[:, :, None]).to(tl.float32) * step[:, :, None]
    place = (stream * (stop - start) + (token - start))[:, None, None] * (GROUPS * GROUP) + channel
    tl.store(values + place, number, mask=inside)


def largest_ranges(layer: Layer, group_size: int) -> Tensor:
    """Largest group range of each piece of the plain values, FP32 ``[S, pieces]``."""
    launch = LAUNCHES["group_ranges"]
    per_piece, pieces = layer.split(launch)
    largest = layer.empty(pieces, dtype=torch.float32)
    range_kernel[layer.streams, pieces](
        *layer.source, largest, layer.tokens, per_piece, layer.channels, group_size,
        *group_sizes(layer.channels, group_size), **launch.options,
    )  # fmt: skip
    return largest


class Codes(NamedTuple):
    """Affine codes of both tensors of a layer; fields as in :class:`quantwm_core.affine.AffineCode`."""

    codes: Pair
    scales: Pair
    zero_points: Pair
    super_scale: Pair


def encode_layer(
    layer: Layer,
    group_size: int,
    largest: Tensor,
    residual: Residual | None = None,
    along: Projection | None = None,
    scale_candidates: int = 1,
    feedback: Tensor | None = None,
) -> Codes:
    """Code all streams.

    Args:
        layer: The values.
        group_size: Channels that share a scale.
        largest: FP32 ``[S, pieces]``, of whose maximum the super-scale is made.
        residual: Codebooks that are subtracted first.
        along: What to project the error on.
        scale_candidates: Shares of a group's range that compete for its scale.
        feedback: FP32 ``[streams, D, D]`` of the first streams, whose codes are chosen with feedback.
    """
    core.check_scale_candidates(scale_candidates)
    shapes = code_shapes((layer.per_tensor, layer.tokens, layer.channels), group_size)
    groups = group_sizes(layer.channels, group_size)
    aligned = groups[0] * group_size == layer.channels
    launch = LAUNCHES["encode_groups"]
    codes, scales = (layer.pair(*shape[1:], dtype=torch.uint8) for shape in shapes[:2])
    zero_bytes = shapes[2][1] if aligned else layer.tokens * shapes[1][2]
    zero_points = layer.pair(zero_bytes, dtype=torch.uint8)
    super_scale = layer.pair(dtype=torch.float32)
    index, stored = (codes, codes) if residual is None else (residual.index, residual.stored)
    matrix, coefficients, peaks = (
        (largest, largest, largest) if along is None else (along.matrix, along.coefficients, along.peaks)
    )
    fed = largest if feedback is None else feedback
    rank = 0 if along is None else matrix.shape[-1]
    encode_kernel[layer.streams, ceil_div(layer.tokens, launch.blocks["TILE"])](
        *layer.source, *index, *stored, largest, fed, matrix, *codes, *scales, *zero_points, *super_scale,
        coefficients, peaks, layer.tokens, stored[0].shape[1], largest.shape[1], shapes[2][1],
        0 if feedback is None else len(feedback), 0 if along is None else len(matrix),
        residual is not None, scale_candidates, feedback is not None, rank, padded(rank), layer.channels, group_size,
        *groups, padded(largest.shape[1], 1), **launch.options,
    )  # fmt: skip
    if not aligned:  # neighbouring tokens share bytes in no pattern that a tile could keep
        zero_points = packing.pack(zero_points[0]), packing.pack(zero_points[1])
    return Codes(codes, as_e4m3(scales), zero_points, super_scale)


def encode(values: Tensor, group_size: int, scale_candidates: int = 1) -> AffineCode:
    """Quantize FP32 values to 2 bits; see :func:`quantwm_kernels.affine.encode`.

    Args:
        values: FP32, FP16 or BF16 ``[*streams, tokens, channels]`` of any strides, finite.
        group_size: Channels that share a scale.
        scale_candidates: Shares of a group's range that compete for its scale.

    Raises:
        ParameterError, ShapeError, DtypeError: An argument does not fit.
        DeviceError: No kernel runs where the values live.
    """
    shapes = code_shapes(values.shape, group_size)
    layer = Layer.of(values)
    with on_device(values, "values"):
        largest = largest_ranges(layer, group_size)
        code = encode_layer(layer, group_size, largest, scale_candidates=scale_candidates)
    return AffineCode(*(pair[0].view(shape) for pair, shape in zip(code, shapes, strict=True)))


def decode(code: AffineCode, start: int = 0, stop: int | None = None) -> Tensor:
    """Reconstruct tokens ``start`` to ``stop`` (end by default) in FP32.

    Raises:
        DtypeError: The scales are no E4M3.
        DeviceError: No kernel runs where the code lives.
    """
    if code.scales.dtype is not torch.float8_e4m3fn:
        raise DtypeError(f"scales: got {code.scales.dtype}, need torch.float8_e4m3fn")
    tokens, groups = code.scales.shape[-2:]
    end = tokens if stop is None else stop
    values = torch.empty(decoded_shape(code.codes.shape, start, end), dtype=torch.float32, device=code.codes.device)
    channels = values.shape[-1]
    launch = LAUNCHES["decode_groups"]
    with on_device(code.codes, "codes"):
        if values.numel():
            grid = (code.super_scale.numel(), ceil_div(end - start, launch.blocks["TILE"]))
            decode_kernel[grid](
                code.codes.contiguous(), code.scales.contiguous().view(torch.uint8), code.zero_points.contiguous(),
                code.super_scale.contiguous(), values, tokens, start, end, code.zero_points.shape[-1], groups,
                channels // groups, *group_sizes(channels, channels // groups), **launch.options,
            )  # fmt: skip
    return values
