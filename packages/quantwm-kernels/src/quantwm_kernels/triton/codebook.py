"""k-means and nearest centroids on a GPU: assignment and update are matrix products, nothing is sorted, no two sums race.

What a metric is and what must come out stands in :mod:`quantwm_core.codebook`. A round is three launches for all
streams: the nearest centroid of every token; the sums of a piece of the tokens per centroid, a product with the one-hot
matrix of the index; and, in a fixed order, the sum of the pieces, which also prepares the next round
(:mod:`quantwm_kernels.triton.frame`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor

from quantwm_core import codebook as core
from quantwm_core.errors import DtypeError, ParameterError, ShapeError
from quantwm_core.integer_table import EXACT_BITS
from quantwm_kernels.codebook import Metric, index_shape, table_shape
from quantwm_kernels.launch import LAUNCHES, Launch, ceil_div, on_device, ranks, shared_memory
from quantwm_kernels.triton import integer_table
from quantwm_kernels.triton.assignment import RANKS_PER_WORD, assign_kernel, nearest_kernel, sum_kernel
from quantwm_kernels.triton.frame import DIAGONAL, FULL, UNIFORM, frame_kernel, magnitude_kernel, table_kernel
from quantwm_kernels.triton.layer import Layer, Pair, padded

WIDE = 128
"""Head dimension beyond which launches have entries of their own."""
SPARE_BYTES = 2048
BF16_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""How many BF16 numbers add up to one of another format."""

Step = Callable[[], object]
"""A launch, to be made again."""


@dataclass(frozen=True)
class Frame:
    """Codebooks of a batch of streams while they are made; see :mod:`quantwm_kernels.triton.frame`.

    Attributes:
        layer: The streams.
        metric: None, FP32 ``[S, D]`` or ``[S, D, D]``.
        table: FP32 ``[S, C, D]``.
        offset, exponent: FP32 ``[S, D]`` and int32 ``[S]``.
        products: int32 ``[S]``, how many products of BF16 rank a stream.
        high, low: BF16 ``[S, C, D]``, minus twice the weighted centroids.
        bias: FP32 ``[S, C]``.
        stored: BF16 ``[streams of a tensor, C, D]`` of each tensor, the codebooks that are kept.
    """

    layer: Layer
    metric: Tensor | None
    table: Tensor
    offset: Tensor
    exponent: Tensor
    products: Tensor
    high: Tensor
    low: Tensor
    bias: Tensor
    stored: Pair

    @property
    def centroids(self) -> int:
        """Rows of a codebook."""
        return self.table.shape[1]

    @property
    def kind(self) -> tl.constexpr:
        """What kind of metric it is."""
        return UNIFORM if self.metric is None else DIAGONAL if self.metric.ndim == 2 else FULL

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


def begin(layer: Layer, centroids: int, metric: Tensor | None, initial: Tensor | None) -> Frame:
    """Bring a codebook of ``[S, centroids, D]``, given or made of tokens, and its streams into a frame."""
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
        layer.empty(dtype=torch.int32),
        layer.empty(centroids, channels, dtype=torch.bfloat16),
        layer.empty(centroids, channels, dtype=torch.bfloat16),
        layer.empty(centroids, dtype=torch.float32),
        layer.pair(centroids, channels, dtype=torch.bfloat16),
    )
    frame_kernel[layer.streams,](
        *layer.source, table, table if metric is None else metric, frame.offset, frame.exponent, frame.products, layer.tokens,
        centroids, initial is None, frame.kind.value, channels, padded(channels), **LAUNCHES["frame"].options,
    )  # fmt: skip
    return frame


