"""PSAC on a GPU: the key error along the top query directions; formulas and layouts in :mod:`quantwm_core.psac`.

Coefficients are always written dense, with their number of non-zero values per stream. Which layout a stream is stored in
depends on that number, so only the host can decide it, once the number has arrived: :func:`laid_out`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from quantwm_core import psac as core
from quantwm_core.errors import ShapeError
from quantwm_kernels.launch import LAUNCHES, ceil_div, on_device
from quantwm_kernels.psac import PsacCode, coefficient_shape, decoded_shape
from quantwm_kernels.triton.arithmetic import rounded
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.layer import Layer, padded, rows_of
from quantwm_kernels.triton.packing import pack_nibbles, unpack_nibbles

BITS_PER_BYTE = 8


@kernel()
def projection_kernel(basis, matrix, CHANNELS: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr,
                      RANK_2: tl.constexpr):  # fmt: skip
    """``U (U^T U)^-1`` of a stream. Gauss-Jordan without pivoting: symmetric and positive."""
    stream = tl.program_id(0).to(tl.int64)
    channel, row, column = tl.arange(0, BLOCK_D)[:, None], tl.arange(0, RANK_2)[:, None], tl.arange(0, RANK_2)[None, :]
    inside = (channel < CHANNELS) & (column < RANK)
    place = (stream * CHANNELS + channel) * RANK + column
    wide = tl.load(basis + place, mask=inside, other=0.0).to(tl.float32)
    unit = tl.where(row == column, 1.0, 0.0)
    gram = tl.dot(tl.trans(wide), wide, input_precision="ieee")
    own = tl.sum(tl.where(row == column, gram, 0.0), axis=1)[:, None]
    left = tl.where(own > 0, gram, unit)  # a direction that is zero gets no coefficients
    right = unit
    for pivot in range(RANK):
        here = row == pivot
        left_row = tl.sum(tl.where(here, left, 0.0), axis=0)[None, :]
        right_row = tl.sum(tl.where(here, right, 0.0), axis=0)[None, :]
        factors = tl.sum(tl.where(column == pivot, left, 0.0), axis=1)[:, None]
        head = tl.sum(tl.where(column == pivot, left_row, 0.0), axis=1)[:, None]
        left = tl.where(here, left_row / head, left - factors * (left_row / head))
        right = tl.where(here, right_row / head, right - factors * (right_row / head))
    tl.store(matrix + place, tl.dot(wide, right, input_precision="ieee"), mask=inside)


@kernel(do_not_specialize=["tokens"])
def project_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, matrix, coefficients, peaks, tokens,
    CHANNELS: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr, RANK_2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Coefficients of a block of tokens and their largest magnitudes."""
    stream, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    token, channel, direction = block * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D), tl.arange(0, RANK_2)
    inside = (token[:, None] < tokens) & (channel[None, :] < CHANNELS)
    place = token[:, None].to(tl.int64) * token_stride + channel[None, :]
    error = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    exists = (channel[:, None] < CHANNELS) & (direction[None, :] < RANK)
    place = (stream * CHANNELS + channel[:, None]) * RANK + direction[None, :]
    share = tl.dot(error, tl.load(matrix + place, mask=exists, other=0.0), input_precision="tf32x3")
    place = (stream * tokens + token[:, None]) * RANK + direction[None, :]
    tl.store(coefficients + place, share, mask=(token[:, None] < tokens) & (direction[None, :] < RANK))
    peak = tl.max(tl.abs(share), axis=0)
    place = (stream * tl.num_programs(1) + block) * RANK + direction
    tl.store(peaks + place, peak, mask=direction < RANK)


