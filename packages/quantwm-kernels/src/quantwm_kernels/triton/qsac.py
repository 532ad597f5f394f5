"""QSAC on a GPU: among the nearest centroids, the one whose residual is cheapest to quantize. See :mod:`quantwm_core.qsac`.

The pass that chooses sees every residual, so it also finds the largest range, of which the super-scale is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_core import affine as core_affine
from quantwm_core.errors import ParameterError, ShapeError
from quantwm_kernels.codebook import Metric
from quantwm_kernels.launch import LAUNCHES, on_device
from quantwm_kernels.qsac import choice_shape
from quantwm_kernels.triton import codebook
from quantwm_kernels.triton.arithmetic import magnitude_bits, scaled
from quantwm_kernels.triton.grid import NARROW, both_halves, range_of
from quantwm_kernels.triton.groups import group_sizes
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.layer import Pair, of_pair, rows_of

# Neighbouring channels that a thread holds, whose maximum needs no exchange.
LANES: tl.constexpr = tl.constexpr(8)


@triton.jit
def candidate(stored, candidates, rank, wanted, inside, channel, first, second, CHANNELS: tl.constexpr,
              SECOND: tl.constexpr):  # fmt: skip
    """Index and centroid of the candidate of a rank of every token, if that is wanted."""
    asked = rank < wanted
    index = tl.load(candidates + rank, mask=inside & asked, other=0)
    offset = index.to(tl.int32)[:, None, None] * CHANNELS
    near, far = both_halves(stored, offset, channel, first & asked, second & asked, SECOND)
    return index, near, far


@kernel(do_not_specialize=["tokens", "per_piece", "centroids", "ranks", "first_ranks", "second_ranks"])
def choose_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, found, first_stored, second_stored,
    sensitivity, exponent, first_index, second_index, largest, magnitudes, tokens, per_piece, centroids, ranks, first_ranks, second_ranks,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, GROUPS_2: tl.constexpr, GROUP_2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Chosen centroid of every token of a piece, and the largest range of a group that is left."""
    stream, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    HALF: tl.constexpr = GROUP_2 // 2 if GROUP_2 > NARROW else GROUP_2
    SECOND: tl.constexpr = GROUP_2 - HALF
    PARTS: tl.constexpr = HALF // min(HALF, LANES)
    group, lane = tl.arange(0, GROUPS_2)[None, :, None], tl.arange(0, HALF)[None, None, :]
    channel = group * GROUP + lane
    near, far = (channel < CHANNELS) & (lane < GROUP), (channel + SECOND < CHANNELS) & (lane + SECOND < GROUP)
    weight = group_weights(sensitivity + stream * CHANNELS, group, CHANNELS, GROUP, GROUP_2)
    shift = tl.load(exponent + stream)
    wanted = tl.where(stream < per_tensor, first_ranks, second_ranks)
    own = stream % per_tensor
    stored = of_pair(first_stored, second_stored, stream, per_tensor) + own * centroids * CHANNELS
    index = of_pair(first_index, second_index, stream, per_tensor) + own * tokens
    widest, highest = tl.zeros((TILE, GROUPS_2), tl.float32), tl.zeros((TILE, GROUPS_2, PARTS), tl.int32)
    for start in range(piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece), TILE):
        token = start + tl.arange(0, TILE)
        inside = token < tokens
        nearer, farther = inside[:, None, None] & near, inside[:, None, None] & far
        offset = token.to(tl.int64)[:, None, None] * token_stride
        left, right = both_halves(rows, offset, channel, nearer, farther, SECOND)
        left, right = left.to(tl.float32), right.to(tl.float32)
        bits = tl.maximum(magnitude_bits(left), magnitude_bits(right))
        highest = tl.maximum(highest, tl.max(tl.reshape(bits, (TILE, GROUPS_2, PARTS, HALF // PARTS)), axis=3))
        candidates = found + (stream * tokens + token) * ranks
        following, left_ahead, right_ahead = candidate(
            stored, candidates, 0, wanted, inside, channel, nearer, farther, CHANNELS, SECOND
        )
        best, cost, span = following, tl.full((TILE,), float("inf"), tl.float32), tl.zeros((TILE, GROUPS_2), tl.float32)
        for rank in range(wanted):  # asked for a candidate ahead, it has come in time
            other, left_centroid, right_centroid = following, left_ahead, right_ahead
            following, left_ahead, right_ahead = candidate(
                stored, candidates, rank + 1, wanted, inside, channel, nearer, farther, CHANNELS, SECOND
            )
            low, high = range_of(left - left_centroid.to(tl.float32), right - right_centroid.to(tl.float32))
            relative = scaled(high - low, -shift)
            other_cost = tl.sum(weight * (relative * relative), axis=1)
            better = (other_cost < cost) | (rank == 0)
            cost = tl.where(better, other_cost, cost)
            best = tl.where(better, other, best)
            span = tl.where(better[:, None], high - low, span)
        tl.store(index + token, best, mask=inside)
        widest = tl.maximum(widest, span)
    tl.store(largest + stream * tl.num_programs(1) + piece, tl.max(widest))
    tl.atomic_max(magnitudes + stream, tl.max(highest))


@triton.jit
def group_weights(sensitivity, group, CHANNELS: tl.constexpr, GROUP: tl.constexpr, GROUP_2: tl.constexpr):
    """``W_g`` of every group, FP32 ``[1, GROUPS_2]``."""
    lane = tl.arange(0, GROUP_2)[None, None, :]
    channel = group * GROUP + lane
    return tl.sum(tl.load(sensitivity + channel, mask=(channel < CHANNELS) & (lane < GROUP), other=0.0), axis=2)


def choose_layer(
    frame: codebook.Frame,
    found: Tensor,
    group_size: int,
    sensitivity: Tensor | None,
    first_ranks: int,
    second_ranks: int,
    magnitudes: Tensor | None = None,
) -> tuple[Pair, Tensor]:
    """Choose for all streams, among ``first_ranks`` centroids for the first tensor and ``second_ranks`` for the other.

    Args:
        frame: A refined codebook.
        found: uint8 ``[S, N, ranks]``, its nearest centroids.
        group_size: Channels per quantization group.
        sensitivity: FP32 ``[S, D]``; None only where there is one candidate.
        first_ranks, second_ranks: Candidates.
        magnitudes: int32 ``[S]``, raised to the bits of the largest magnitude of a stream, NaN above all.

    Returns:
        uint8 ``[streams of a tensor, N]`` indices of each tensor and FP32 ``[S, pieces]``, the largest ranges that are left.
    """
    layer, launch = frame.layer, LAUNCHES["choose_centroids"]
    per_piece, pieces = layer.split(launch)
    weights = frame.offset if sensitivity is None else sensitivity  # nothing is weighed, but memory must be there
    index, largest = layer.pair(layer.tokens, dtype=torch.uint8), layer.empty(pieces, dtype=torch.float32)
    magnitudes = layer.empty(dtype=torch.int32) if magnitudes is None else magnitudes
    choose_kernel[layer.streams, pieces](
        *layer.source, found, *frame.stored, weights, frame.exponent, *index, largest, magnitudes, layer.tokens, per_piece,
        frame.centroids, found.shape[-1], first_ranks, second_ranks, layer.channels, group_size,
        *group_sizes(layer.channels, group_size), **launch.options,
    )  # fmt: skip
    return index, largest


def choose(
    keys: Tensor,
    centroids: Tensor,
    group_size: int,
    sensitivity: Tensor,
    metric: Metric = None,
    candidates: int = 4,
) -> Tensor:
    """Centroid index of every key; see :func:`quantwm_kernels.qsac.choose`.

    Args:
        keys: BF16, FP16 or FP32 ``[*streams, tokens, channels]`` of any strides.
        centroids: Stored codebook, BF16.
        group_size: Channels per quantization group.
        sensitivity: Channel weights, FP32 ``[*streams, channels]``.
        metric: What "nearest" means.
        candidates: How many nearest centroids compete.

    Returns:
        uint8 ``[*streams, tokens]``.

    Raises:
        ParameterError, ShapeError, DtypeError: An argument does not fit.
        DeviceError: No kernel runs where the keys live.
    """
    core_affine.check_group_size(keys.shape[-1], group_size)
    if candidates < 1:
        raise ParameterError(f"{candidates} candidates: need at least 1")
    if sensitivity.shape != (*keys.shape[:-2], keys.shape[-1]):
        raise ShapeError(f"sensitivity {tuple(sensitivity.shape)} does not fit keys {tuple(keys.shape)}")
    count = min(candidates, centroids.shape[-2])
    with on_device(keys, "keys"):
        frame = codebook.framed(keys, centroids, metric)
        weights = sensitivity.to(torch.float32).reshape(frame.layer.streams, -1).contiguous()
        index, _ = choose_layer(frame, codebook.rank(frame, count, count), group_size, weights, count, count)
    return index[0].view(choice_shape(keys.shape))