def refine(
    frame: Frame, iterations: int, bits: int = EXACT_BITS, relaxation: float = 1.0
) -> tuple[Tensor, Tensor] | None:
    """Rounds of k-means, over-relaxed but for the last; ends with the codebook as it will be decoded, prepared for :func:`rank`.

    Returns:
        Integer codes and scales of all streams where an entry has fewer than 16 ``bits``; see
        :func:`quantwm_kernels.triton.integer_table.encode`.
    """
    exact = bits == EXACT_BITS
    prepare(frame, None, final=exact and iterations == 0)
    if iterations:
        index = frame.layer.empty(frame.layer.tokens, dtype=torch.uint8)
        steps = [assign(frame, index)]
        update, added = add_members(frame, index)
        steps.append(added)
        if iterations > 1:  # what is launched again need not be looked at again
            steps = [*prepare(frame, update, final=False, relaxation=relaxation), *steps]
            for step in steps[-2:] + steps * (iterations - 2):
                step()
        prepare(frame, update, final=exact)
    if exact:
        return None
    codes, scales = integer_table.encode(frame.table, bits)
    frame.table.copy_(integer_table.decode(codes, scales))
    prepare(frame, None, final=True)
    return codes, scales


def assign(frame: Frame, index: Tensor) -> Step:
    """Nearest centroid of every token, as a round of k-means needs it, into uint8 ``[S, N]``."""
    layer, launch = frame.layer, _table_launch("assign_centroids", frame, tables=1)
    per_piece, pieces = layer.split(launch)
    return assign_kernel[layer.streams, pieces](
        *layer.source, frame.offset, frame.exponent, frame.high, frame.bias, index, layer.tokens,
        frame.centroids, per_piece, frame.rounds_are_centred, layer.channels, padded(layer.channels),
        padded(frame.centroids), **launch.options,
    )  # fmt: skip


def add_members(frame: Frame, index: Tensor) -> tuple[tuple[Tensor, Tensor], Step]:
    """Sums ``[S, pieces, C, D]`` and numbers ``[S, pieces, C]`` of the tokens of every centroid, FP32."""
    layer, wide = frame.layer, padded(frame.layer.channels)
    launch = _blocked(LAUNCHES["sum_members" + _wide(layer)], wide)
    channel_blocks = wide // launch.blocks["BLOCK_K"]
    blocks = ceil_div(frame.centroids, launch.blocks["BLOCK_C"]) * channel_blocks
    per_piece, pieces = layer.split(launch, layer.streams * blocks * ranks())
    sums = layer.empty(pieces, frame.centroids, layer.channels, dtype=torch.float32)
    counts = layer.empty(pieces, frame.centroids, dtype=torch.float32)
    step = sum_kernel[layer.streams, pieces, blocks](
        *layer.source, index, sums, counts, layer.tokens, frame.centroids, per_piece,
        BF16_PARTS[layer.first.dtype], layer.channels, channel_blocks, **launch.options,
    )  # fmt: skip
    return (sums, counts), step


def prepare(frame: Frame, update: tuple[Tensor, Tensor] | None, *, final: bool, relaxation: float = 1.0) -> list[Step]:
    """New centroids from sums and counts, and what the next assignment takes."""
    kind = frame.kind
    if kind is FULL and update is not None:  # a full metric reads whole rows, so they must stand in memory first
        moved = _table(frame, update, UNIFORM, final=False, relaxation=relaxation)
        return [moved, _table(frame, None, kind, final=final)]
    return [_table(frame, update, kind, final=final, relaxation=relaxation)]


def rank(frame: Frame, first_ranks: int, second_ranks: int) -> Tensor:
    """Indices of the nearest stored centroids, uint8 ``[S, N, ranks]``; ranks beyond a tensor's own mean nothing."""
    layer, launch = frame.layer, _table_launch("rank_centroids", frame, tables=2)
    words = ceil_div(max(first_ranks, second_ranks), RANKS_PER_WORD)
    found = layer.empty(layer.tokens, words, dtype=torch.int32)
    per_piece, pieces = layer.split(launch)
    wide = padded(layer.channels)
    nearest_kernel[layer.streams, pieces](
        *layer.source, frame.offset, frame.exponent, frame.products, frame.high, frame.low, frame.bias, found, layer.tokens,
        frame.centroids, per_piece, first_ranks, second_ranks, words, not frame.rounds_are_centred, layer.channels, wide,
        padded(frame.centroids),
        **launch.options,
    )  # fmt: skip
    return found.view(torch.uint8)


