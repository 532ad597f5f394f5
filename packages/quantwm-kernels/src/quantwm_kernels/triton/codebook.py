"""k-means and nearest centroids on a GPU: assignment and update are matrix products, nothing is sorted, no two sums race.

What a metric is and what must come out stands in :mod:`quantwm_core.codebook`. A round is three launches for all
streams: the nearest centroid of every token; the sums of a piece of the tokens per centroid, a product with the one-hot
matrix of the index; and, in a fixed order, the sum of the pieces, which also prepares the next round
(:mod:`quantwm_kernels.triton.frame`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_core import codebook as core
from quantwm_core.errors import DtypeError, ParameterError, ShapeError
from quantwm_kernels.codebook import Metric, index_shape, table_shape
from quantwm_kernels.launch import LAUNCHES, on_device
from quantwm_kernels.triton.arithmetic import product, scaled
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.frame import DIAGONAL, FULL, UNIFORM, frame_kernel, magnitude_kernel, table_kernel
from quantwm_kernels.triton.layer import Layer, Pair, padded, rows_of

INDEX_BITS: tl.constexpr = tl.constexpr(core.MAX_CENTROIDS - 1)
DISTANCE_BITS: tl.constexpr = tl.constexpr(-core.MAX_CENTROIDS)
ABOVE_ALL: tl.constexpr = tl.constexpr(0x7FFFFFFF)
COUNT_COLUMNS: tl.constexpr = tl.constexpr(16)


@triton.jit
def weighted_block(weighted, centroids, start, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr):
    """Channels ``start`` and on of a weighted codebook, ``[BLOCK_K, BLOCK_C]``."""
    channel = start + tl.arange(0, BLOCK_K)[:, None]
    row = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < centroids) & (channel < CHANNELS)
    return tl.load(weighted + row * CHANNELS + channel, mask=inside, other=0.0)


@triton.jit
def token_block(rows, token, tokens, token_stride, start, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Channels ``start`` and on of a tile of tokens, ``[TILE, BLOCK_K]``."""
    channel = start + tl.arange(0, BLOCK_K)
    inside = (token[:, None] < tokens) & (channel[None, :] < CHANNELS)
    return tl.load(rows + token[:, None].to(tl.int64) * token_stride + channel[None, :], mask=inside, other=0.0)


@triton.jit
def into_frame(number, offset, shift, start, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tokens moved and scaled, FP32."""
    channel = start + tl.arange(0, BLOCK_K)
    middle = tl.load(offset + channel, mask=channel < CHANNELS, other=0.0)
    return scaled(number.to(tl.float32) - middle[None, :], -shift)


@triton.jit
def exact_product(centred, coarse, fine, scores):
    """Product of FP32 tokens and of a codebook in two BF16 parts, all but the smallest of four terms."""
    near = to_bf16(centred)
    rest = to_bf16(centred - near.to(tl.float32))
    scores = product(rest, coarse, scores)
    scores = product(near, fine, scores)
    return product(near, coarse, scores)


@triton.jit
def lowest(scores, column, BLOCK_C: tl.constexpr):
    """Smallest score of each row and its column, the first of several."""
    best = tl.min(scores, axis=1)
    found = tl.min(tl.where(scores == best[:, None], column, BLOCK_C), axis=1)
    return best, found


@triton.jit(do_not_specialize=["tokens", "centroids", "per_piece"])
def assign_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, offset, exponent, high, bias, index,
    tokens, centroids, per_piece,
    CENTRED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Nearest centroid of every token of a piece, as close as one BF16 product tells."""
    stream, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    column = tl.arange(0, BLOCK_C)[None, :]
    constant = tl.load(bias + stream * centroids + column, mask=column < centroids, other=float("inf"))
    own = high + stream * centroids * CHANNELS
    middle = offset + stream * CHANNELS
    shift = tl.load(exponent + stream)
    if BLOCK_K == BLOCK_D:
        resident = weighted_block(own, centroids, 0, CHANNELS, BLOCK_C, BLOCK_K)
    for start in range(piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece), TILE):
        token = start + tl.arange(0, TILE)
        scores = tl.zeros((TILE, BLOCK_C), tl.float32)
        if BLOCK_K == BLOCK_D:
            number = token_block(rows, token, tokens, token_stride, 0, CHANNELS, BLOCK_K)
            if CENTRED:
                number = to_bf16(into_frame(number, middle, shift, 0, CHANNELS, BLOCK_K))
            scores = product(number, resident, scores)
        else:
            for begin in range(0, BLOCK_D, BLOCK_K):
                number = token_block(rows, token, tokens, token_stride, begin, CHANNELS, BLOCK_K)
                if CENTRED:
                    number = to_bf16(into_frame(number, middle, shift, begin, CHANNELS, BLOCK_K))
                block = weighted_block(own, centroids, begin, CHANNELS, BLOCK_C, BLOCK_K)
                scores = product(number, block, scores)
        _, found = lowest(scores + constant, column, BLOCK_C)
        place = index + stream * tokens + token
        tl.store(place, tl.minimum(found, centroids - 1).to(tl.uint8), mask=token < tokens)