@kernel(do_not_specialize=["tokens", "blocks", "threshold"])
def quantize_kernel(
    coefficients, peaks, energies, scales, steps, non_zero, tokens, blocks, threshold,
    THRESHOLD: tl.constexpr, MOST: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr, RANK_2: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Steps of a block of tokens, up to ``MOST`` in magnitude; the first program of a stream stores its scales."""
    stream, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    direction, part = tl.arange(0, RANK_2), tl.arange(0, BLOCKS)[:, None]
    token = block * TILE + tl.arange(0, TILE)[:, None]
    exists = (part < blocks) & (direction[None, :] < RANK)
    peak = tl.max(tl.load(peaks + (stream * blocks + part) * RANK + direction[None, :], mask=exists, other=0.0), axis=0)
    largest = tl.div_rn(peak, tl.full(peak.shape, MOST, tl.float32))
    bits = (largest.to(tl.uint32, bitcast=True) + 0xFFFF) & 0xFFFF0000
    step = bits.to(tl.float32, bitcast=True)
    known = (direction < RANK) & (block == 0)
    tl.store(scales + stream * RANK + direction, step.to(tl.bfloat16), mask=known)
    inside = (token < tokens) & (direction[None, :] < RANK)
    place = (stream * tokens + token) * RANK + direction[None, :]
    number = tl.load(coefficients + place, mask=inside, other=0.0)
    divisor = tl.broadcast_to(tl.where(step > 0, step, float("inf"))[None, :], number.shape)
    limit = MOST * 1.0
    count = tl.clamp(rounded(tl.div_rn(number, divisor)), -limit, limit)
    if THRESHOLD:
        energy = tl.load(energies + stream * RANK + direction, mask=direction < RANK, other=0.0)
        spread = tl.sqrt_rn(tl.div_rn(energy, tl.full(energy.shape, CHANNELS, tl.float32)))
        effect = tl.abs(count) * step[None, :] * spread[None, :]
        count = tl.where(effect < threshold, 0.0, count)
    tl.store(steps + place, count.to(tl.int8), mask=inside)
    tl.atomic_add(non_zero + stream, tl.sum((count != 0).to(tl.int32)))


def projection_of(basis: Tensor) -> Tensor:
    """FP32 ``U (U^T U)^-1`` of BF16 bases ``[S, D, r]``; zero where a basis is."""
    streams, channels, rank = basis.shape
    matrix = torch.empty(basis.shape, dtype=torch.float32, device=basis.device)
    launch = LAUNCHES["invert_gram"]
    sizes = (channels, rank, padded(channels), padded(rank))
    projection_kernel[streams,](basis.contiguous(), matrix, *sizes, **launch.options)
    return matrix


def quantize(
    coefficients: Tensor,
    peaks: Tensor,
    energies: Tensor,
    channels: int,
    threshold: float,
    non_zero: Tensor,
    bits: int = 8,
) -> tuple[Tensor, Tensor]:
    """Code FP32 coefficients ``[S, N, r]``.

    Args:
        coefficients: What to code.
        peaks: FP32 ``[S, blocks, r]``, of whose maximum the scales are made.
        energies: FP32 ``[S, r]``.
        channels: Head dimension.
        threshold: Coefficients whose effect on a logit is below this many standard deviations are dropped.
        non_zero: int32 ``[S]``; how many values are not zero is added to it.
        bits: Of a coefficient, 8 or 4.

    Returns:
        BF16 scales ``[S, r]`` and int8 steps ``[S, N, r]``, or uint8 ``[S, N, ceil(r / 2)]`` of INT4.
    """
    if bits == 4:
        peaks = _clipping_point(coefficients, peaks.amax(dim=1))[:, None]
    streams, tokens, rank = coefficients.shape
    scales = torch.empty((streams, rank), dtype=torch.bfloat16, device=coefficients.device)
    steps = torch.empty(coefficients.shape, dtype=torch.int8, device=coefficients.device)
    launch = LAUNCHES["quantize_coefficients"]
    blocks = peaks.shape[1]
    quantize_kernel[streams, ceil_div(tokens, launch.blocks["TILE"])](
        coefficients, peaks, energies, scales, steps, non_zero, tokens, blocks, float(threshold), threshold > 0,
        core.COEFFICIENT_MAX[bits], channels, rank, padded(rank, 1), padded(blocks, 1), **launch.options,
    )  # fmt: skip
    return scales, (pack_nibbles(steps) if bits == 4 else steps)


def _clipping_point(coefficients: Tensor, largest: Tensor) -> Tensor:
    """The largest magnitude of each direction, or three times its root mean square where that is less."""
    divisor = torch.where(largest > 0, largest, 1.0)
    mean = (coefficients / divisor[:, None]).double().square().mean(dim=1)
    return torch.minimum(largest, (core.CLIPPED_RMS * mean.sqrt()).float() * divisor)


def sparse_streams(steps: Tensor, non_zero: Sequence[int]) -> list[bool]:
    """Which streams of dense ``steps``, as :func:`laid_out` takes them, are smaller as a bitmap and values."""
    if steps.dtype is torch.uint8:
        return [False] * len(non_zero)
    _, tokens, rank = steps.shape
    dense = core.dense_size(tokens, rank)
    return [core.sparse_size(tokens, rank, count) < dense for count in non_zero]


def laid_out(steps: Tensor, scales: Tensor, non_zero: Sequence[int]) -> PsacCode:
    """Dense steps in the layout that is smaller for each stream, as :mod:`quantwm_core.psac` decides it.

    Args:
        steps: int8 ``[S, N, r]``; kept as they are where no stream is sparse, or where they are packed INT4.
        scales: BF16 ``[*streams, r]``.
        non_zero: How many steps of each stream are not zero.
    """
    tokens, rank = steps.shape[1], scales.shape[-1]
    sparse = sparse_streams(steps, non_zero)
    blocks = -(-tokens // core.TOKENS_PER_COUNT)
    if not any(sparse):
        bits, whole = steps.new_empty(0, -(-tokens * rank // BITS_PER_BYTE), dtype=torch.uint8), steps
        nothing = bits.new_empty(0)
        return PsacCode(scales, whole, nothing, bits, nothing.to(torch.int8), bits.new_empty(0, blocks).int())
    layout = torch.tensor(sparse, device=steps.device)
    kept = steps[layout]
    flags = (kept != 0).flatten(1)
    filled = torch.nn.functional.pad(flags, (0, -flags.shape[1] % BITS_PER_BYTE)).unflatten(1, (-1, BITS_PER_BYTE))
    weights = torch.tensor([1 << bit for bit in range(BITS_PER_BYTE)], dtype=torch.uint8, device=steps.device)
    bitmap = (filled * weights).sum(-1, dtype=torch.uint8)
    rows = torch.nn.functional.pad(flags.view(kept.shape).sum(-1), (0, -tokens % core.TOKENS_PER_COUNT))
    per_block = rows.unflatten(1, (blocks, core.TOKENS_PER_COUNT)).sum(-1)
    counts = (per_block.flatten().cumsum(0).view(per_block.shape) - per_block).int()
    return PsacCode(scales, steps[~layout], layout.to(torch.uint8), bitmap, kept[kept != 0], counts)


def project(error: Tensor, basis: Tensor) -> Tensor:
    """Least-squares coefficients of ``error`` in the columns of ``basis``; see :func:`quantwm_kernels.psac.project`.

    Args:
        error: FP32 ``[*streams, tokens, channels]``.
        basis: BF16 ``[*streams, channels, r]``.

    Raises:
        ShapeError, DtypeError: The arguments do not fit.
        DeviceError: No kernel runs where they live.
    """
    with on_device(error, "error"):
        coefficients, _ = _projected(error, basis)
    return coefficients.view(coefficient_shape(error.shape, basis.shape[-1]))


def encode(error: Tensor, basis: Tensor, energies: Tensor, threshold: float = 0.0, bits: int = 8) -> PsacCode:
    """Code the key error along the basis; see :func:`quantwm_kernels.psac.encode`. Waits for the device once.

    Args:
        error: FP32 ``[*streams, tokens, channels]``, ``K - K^`` before ``K^`` is rounded to BF16.
        basis: BF16 ``[*streams, channels, r]``.
        energies: FP32 ``[*streams, r]``.
        threshold: Coefficients whose effect on a logit is below this many standard deviations are dropped.
        bits: Of a coefficient, 8, or 4 without a threshold.

    Raises:
        ParameterError, ShapeError, DtypeError: The arguments do not fit.
        DeviceError: No kernel runs where they live.
    """
    core.check_bits(bits, threshold)
    with on_device(error, "error"):
        coefficients, peaks = _projected(error, basis)
        non_zero = torch.zeros(len(coefficients), dtype=torch.int32, device=error.device)
        known = energies.reshape(len(coefficients), -1).contiguous()
        scales, steps = quantize(coefficients, peaks, known, error.shape[-1], threshold, non_zero, bits)
        return laid_out(steps, scales.view(*basis.shape[:-2], -1), non_zero.tolist())


def decode(code: PsacCode, tokens: int, start: int = 0, stop: int | None = None) -> Tensor:
    """Coefficients of tokens ``start`` to ``stop`` of a unit of ``tokens``, FP32; see :func:`quantwm_kernels.psac.decode`.

    A fused read does without; this serves inspection, in plain torch operations that wait for nothing.
    """
    end = tokens if stop is None else stop
    shape = decoded_shape(code.scales.shape, start, end)
    steps = unpack_nibbles(code.dense, shape[-1]) if code.dense.dtype is torch.uint8 else code.dense
    if code.layout.numel():
        rank = code.scales.shape[-1]
        position = torch.arange(BITS_PER_BYTE, dtype=torch.uint8, device=code.bitmap.device)
        flags = ((code.bitmap[..., None] >> position) & 1).flatten(1)[:, : tokens * rank]
        order = flags.flatten().cumsum(0).view(flags.shape) - 1
        values = torch.cat([code.values, code.values.new_zeros(1)])
        expanded = (values[order.clamp(min=0)] * flags).view(-1, tokens, rank)
        sparse = code.layout.flatten() != 0
        place = torch.where(sparse, sparse.cumsum(0) - 1, (~sparse).cumsum(0) - 1 + len(expanded))
        steps = torch.cat([expanded.to(torch.int8), code.dense])[place]
    return steps[:, start:end].float().view(shape) * code.scales.float()[..., None, :]


def _projected(error: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 coefficients ``[S, N, r]`` and their peaks per block of tokens."""
    if error.shape[:-2] != basis.shape[:-2] or error.shape[-1] != basis.shape[-2]:
        raise ShapeError(f"error {tuple(error.shape)} and basis {tuple(basis.shape)} do not fit")
    layer, launch = Layer.of(error), LAUNCHES["project_error"]
    matrix = projection_of(basis.reshape(layer.streams, *basis.shape[-2:]))
    rank, tile = basis.shape[-1], launch.blocks["TILE"]
    coefficients = layer.empty(layer.tokens, rank, dtype=torch.float32)
    peaks = layer.empty(ceil_div(layer.tokens, tile), rank, dtype=torch.float32)
    project_kernel[layer.streams, peaks.shape[1]](
        *layer.source, matrix, coefficients, peaks, layer.tokens, layer.channels, rank, padded(layer.channels),
        padded(rank), **launch.options,
    )  # fmt: skip
    return coefficients, peaks
