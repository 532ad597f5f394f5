"""Second moments of queries on a GPU, and what is read off them; see :mod:`quantwm_core.statistics`.

Products of BF16 are exact, sums are FP32. Every tile of tokens is divided by the number of queries before it is added, so
that nothing overflows that the mean itself does not. Pieces of the tokens are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from quantwm_core import statistics as core
from quantwm_core.errors import DeviceError, ParameterError, ShapeError
from quantwm_kernels.launch import LAUNCHES, ceil_div, next_power_of_two, on_device, processors, ranks
from quantwm_kernels.statistics import QueryMoment, basis_shapes, moment_shape
from quantwm_kernels.triton.arithmetic import magnitude_bits, product
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.layer import padded
from quantwm_kernels.triton.principal import principal_kernel

KEPT = 128
"""Head dimension up to which a moment stays in fast memory while its principal directions are found."""


@kernel(do_not_specialize=["tokens", "per_piece", "share"])
def moment_kernel(
    queries, parts, batch_stride, head_stride, token_stride, channel_stride, kv_heads, pooled, tokens, per_piece, share,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One block of the moment of a piece of a head's queries; blocks below the diagonal mirror those above."""
    stream, piece, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    left = pair // BLOCKS
    right = pair % BLOCKS
    if right >= left:
        row, column = left * BLOCK + tl.arange(0, BLOCK), right * BLOCK + tl.arange(0, BLOCK)
        batch, head = stream // kv_heads, stream % kv_heads
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for start in range(piece * per_piece, tl.minimum(tokens * pooled, (piece + 1) * per_piece), TILE):
            query = start + tl.arange(0, TILE)
            token = (query % tokens).to(tl.int64)
            place = batch.to(tl.int64) * batch_stride + token * token_stride
            place += (head * pooled + query // tokens).to(tl.int64) * head_stride
            inside = (query < tokens * pooled)[:, None]
            source = queries + place[:, None]
            near = tl.load(source + row[None, :] * channel_stride, mask=inside & (row < CHANNELS)[None, :], other=0.0)
            near = to_bf16(near.to(tl.float32))
            far = near
            if BLOCKS > 1:
                known = inside & (column < CHANNELS)[None, :]
                far = tl.load(source + column[None, :] * channel_stride, mask=known, other=0.0)
                far = to_bf16(far.to(tl.float32))
            total += product(tl.trans(near), far, tl.zeros((BLOCK, BLOCK), tl.float32)) * share
        own = parts + (stream * tl.num_programs(1) + piece).to(tl.int64) * CHANNELS * CHANNELS
        inside = (row < CHANNELS)[:, None] & (column < CHANNELS)[None, :]
        tl.store(own + row[:, None] * CHANNELS + column[None, :], total, mask=inside)
        if right > left:
            tl.store(own + column[None, :] * CHANNELS + row[:, None], total, mask=inside)


@kernel(do_not_specialize=["pieces", "size", "share"])
def add_kernel(parts, before, mean, pieces, size, share, FOLD: tl.constexpr, BLOCK: tl.constexpr):
    """Add the pieces of a stream, in order, and fold the sum into the mean of before, of which it replaces a share."""
    stream = tl.program_id(0).to(tl.int64)
    cell = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        total += tl.load(parts + (stream * pieces + piece) * size + cell, mask=cell < size, other=0.0)
    if FOLD:
        older = tl.load(before + stream * size + cell, mask=cell < size, other=0.0)
        total = tl.where(share < 0.5, older + share * (total - older), total - (total - older) * (1 - share))
    tl.store(mean + stream * size + cell, total, mask=cell < size)


@kernel()
def sensitivity_kernel(mean, weights, largest, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Diagonal over its average; summed in FP64, because the sum of 256 squares of 2**60 passes FP32's range."""
    stream = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    own = mean + stream * CHANNELS * CHANNELS
    diagonal = tl.load(own + channel * (CHANNELS + 1), mask=inside, other=0.0)
    average = (tl.sum(diagonal.to(tl.float64)) / CHANNELS).to(tl.float32)
    tl.store(largest + stream, tl.max(magnitude_bits(diagonal)))
    known = average > 0
    divisor = tl.where(known, average, 1.0) + tl.zeros((BLOCK,), tl.float32)
    tl.store(weights + stream * CHANNELS + channel, tl.where(known, tl.div_rn(diagonal, divisor), 1.0), mask=inside)


def second_moment(queries: Tensor, kv_heads: int, before: QueryMoment | None = None) -> QueryMoment:
    """Second moment of one attention call's queries; see :func:`quantwm_kernels.statistics.second_moment`.

    Nothing is checked that only the device knows: a query that is no number shows in the moment, and a unit that is sealed
    with such a moment is refused.

    Args:
        queries: BF16, FP16 or FP32 ``[B, Hq, T, D]`` of any strides.
        kv_heads: KV heads.
        before: Of queries that are counted, too.

    Raises:
        ShapeError: The query heads are not a multiple of the KV heads, there is no query, or ``before`` is of others.
        DeviceError: No kernel runs where the queries live, or ``before`` lives elsewhere.
    """
    if queries.ndim != 4 or queries.numel() == 0 or kv_heads < 1 or queries.shape[1] % kv_heads:
        raise ShapeError(f"queries: got {tuple(queries.shape)}, need [B, multiple of {kv_heads}, T, D], not empty")
    batch, heads, tokens, channels = queries.shape
    pooled = heads // kv_heads
    launch, streams = LAUNCHES["second_moment"], batch * kv_heads
    programs = launch.programs * processors(queries.device)
    block, blocks, per_piece = _split(pooled * tokens, channels, ranks() * streams, launch.blocks["TILE"], programs)
    pieces = ceil_div(pooled * tokens, per_piece)
    shape, strides = queries.shape, queries.stride()
    parts = torch.empty((streams, pieces, channels, channels), dtype=torch.float32, device=queries.device)
    with on_device(queries, "queries"):
        moment_kernel.repeat(
            (shape, strides, kv_heads, per_piece),
            (queries, parts),
            launch.options,
            lambda: (
                (streams, pieces, blocks * blocks),
                (*strides, kv_heads, pooled, tokens, per_piece, 1.0 / (pooled * tokens)),
                {"CHANNELS": channels, "BLOCK": block, "BLOCKS": blocks},
            ),
        )
        counted = QueryMoment(parts, pooled * tokens)
        if pieces == 1 and before is None:
            return counted._replace(mean=parts.view(moment_shape(shape, kv_heads)))
        return _added(counted, pieces, moment_shape(shape, kv_heads), before)


@lru_cache(maxsize=256)
def _split(queries: int, channels: int, streams: int, tile: int, programs: int) -> tuple[int, int, int]:
    """Channels of a block, blocks of them, and queries of a piece, of which all streams have so many that ``programs`` are busy."""
    block = min(max(16, next_power_of_two(channels)), 128)
    blocks, tiles = ceil_div(channels, block), ceil_div(queries, tile)
    wanted = programs // (streams * blocks * (blocks + 1) // 2)
    return block, blocks, ceil_div(tiles, max(1, min(tiles, wanted))) * tile


def merge(first: QueryMoment, second: QueryMoment, decay: float | None = None) -> QueryMoment:
    """Moment of two sets of queries together; see :func:`quantwm_kernels.statistics.merge`.

    Raises:
        ShapeError, ParameterError: The moments do not fit, or the decay is out of range.
        DeviceError: No kernel runs where they live, or they live on two devices.
    """
    core.check_decay(decay)
    with on_device(second.mean, "query moment"):
        return _added(second._replace(mean=second.mean.contiguous()), 1, second.mean.shape, first, decay)


def _added(
    parts: QueryMoment, pieces: int, shape: Sequence[int], before: QueryMoment | None, decay: float | None = None
) -> QueryMoment:
    """Add the pieces of a moment ``[*shape]``, each contiguous for each stream, and what was counted before."""
    channels, adder = shape[-1], LAUNCHES["add_moments"]
    mean = torch.empty(shape, dtype=torch.float32, device=parts.mean.device)
    older, queries, share = mean, parts.queries, 1.0
    if before is not None:
        if before.mean.device != mean.device:
            raise DeviceError(f"query moments on {before.mean.device} and {mean.device}; move one to the other")
        if before.mean.shape != mean.shape:
            raise ShapeError(
                f"query moments: got shapes {tuple(before.mean.shape)} and {tuple(shape)}, need equal ones"
            )
        older, queries = before.mean.contiguous(), before.queries + parts.queries
        share = parts.queries / queries if decay is None else 1 - decay
    size, fold = channels * channels, before is not None
    add_kernel.repeat(
        (mean.shape, fold),
        (parts.mean, older, mean, pieces, size, share),
        adder.options,
        lambda: ((mean.numel() // size, ceil_div(size, adder.blocks["BLOCK"])), (), {"FOLD": fold}),
    )
    return QueryMoment(mean, queries)


def sensitivity(mean: Tensor) -> Tensor:
    """Channel weights ``w_j = M_jj / mean_j M_jj`` of FP32 ``[*streams, D, D]``; all ones where ``M`` is zero."""
    channels = mean.shape[-1]
    weights = torch.empty(mean.shape[:-1], dtype=torch.float32, device=mean.device)
    with on_device(mean, "query moment"):
        largest = torch.empty(weights.shape[:-1].numel(), dtype=torch.int32, device=mean.device)
        write_sensitivity(mean.contiguous(), weights.view(-1, channels), largest)
    return weights


def write_sensitivity(mean: Tensor, weights: Tensor, largest: Tensor) -> None:
    """Write what contiguous moments ``[.., D, D]`` say about channels.

    Args:
        mean: FP32 moments.
        weights: FP32 ``[S, D]``, contiguous, written.
        largest: int32 ``[S]``, written: bits of the largest diagonal magnitude, above infinity's where one is no number.
    """
    channels = mean.shape[-1]
    block = next_power_of_two(channels)
    sensitivity_kernel[len(weights),](mean, weights, largest, channels, block, **LAUNCHES["sensitivity"].options)


def normalised(mean: Tensor) -> Tensor:
    """``M / mean_j M_jj``; the identity where ``M`` is zero."""
    average = mean.diagonal(dim1=-2, dim2=-1).double().mean(-1).float()[..., None, None]
    identity = torch.eye(mean.shape[-1], dtype=torch.float32, device=mean.device)
    return torch.where(average > 0, mean / torch.where(average > 0, average, 1.0), identity)


def principal_basis(mean: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Principal directions of ``M``; see :func:`quantwm_kernels.statistics.principal_basis`. Nothing is waited for.

    A direction without energy, in which no query ever pointed, is zero, and so are all of a moment that is no number.

    Args:
        mean: FP32 ``[*streams, D, D]``, symmetric.
        rank: Directions, 1 to ``D``.

    Raises:
        ParameterError: ``rank`` is out of range.
        DeviceError: No kernel runs where the moment lives.
    """
    channels = mean.shape[-1]
    if not 1 <= rank <= channels:
        raise ParameterError(f"rank {rank}: need 1 to {channels}, the head dimension")
    shapes = basis_shapes(mean.shape, rank)
    basis = torch.empty(shapes[0], dtype=torch.bfloat16, device=mean.device)
    energies = torch.empty(shapes[1], dtype=torch.float32, device=mean.device)
    streams, wide = energies.numel() // rank, padded(channels)
    width = min(wide, padded(2 * rank))
    block = torch.empty((streams, wide, width), dtype=torch.float32, device=mean.device)
    options = LAUNCHES["principal_basis" + ("_wide" if wide > KEPT else "_128" if wide == KEPT else "")].options
    options["BLOCK_K"] = min(options["BLOCK_K"], wide)  # rows of the block that are read at once are its own
    with on_device(mean, "query moment"):
        principal_kernel[streams,](
            mean.contiguous(),
            block,
            basis,
            energies,
            channels,
            rank,
            wide,
            width,
            **options,
        )
    return basis, energies