@triton.jit(do_not_specialize=["tokens", "centroids", "per_piece"])
def sum_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, index, sums, counts, tokens, centroids,
    per_piece,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum and number of a piece's tokens for each of a block of centroids; FP32 tokens as a sum of BF16 parts."""
    stream, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    row = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    count = tl.zeros((BLOCK_C, COUNT_COLUMNS), tl.float32)
    one = tl.full((TILE, COUNT_COLUMNS), 1.0, tl.float32).to(tl.bfloat16)
    for start in range(piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece), TILE):
        token = start + tl.arange(0, TILE)
        inside = token < tokens
        nearest = tl.load(index + stream * tokens + token, mask=inside, other=0).to(tl.int32)
        nearest = tl.where(inside, nearest, -1)
        member = (row[:, None] == nearest[None, :]).to(tl.float32).to(tl.bfloat16)
        place = token[:, None].to(tl.int64) * token_stride + channel[None, :]
        number = tl.load(rows + place, mask=inside[:, None] & (channel[None, :] < CHANNELS), other=0.0)
        if PARTS == 1:
            total = product(member, number, total)
        else:
            rest = number.to(tl.float32)
            for _ in tl.static_range(PARTS):
                part = to_bf16(rest)
                total = product(member, part, total)
                rest -= part.to(tl.float32)
        count = product(member, one, count)
    part = (stream * tl.num_programs(1) + piece) * centroids
    inside = (row[:, None] < centroids) & (channel[None, :] < CHANNELS)
    tl.store(sums + (part + row[:, None]) * CHANNELS + channel[None, :], total, mask=inside)
    number = tl.sum(tl.where(tl.arange(0, COUNT_COLUMNS)[None, :] == 0, count, 0.0), axis=1)
    tl.store(counts + part + row, number, mask=row < centroids)


