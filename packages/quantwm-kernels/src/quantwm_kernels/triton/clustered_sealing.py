"""Sealing with centroids on a GPU: ``quantwm`` and ``qvg``, both tensors of a layer in the same launches.

Launches of ``quantwm`` with the paper's settings do not grow with streams: six, three a round of k-means (four with
``metric="full"``), three more for PSAC, and two more where the groups of a token are no power of two. Beside the unit and
what is stored of it, ``S`` streams of ``N`` tokens need while they are sealed, in bytes::

    8 S C D                     codebooks, FP32 and their weighted copies in two parts of BF16
    4 S C D * pieces            sums of a round; pieces = programs that the device runs at once / programs of a piece
    S N (4 ceil(m / 4) + 1)     m candidates of every token, and the nearest of a round
    2 S N r + 2 S r N / tile    FP32 coefficients of the keys, half of the streams, and their peaks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from quantwm_core import affine as core_affine
from quantwm_core import codebook as core_codebook
from quantwm_core.clustered import TABLE_SCALES
from quantwm_core.errors import DeviceError, ParameterError
from quantwm_core.integer_table import EXACT_BITS
from quantwm_core.methods.quantwm import WARM_ITERATIONS, QuantWM
from quantwm_core.methods.qvg import QVG
from quantwm_kernels.sealing import Asked, Status
from quantwm_kernels.statistics import QueryMoment
from quantwm_kernels.triton import affine, codebook, integer_table, psac, qsac, rounding, statistics, symmetric
from quantwm_kernels.triton.layer import Arrays, Layer, Pair
from quantwm_kernels.triton.projection import Projection
from quantwm_kernels.triton.residual import Residual, subtracted
from quantwm_kernels.triton.side_stream import Directions, now


def seal_quantwm(jobs: Sequence[Asked], moment: QueryMoment | None, status: Tensor) -> list[Arrays]:
    """Arrays of tensors that ``quantwm`` seals alike, in order."""
    method, keys = cast("QuantWM", jobs[0].method), jobs[0].kind == "keys"
    _, _, tokens, channels = jobs[0].shape
    group = _group_size(method, channels)
    if keys and method.rank > channels:
        raise ParameterError(f"quantwm rank {method.rank}: need at most {channels}, the head dimension")
    layer = Layer.of(*(job.exact for job in jobs))
    known = moment if keys else None
    begun = now(layer.first.device)
    weights, metric = _metric(layer, method, known, status)
    warm = [table.flatten(0, 1) for table in map(warm_table, jobs) if table is not None]
    rows = _rows(method, tokens)
    frame = codebook.begin(layer, rows, metric, torch.cat(warm) if warm else None)
    rounds = WARM_ITERATIONS if warm else method.iterations
    coded = codebook.refine(frame, rounds, method.centroid_bits, method.relaxation)
    candidates = min(method.candidates, rows) if keys else 1
    # Behind the rounds, whose launches a device is waiting for, but not after them.
    directions = Directions(known.mean, method.rank, begun) if known is not None and method.rank else None
    nearest = codebook.rank(frame, candidates, 1)
    index, largest = qsac.choose_layer(frame, nearest, group, weights, candidates, 1, status[Status.MAGNITUDE])
    along = None if directions is None else Projection.onto(directions.matrix(), tokens)
    fed_back = None
    if known is not None and method.rounding == "feedback":
        found = (None, None) if directions is None or along is None else (directions.basis, along.matrix)
        fed_back = rounding.feedback(known.mean, *found)
    residual = Residual(index, frame.stored)
    codes = affine.encode_layer(layer, group, largest, residual, along, method.scale_candidates, fed_back)
    arrays = layer.by_tensor({**codes._asdict(), "index": index, **_tables(layer, frame.stored, coded)})
    if directions is not None and along is not None:
        arrays[0] |= _compensation(directions, along, method, status[Status.NON_ZERO, : layer.per_tensor])
    return arrays


def seal_qvg(jobs: Sequence[Asked], status: Tensor) -> list[Arrays]:
    """Arrays of tensors that ``qvg`` seals alike, in order."""
    method = cast("QVG", jobs[0].method)
    _, _, tokens, channels = jobs[0].shape
    group = _group_size(method, channels)
    layer = Layer.of(*(job.exact for job in jobs))
    rows = _rows(method, tokens)
    named: dict[str, Pair] = {}
    for stage in range(method.stages):
        suffix = f"_{stage + 1}" if stage else ""
        frame = codebook.begin(layer, rows, None, None)
        codebook.refine(frame, method.iterations)
        magnitudes = None if stage else status[Status.MAGNITUDE]
        index, largest = qsac.choose_layer(frame, codebook.rank(frame, 1, 1), group, None, 1, 1, magnitudes)
        named |= {f"index{suffix}": index, f"centroids{suffix}": frame.stored}
        residual = Residual(index, frame.stored)
        if stage + 1 < method.stages:
            layer = subtracted(layer, residual)
    if method.quantizer == "affine":
        named |= affine.encode_layer(layer, group, largest, residual)._asdict()
    else:
        named |= symmetric.encode_layer(layer, group, residual)._asdict()
    return layer.by_tensor(named)


def warm_table(job: Asked) -> Tensor | None:
    """Codebook of the unit before, if it may be used, is whole and fits."""
    method, previous = job.method, job.previous
    if not isinstance(method, QuantWM) or not method.warm_start or previous is None:
        return None
    batch, heads, tokens, channels = job.shape
    table = previous.arrays.get("centroids")
    if table is not None and table.dtype is not torch.bfloat16:
        scales = previous.arrays.get(TABLE_SCALES)
        table = None if scales is None else integer_table.decode(table, scales)
    if table is None or tuple(table.shape) != (batch, heads, _rows(method, tokens), channels):
        return None
    if table.device != job.values.device:
        raise DeviceError(
            f"{job.label}: a warm start from a unit on {table.device}, the tensor is on {job.values.device}; "
            "move one to the other"
        )
    return table


def _group_size(method: QuantWM | QVG, channels: int) -> int:
    """Channels that share a scale."""
    size = core_affine.default_group_size(channels) if method.group_size is None else method.group_size
    core_affine.check_group_size(channels, size)
    return size


def _rows(method: QuantWM | QVG, tokens: int) -> int:
    """Centroids of a unit."""
    bits = method.centroid_bits if isinstance(method, QuantWM) else EXACT_BITS
    return min(tokens, method.centroids or core_codebook.default_size(tokens, bits))


def _metric(layer: Layer, method: QuantWM, moment: QueryMoment | None, status: Tensor) -> tuple[Tensor, Tensor | None]:
    """Channel weights ``[S, D]`` of the residual ranges, and the metric of all streams; values have none."""
    weights = torch.ones((layer.streams, layer.channels), dtype=torch.float32, device=layer.first.device)
    if moment is None or not method.uses_queries("keys"):
        return weights, None
    own = layer.per_tensor
    mean = moment.mean.contiguous()
    uniform = method.metric == "uniform"
    # The status is written with the sensitivity, and PSAC relies on it whatever the metric is.
    sensitivity = torch.empty_like(weights[:own]) if uniform else weights[:own]
    statistics.write_sensitivity(mean, sensitivity, status[Status.MOMENT, :own])
    if uniform:
        return weights, None
    if method.metric == "diagonal":
        return weights, weights
    identity = torch.eye(layer.channels, dtype=torch.float32, device=mean.device)
    full = identity.expand(layer.streams, -1, -1).clone()
    full[:own] = statistics.normalised(mean).flatten(0, 1)
    return weights, full


def _tables(layer: Layer, stored: Pair, coded: tuple[Tensor, Tensor] | None) -> dict[str, Pair]:
    """What is kept of the codebooks of both tensors: themselves, or their integers and scales."""
    if coded is None:
        return {"centroids": stored}
    own = layer.per_tensor
    pairs = [(part[:own].clone(), part[-own:].clone()) for part in coded]  # a tensor keeps nothing of another alive
    return dict(zip(("centroids", TABLE_SCALES), pairs, strict=True))


def _compensation(directions: Directions, along: Projection, method: QuantWM, non_zero: Tensor) -> Arrays:
    """Basis and dense coefficients of the keys, whose number of non-zero ones is written per stream."""
    batch, heads, channels, rank = directions.basis.shape
    scales, steps = psac.quantize(
        along.coefficients, along.peaks, directions.energies.flatten(0, 1), channels, method.threshold, non_zero,
        method.coefficient_bits,
    )  # fmt: skip
    return {
        "basis": directions.basis,
        "coefficient_scales": scales.view(batch, heads, rank),
        "coefficients": steps,
    }