def fit(
    values: Tensor, centroids: int, metric: Metric = None, iterations: int = 10, initial: Tensor | None = None,
    relaxation: float = 1.0,
) -> Tensor:  # fmt: skip
    """Lloyd's algorithm, all streams side by side; see :func:`quantwm_kernels.codebook.fit`.

    Args:
        values: BF16, FP16 or FP32 ``[*streams, tokens, channels]`` of any strides.
        centroids: Codebook size, 1 to 256; at most ``tokens`` rows are made.
        metric: None, FP32 ``[*streams, channels]`` or ``[*streams, channels, channels]``.
        iterations: Rounds of assignment and update, at least 0.
        initial: Warm start, ``[*streams, min(centroids, tokens), channels]``.
        relaxation: How many times the way to its cluster's mean a centroid goes, 1 (Lloyd's) to below 2; in the last
            round, the way.

    Returns:
        BF16 ``[*streams, min(centroids, tokens), channels]``.

    Raises:
        ParameterError, ShapeError, DtypeError: An argument does not fit.
        DeviceError: No kernel runs where the values live.
    """
    core.check_size(centroids)
    core.check_rounds(iterations, relaxation)
    layer, shape = Layer.of(values), table_shape(values.shape, centroids)
    if initial is not None and tuple(initial.shape) != shape:
        raise ShapeError(f"initial centroids: got shape {tuple(initial.shape)}, need {shape}")
    start = None if initial is None else initial.reshape(layer.streams, *shape[-2:])
    with on_device(values, "values"):
        frame = begin(layer, shape[-2], _flat_metric(metric, values), start)
        refine(frame, iterations, relaxation=relaxation)
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
        found = rank(framed(values, centroids, metric), count, count)[..., :count]
    return found.reshape(index_shape(values.shape, count)).long()


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


def _table_launch(name: str, frame: Frame, tables: int) -> Launch:
    """First launch of a name, or else of its wide heads', that fits into fast memory with ``tables`` weighted codebooks.

    One without ``BLOCK_K`` keeps these there whole, beside its tokens; the others stream them, and the last asks for least.
    """
    layer, wide = frame.layer, padded(frame.layer.channels)
    room = shared_memory(layer.first.device) - SPARE_BYTES
    table = tables * padded(frame.centroids) * torch.bfloat16.itemsize

    def fits(launch: Launch) -> bool:
        block, tile = launch.blocks["BLOCK_K"], launch.blocks["TILE"] * layer.first.itemsize
        loaded = table + launch.stages * tile if block == wide else launch.stages * (table + tile)
        return (loaded + tile) * block <= room

    launches = [_blocked(LAUNCHES[each], wide) for each in (name, name + _wide(layer), f"{name}_streamed")]
    return next(filter(fits, launches), launches[-1])


def _blocked(launch: Launch, wide: int) -> Launch:
    """A launch whose blocks of channels are no wider than the heads, of which there may be one only."""
    return replace(launch, blocks={**launch.blocks, "BLOCK_K": min(wide, launch.blocks.get("BLOCK_K", wide))})


def _wide(layer: Layer) -> str:
    """What the names of launches for such heads end with."""
    return "_wide" if layer.channels > WIDE else ""


def _table(
    frame: Frame, update: tuple[Tensor, Tensor] | None, kind: tl.constexpr, *, final: bool, relaxation: float = 1.0
) -> Step:
    launch, channels = LAUNCHES["prepare_centroids"], frame.layer.channels
    sums, counts = (frame.table, frame.bias) if update is None else update
    pieces = 0 if update is None else sums.shape[1]
    wide = padded(channels)
    return table_kernel[frame.layer.streams, ceil_div(frame.centroids, launch.blocks["ROWS"])](
        frame.table, frame.offset, frame.exponent,
        frame.products, frame.table if frame.metric is None else frame.metric, sums, counts, frame.high, frame.low, frame.bias,
        *frame.stored, frame.layer.per_tensor, frame.centroids, pieces, update is not None, final, kind.value,
        frame.rounds_are_centred, channels, wide, BLOCK_K=min(wide, 32), RELAXATION=relaxation, **launch.options,
    )  # fmt: skip