@triton.jit(do_not_specialize=["tokens", "centroids", "per_piece", "first_ranks", "second_ranks"])
def nearest_kernel(
    first, second, per_tensor, heads, batch_stride, head_stride, token_stride, offset, exponent, high, low, bias,
    found, tokens, centroids, per_piece, first_ranks, second_ranks, ranks,
    CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The nearest centroids of every token of a piece, exact but for roundings of FP32.

    Further ranks are told apart by how much farther they are than the nearest, 16 bits of it, and by their column.
    """
    stream, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = rows_of(first, second, stream, per_tensor, heads, batch_stride, head_stride)
    column = tl.arange(0, BLOCK_C)[None, :]
    constant = tl.load(bias + stream * centroids + column, mask=column < centroids, other=float("inf"))
    coarse_rows, fine_rows = high + stream * centroids * CHANNELS, low + stream * centroids * CHANNELS
    middle = offset + stream * CHANNELS
    shift = tl.load(exponent + stream)
    if BLOCK_K == BLOCK_D:
        coarse = weighted_block(coarse_rows, centroids, 0, CHANNELS, BLOCK_C, BLOCK_K)
        fine = weighted_block(fine_rows, centroids, 0, CHANNELS, BLOCK_C, BLOCK_K)
    wanted = tl.where(stream < per_tensor, first_ranks, second_ranks)
    for start in range(piece * per_piece, tl.minimum(tokens, (piece + 1) * per_piece), TILE):
        token = start + tl.arange(0, TILE)
        scores = tl.zeros((TILE, BLOCK_C), tl.float32)
        if BLOCK_K == BLOCK_D:
            number = token_block(rows, token, tokens, token_stride, 0, CHANNELS, BLOCK_K)
            centred = into_frame(number, middle, shift, 0, CHANNELS, BLOCK_K)
            scores = exact_product(centred, coarse, fine, scores)
        else:
            for begin in range(0, BLOCK_D, BLOCK_K):
                number = token_block(rows, token, tokens, token_stride, begin, CHANNELS, BLOCK_K)
                centred = into_frame(number, middle, shift, begin, CHANNELS, BLOCK_K)
                coarse_block = weighted_block(coarse_rows, centroids, begin, CHANNELS, BLOCK_C, BLOCK_K)
                fine_block = weighted_block(fine_rows, centroids, begin, CHANNELS, BLOCK_C, BLOCK_K)
                scores = exact_product(centred, coarse_block, fine_block, scores)
        scores += constant
        best, rank = lowest(scores, column, BLOCK_C)
        place = found + (stream * tokens + token) * ranks
        tl.store(place, tl.minimum(rank, centroids - 1).to(tl.uint8), mask=token < tokens)
        if wanted > 1:
            farther = (scores - best[:, None]).to(tl.int32, bitcast=True)
            key = tl.where(column == rank[:, None], -1, (farther & DISTANCE_BITS) | column)
            last = tl.full((TILE,), -1, tl.int32)
            for number_of in range(1, wanted):
                last = tl.min(tl.where(key > last[:, None], key, ABOVE_ALL), axis=1)
                rank = tl.minimum(last & INDEX_BITS, centroids - 1)
                tl.store(place + number_of, rank.to(tl.uint8), mask=token < tokens)


@dataclass(frozen=True)
class Frame:
    """Codebooks of a batch of streams while they are made; see :mod:`quantwm_kernels.triton.frame`.

    Attributes:
        layer: The streams.
        metric: None, FP32 ``[S, D]`` or ``[S, D, D]``.
        table: FP32 ``[S, C, D]``.
        offset, exponent: FP32 ``[S, D]`` and int32 ``[S]``.
        largest: int32 ``[S]``, bits of the largest magnitude of the tokens, above infinity's where one is no number.
        high, low: BF16 ``[S, C, D]``, minus twice the weighted centroids.
        bias: FP32 ``[S, C]``.
        stored: BF16 ``[streams of a tensor, C, D]`` of each tensor, the codebooks that are kept.
    """

    layer: Layer
    metric: Tensor | None
    table: Tensor
    offset: Tensor
    exponent: Tensor
    largest: Tensor
    high: Tensor
    low: Tensor
    bias: Tensor
    stored: Pair

    @property
    def centroids(self) -> int:
        """Rows of a codebook."""
        return self.table.shape[1]

    @property
    def rounds_are_centred(self) -> bool:
        """Whether k-means moves the tokens too: what is BF16 already need not be rounded again."""
        return self.layer.first.dtype is not torch.bfloat16


def magnitudes_of(layer: Layer) -> Tensor:
    """Largest magnitude in each piece of a stream, int32 bits ``[S, pieces]``, NaN above all."""
    launch = LAUNCHES["magnitude"]
    per_piece, pieces = layer.split(launch)
    magnitudes = layer.empty(pieces, dtype=torch.int32)
    magnitude_kernel[layer.streams, pieces](
        *layer.source, magnitudes, layer.tokens, per_piece, layer.channels, padded(layer.channels), **launch.options
    )
    return magnitudes


def begin(
    layer: Layer, centroids: int, metric: Tensor | None, initial: Tensor | None, largest: Tensor | None = None
) -> Frame:
    """Bring a codebook of ``[S, centroids, D]``, given or made of tokens, and its streams into a frame.

    ``largest`` is memory for the frame's field of that name.
    """
    channels = layer.channels
    table = layer.empty(centroids, channels, dtype=torch.float32)
    if initial is not None:
        table.copy_(initial)
    frame = Frame(
        layer,
        metric,
        table,
        layer.empty(channels, dtype=torch.float32),
        layer.empty(dtype=torch.int32),
        layer.empty(dtype=torch.int32) if largest is None else largest,
        layer.empty(centroids, channels, dtype=torch.bfloat16),
        layer.empty(centroids, channels, dtype=torch.bfloat16),
        layer.empty(centroids, dtype=torch.float32),
        layer.pair(centroids, channels, dtype=torch.bfloat16),
    )
    magnitudes, wide = magnitudes_of(layer), padded(channels)
    pieces, launch = magnitudes.shape[1], LAUNCHES["frame"]
    frame_kernel[layer.streams,](
        *layer.source, magnitudes, table, frame.offset, frame.exponent, frame.largest, layer.tokens, centroids, pieces,
        initial is None, channels, wide, PIECES=padded(pieces, 1), **launch.options,
    )  # fmt: skip
    return frame


def refine(frame: Frame, iterations: int) -> None:
    """Rounds of k-means; ends with the stored codebook, prepared for :func:`rank`."""
    if iterations == 0:
        _prepare(frame, None, final=True)
        return
    _prepare(frame, None, final=False)
    layer = frame.layer
    launch = LAUNCHES["sum_members"]
    blocks = triton.cdiv(frame.centroids, launch.blocks["BLOCK_C"])
    per_piece, pieces = layer.split(launch, layer.streams * blocks)
    index = layer.empty(layer.tokens, dtype=torch.uint8)
    sums = layer.empty(pieces, frame.centroids, layer.channels, dtype=torch.float32)
    counts = layer.empty(pieces, frame.centroids, dtype=torch.float32)
    wide = padded(layer.channels)
    parts = 3 if layer.first.dtype is torch.float32 else 2 if layer.first.dtype is torch.float16 else 1
    for iteration in range(iterations):
        _assign(frame, index)
        sum_kernel[layer.streams, pieces, blocks](
            *layer.source, index, sums, counts, layer.tokens, frame.centroids, per_piece, parts, layer.channels, wide,
            **launch.options,
        )  # fmt: skip
        _prepare(frame, (sums, counts), final=iteration == iterations - 1)


def rank(frame: Frame, first_ranks: int, second_ranks: int) -> Tensor:
    """Indices of the nearest stored centroids, uint8 ``[S, N, ranks]``; ranks beyond a tensor's own are not written."""
    layer, launch = frame.layer, LAUNCHES["rank_centroids"]
    ranks = max(first_ranks, second_ranks)
    found = layer.empty(layer.tokens, ranks, dtype=torch.uint8)
    per_piece, pieces = layer.split(launch)
    wide = padded(layer.channels)
    options = {**launch.options, "BLOCK_K": min(wide, launch.blocks["BLOCK_K"])}
    nearest_kernel[layer.streams, pieces](
        *layer.source, frame.offset, frame.exponent, frame.high, frame.low, frame.bias, found, layer.tokens,
        frame.centroids, per_piece, first_ranks, second_ranks, ranks, layer.channels, wide, padded(frame.centroids),
        **options,
    )  # fmt: skip
    return found


def fit(
    values: Tensor, centroids: int, metric: Metric = None, iterations: int = 10, initial: Tensor | None = None
) -> Tensor:
    """Lloyd's algorithm, all streams side by side; see :func:`quantwm_kernels.codebook.fit`.

    Args:
        values: BF16, FP16 or FP32 ``[*streams, tokens, channels]`` of any strides.
        centroids: Codebook size, 1 to 256; at most ``tokens`` rows are made.
        metric: None, FP32 ``[*streams, channels]`` or ``[*streams, channels, channels]``.
        iterations: Rounds of assignment and update, at least 0.
        initial: Warm start, ``[*streams, min(centroids, tokens), channels]``.

    Returns:
        BF16 ``[*streams, min(centroids, tokens), channels]``.

    Raises:
        ParameterError, ShapeError, DtypeError: An argument does not fit.
        DeviceError: No kernel runs where the values live.
    """
    core.check_size(centroids)
    if iterations < 0:
        raise ParameterError(f"{iterations} iterations: need 0 or more")
    layer, shape = Layer.of(values), table_shape(values.shape, centroids)
    if initial is not None and tuple(initial.shape) != shape:
        raise ShapeError(f"initial centroids: got shape {tuple(initial.shape)}, need {shape}")
    start = None if initial is None else initial.reshape(layer.streams, *shape[-2:])
    with on_device(values, "values"):
        frame = begin(layer, shape[-2], _flat_metric(metric, values), start)
        refine(frame, iterations)
    return frame.stored[0].view(shape)


def nearest(values: Tensor, centroids: Tensor, metric: Metric = None, count: int = 1) -> Tensor:
    """The ``count`` nearest centroids of every token; see :func:`quantwm_kernels.codebook.nearest`.

    Args:
        values: BF16, FP16 or FP32 ``[*streams, tokens, channels]`` of any strides.
        centroids: BF16 ``[*streams, centroids, channels]``, a stored codebook.
        metric: As for :func:`fit`.
        count: Centroids per token.

    Returns:
        int64 ``[*streams, tokens, count]``, nearest first, ties to the lowest index.

    Raises:
        ParameterError, ShapeError, DtypeError: An argument does not fit.
        DeviceError: No kernel runs where the values live.
    """
    size = centroids.shape[-2]
    if not 1 <= count <= size:
        raise ParameterError(f"{count} nearest of {size} centroids: need 1 to {size}")
    with on_device(values, "values"):
        found = rank(framed(values, centroids, metric), count, count)
    return found.view(index_shape(values.shape, count)).long()


def framed(values: Tensor, centroids: Tensor, metric: Metric) -> Frame:
    """A stored codebook of ``[*streams, C, D]``, ready for :func:`rank`.

    Raises:
        ParameterError, ShapeError, DtypeError: An argument does not fit.
    """
    size = centroids.shape[-2]
    core.check_size(size)
    if centroids.shape[:-2] != values.shape[:-2] or centroids.shape[-1] != values.shape[-1]:
        raise ShapeError(f"values {tuple(values.shape)} and centroids {tuple(centroids.shape)} do not fit")
    layer = Layer.of(values)
    frame = begin(layer, size, _flat_metric(metric, values), centroids.reshape(layer.streams, size, -1))
    refine(frame, 0)
    return frame


def _flat_metric(metric: Metric, values: Tensor) -> Tensor | None:
    """Metric with one axis of streams."""
    if metric is None:
        return None
    streams, channels = values.shape[:-2], values.shape[-1]
    if tuple(metric.shape) not in ((*streams, channels), (*streams, channels, channels)):
        raise ShapeError(f"metric {tuple(metric.shape)} does not fit values {tuple(values.shape)}")
    if metric.dtype is not torch.float32:
        raise DtypeError(f"metric: got {metric.dtype}, need torch.float32")
    return metric.reshape(-1, *metric.shape[len(streams) :]).contiguous()


def _assign(frame: Frame, index: Tensor) -> None:
    """Nearest centroid of every token into uint8 ``[S, N]``."""
    layer, launch = frame.layer, LAUNCHES["assign_centroids"]
    per_piece, pieces = layer.split(launch)
    wide = padded(layer.channels)
    options = {**launch.options, "BLOCK_K": min(wide, launch.blocks["BLOCK_K"])}
    assign_kernel[layer.streams, pieces](
        *layer.source, frame.offset, frame.exponent, frame.high, frame.bias, index, layer.tokens, frame.centroids,
        per_piece, frame.rounds_are_centred, layer.channels, wide, padded(frame.centroids), **options,
    )  # fmt: skip


def _prepare(frame: Frame, update: tuple[Tensor, Tensor] | None, *, final: bool) -> None:
    """New centroids from sums and counts, and what the next assignment takes."""
    metric = frame.metric
    kind = UNIFORM if metric is None else DIAGONAL if metric.ndim == 2 else FULL
    if kind is FULL and update is not None:  # a full metric reads whole rows, so they must stand in memory first
        _table(frame, update, UNIFORM, final=False)
        update = None
    _table(frame, update, kind, final=final)


def _table(frame: Frame, update: tuple[Tensor, Tensor] | None, kind: tl.constexpr, *, final: bool) -> None:
    launch, channels = LAUNCHES["prepare_centroids"], frame.layer.channels
    sums, counts = (frame.table, frame.bias) if update is None else update
    pieces = 0 if update is None else sums.shape[1]
    wide = padded(channels)
    table_kernel[frame.layer.streams, triton.cdiv(frame.centroids, launch.blocks["ROWS"])](
        frame.table, frame.offset, frame.exponent, frame.table if frame.metric is None else frame.metric, sums, counts,
        frame.high, frame.low, frame.bias, *frame.stored, frame.layer.per_tensor, frame.centroids, pieces, update is not None, final,
        kind.value, final or frame.rounds_are_centred, channels, wide, BLOCK_K=min(wide, 32), **launch.options,
    )  # fmt: skip
