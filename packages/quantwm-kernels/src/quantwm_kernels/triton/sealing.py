"""Sealing the tensors of a layer on a GPU: keys and values share every launch where they can, and nothing is waited for.

Launches of ``quantwm`` with the paper's settings do not grow with streams: six, three a round of k-means (four with
``metric="full"``), three more for PSAC, and two more where the groups of a token are no power of two. Beside the unit and
what is stored of it, ``S`` streams of ``N`` tokens need while they are sealed, in bytes::

    8 S C D                     codebooks, FP32 and their weighted copies in two parts of BF16
    4 S C D * pieces            sums of a round; pieces = programs that the device runs at once / programs of a piece
    S N (4 ceil(m / 4) + 1)     m candidates of every token, and the nearest of a round
    2 S N r + 2 S r N / tile    FP32 coefficients of the keys, half of the streams, and their peaks

A unit below 64 MiB is sealed by replaying what was recorded when one like it was sealed the second time
(:mod:`quantwm_kernels.triton.replay`): one launch for the host. The recordings of a device keep copies of at most 256 MiB of
units, what is stored of them, and one workspace, until :func:`quantwm_kernels.sealing.forget_recordings`.

A transform code, and a rotation, are launched when the unit is waited for (:mod:`quantwm_kernels.triton.transform_sealing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from quantwm_core import affine as core_affine
from quantwm_core import basis, methods
from quantwm_core import codebook as core_codebook
from quantwm_core.chunk import SHARED
from quantwm_core.clustered import TABLE_SCALES
from quantwm_core.errors import DeviceError, ParameterError
from quantwm_core.integer_table import EXACT_BITS
from quantwm_core.methods.bf16 import BF16Method
from quantwm_core.methods.kivi import Kivi
from quantwm_core.methods.oscar import Oscar
from quantwm_core.methods.quantwm import WARM_ITERATIONS, QuantWM
from quantwm_core.methods.qvg import QVG
from quantwm_core.methods.rtn import RoundToNearest
from quantwm_core.transform_method import TransformMethod
from quantwm_kernels.chunk import SealedTensor
from quantwm_kernels.launch import on_device, ranks
from quantwm_kernels.sealing import Asked, Draft, PendingTensors, Status
from quantwm_kernels.statistics import QueryMoment
from quantwm_kernels.triton import (
    affine,
    baselines,
    codebook,
    integer_table,
    packing,
    psac,
    qsac,
    replay,
    rounding,
    statistics,
    symmetric,
    transform_sealing,
)
from quantwm_kernels.triton.affine import Projection, Residual
from quantwm_kernels.triton.layer import Layer, Pair

Arrays = dict[str, Tensor]
STATUS = "status"


def seal(jobs: Sequence[Asked], moment: QueryMoment | None = None) -> PendingTensors:
    """Launch all that seals one tensor, or the keys and the values of a unit.

    Raises:
        ParameterError: A setting does not fit the tensor.
        DeviceError: No kernel seals the method, or none runs where the tensors live.
    """
    with on_device(jobs[0].values, jobs[0].label):
        *arrays, status = _replayed(jobs, moment) if _replays(jobs) else _launched(jobs, moment)
        drafts = []
        for job, made, span in zip(jobs, arrays, pairwise(_ends(jobs)), strict=True):
            settings, later = methods.settings(job.method), _later(job, moment)
            drafts.append(Draft(job.method.name, settings, job.shape, made, job.label, job.values, span, later))
        return PendingTensors(drafts, status[STATUS])


def _ends(jobs: Sequence[Asked]) -> list[int]:
    """Where the streams of each tensor begin in a status, and where the last end."""
    return list(accumulate((job.shape[0] * job.shape[1] for job in jobs), initial=0))


def _launched(jobs: Sequence[Asked], moment: QueryMoment | None) -> list[Arrays]:
    """Arrays of each tensor, and last the status."""
    ends = _ends(jobs)
    status = torch.zeros((len(Status), ends[-1]), dtype=torch.int32, device=jobs[0].values.device)
    together = len(jobs) == 2 and _alike(*jobs)
    made: list[Arrays] = []
    for begin, end in [(0, 2)] if together else [(number, number + 1) for number in range(len(jobs))]:
        made += _group(jobs[begin:end], moment, status[:, ends[begin] : ends[end]])
    for job, span in zip(jobs, pairwise(ends), strict=True):
        _check_wide(job, status[Status.MAGNITUDE, slice(*span)])
    return [*made, {STATUS: status}]


def _replays(jobs: Sequence[Asked]) -> bool:
    """Whether a unit's launches can be replayed, and should be; linear algebra of libraries is not recorded."""
    plain = all(
        isinstance(job.method, QVG) or (isinstance(job.method, QuantWM) and job.method.rounding == "nearest")
        for job in jobs
    )
    return plain and replay.pays([job.values for job in jobs])


def _replayed(jobs: Sequence[Asked], moment: QueryMoment | None) -> replay.Made:
    """As :func:`_launched`, from a recording if there is one."""
    tables = [_warm(job) for job in jobs]
    mean = [] if moment is None else [moment.mean]
    inputs = [*(job.values for job in jobs), *mean, *(table for table in tables if table is not None)]

    def call(given: Sequence[Tensor]) -> list[Arrays]:
        rest = iter(given)
        values = [next(rest) for _ in jobs]
        known = None if moment is None else moment._replace(mean=next(rest))
        before = [
            None if table is None else SealedTensor(job.method.name, {}, job.shape, {"centroids": next(rest)})
            for job, table in zip(jobs, tables, strict=True)
        ]
        like = zip(jobs, values, before, strict=True)
        return _launched([replace(job, values=each, previous=unit) for job, each, unit in like], known)

    settings = tuple((job.method, job.kind, table is None) for job, table in zip(jobs, tables, strict=True))
    return replay.RECORDINGS.run((settings, moment is None, ranks()), call, inputs)


def _alike(first: Asked, second: Asked) -> bool:
    """Whether two tensors can share launches."""
    same = first.method == second.method and first.shape == second.shape
    return same and (_warm(first) is None) == (_warm(second) is None)


def _group(jobs: Sequence[Asked], moment: QueryMoment | None, status: Tensor) -> Sequence[Arrays]:
    """Arrays of tensors that are sealed alike, in order."""
    match jobs[0].method:
        case QuantWM():
            return _quantwm(jobs, moment, status)
        case QVG():
            return _qvg(jobs, status)
    layer = Layer.of(*(job.exact for job in jobs))
    torch.amax(codebook.magnitudes_of(layer), dim=1, out=status[Status.MAGNITUDE])
    match jobs[0].method:
        case RoundToNearest():
            return _rtn(jobs, layer)
        case Kivi():
            return [_kivi(job) for job in jobs]
        case TransformMethod() | Oscar():
            for number, job in enumerate(jobs):
                if moment is not None and job.method.uses_queries(job.kind):
                    own = status[Status.MOMENT].view(len(jobs), -1)[number]
                    unread = torch.empty(moment.mean.shape[:-1], dtype=torch.float32, device=status.device)
                    statistics.write_sensitivity(moment.mean.contiguous(), unread.flatten(0, 1), own)
            return [{} for _ in jobs]
        case BF16Method():
            return [{"exact": job.exact.clone(memory_format=torch.contiguous_format)} for job in jobs]
    raise DeviceError(
        f"{jobs[0].label}: no kernel seals with method {jobs[0].method.name!r}; move the tensors with tensor.cpu()"
    )


def _later(job: Asked, moment: QueryMoment | None) -> Callable[[], Arrays] | None:
    """What seals a tensor whose host must decide how."""
    mean = moment.mean if moment is not None and job.method.uses_queries(job.kind) else None
    channels = job.shape[3]
    kept = _kept(job)
    match job.method:
        case TransformMethod(damp=damp, lifetime=lifetime) as method:
            allocate = method.allocator(job.kind, channels)
            return partial(transform_sealing.seal, job.exact, mean, damp, allocate, kept, lifetime)
        case Oscar(group_size=size):
            return partial(baselines.encode_rotated, job.exact, mean, kept, size or channels, own=job.kind == "values")
    return None


def _kept(job: Asked) -> Mapping[str, Tensor] | None:
    """Arrays of the unit before, if it is of the same method and its basis is whole and fits."""
    previous = job.previous
    if previous is None or previous.method != job.method.name:
        return None
    shared = [name for name in job.method.array_names(job.kind) if name.startswith(SHARED)]
    if not shared or not previous.arrays.keys() >= set(shared):
        return None
    rows, _, blocks = (previous.arrays[part] for part in basis.PARTS)
    batch, heads, _, channels = job.shape
    if tuple(blocks.shape) != (batch, heads) or rows.shape[1:] != (channels,):
        return None
    if rows.device != job.values.device:
        raise DeviceError(
            f"{job.label}: the basis of the unit before is on {rows.device}, the tensor on {job.values.device}; "
            "move one to the other"
        )
    return previous.arrays


def _check_wide(job: Asked, magnitude: Tensor) -> None:
    """What was rounded to BF16 first is judged by what it was before."""
    if job.values.dtype is not torch.bfloat16:
        largest = job.values.abs().amax(dim=(-2, -1)).float().flatten()
        magnitude.copy_(largest.view(torch.int32) & torch.iinfo(torch.int32).max)


def _warm(job: Asked) -> Tensor | None:
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


def _rows(method: QuantWM | QVG, tokens: int) -> int:
    """Centroids of a unit."""
    bits = method.centroid_bits if isinstance(method, QuantWM) else EXACT_BITS
    return min(tokens, method.centroids or core_codebook.default_size(tokens, bits))


def _quantwm(jobs: Sequence[Asked], moment: QueryMoment | None, status: Tensor) -> list[Arrays]:
    method = cast("QuantWM", jobs[0].method)
    batch, heads, tokens, channels = jobs[0].shape
    group = core_affine.default_group_size(channels) if method.group_size is None else method.group_size
    core_affine.check_group_size(channels, group)
    keys = jobs[0].kind == "keys"
    if keys and method.rank > channels:
        raise ParameterError(f"quantwm rank {method.rank}: need at most {channels}, the head dimension")
    layer = Layer.of(*(job.exact for job in jobs))
    known = moment if keys else None
    begun = _now(layer.first.device)
    weights, metric = _metric(layer, method, known, status)
    warm = [table.flatten(0, 1) for table in map(_warm, jobs) if table is not None]
    rows = _rows(method, tokens)
    frame = codebook.begin(layer, rows, metric, torch.cat(warm) if warm else None)
    rounds = WARM_ITERATIONS if warm else method.iterations
    coded = codebook.refine(frame, rounds, method.centroid_bits, method.relaxation)
    candidates = min(method.candidates, rows) if keys else 1
    # Behind the rounds, whose launches a device is waiting for, but not after them.
    directions = _Directions(known.mean, method.rank, begun) if known is not None and method.rank else None
    nearest = codebook.rank(frame, candidates, 1)
    index, largest = qsac.choose_layer(frame, nearest, group, weights, candidates, 1, status[Status.MAGNITUDE])
    along = None if directions is None else Projection.onto(directions.matrix(), tokens)
    fed_back = None
    if known is not None and method.rounding == "feedback":
        found = (None, None) if directions is None or along is None else (directions.basis, along.matrix)
        fed_back = rounding.feedback(known.mean, *found)
    residual = Residual(index, frame.stored)
    codes = affine.encode_layer(layer, group, largest, residual, along, method.scale_candidates, fed_back)
    arrays = _clustered((batch, heads), codes, index, _tables(layer, frame.stored, coded), len(jobs))
    if directions is not None and along is not None:
        non_zero = status[Status.NON_ZERO, : layer.per_tensor]
        scales, steps = psac.quantize(
            along.coefficients, along.peaks, directions.energies.flatten(0, 1), channels, method.threshold, non_zero,
            method.coefficient_bits,
        )  # fmt: skip
        scales = scales.view(batch, heads, method.rank)
        arrays[0] |= {"basis": directions.basis, "coefficient_scales": scales, "coefficients": steps}
    return arrays


class _Directions:
    """Principal directions of a moment, found on a stream of their own while k-means runs.

    Few programs take long over them, so they would leave a device idle.

    Args:
        mean: FP32 ``[B, H, D, D]``.
        rank: How many.
        begun: Behind what they are found; None where there is no device.

    Attributes:
        basis, energies: As :func:`quantwm_kernels.triton.statistics.principal_basis` returns them.
    """

    def __init__(self, mean: Tensor, rank: int, begun: torch.cuda.Event | None) -> None:
        self._stream = None
        if begun is not None:
            self._stream = _beside(mean.device)
            self._stream.wait_event(begun)
        with torch.cuda.stream(self._stream):
            self.basis, self.energies = statistics.principal_basis(mean, rank)
            self._matrix = psac.projection_of(self.basis.flatten(0, 1))

    def matrix(self) -> Tensor:
        """FP32 ``[S, D, r]`` to project on; whatever is launched from here on may use basis and energies, too."""
        if self._stream is not None:
            caller = torch.cuda.current_stream(self.basis.device)
            caller.wait_stream(self._stream)
            for each in (self.basis, self.energies, self._matrix):
                each.record_stream(caller)
        return self._matrix


def _now(device: torch.device) -> torch.cuda.Event | None:
    """An event of the current stream of a CUDA device."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _beside(device: torch.device) -> torch.cuda.Stream:
    """The stream on which directions are found; one of its own while launches are recorded, which nobody else may use."""
    return torch.cuda.Stream(device) if torch.cuda.is_current_stream_capturing() else _usual_beside(device)


@cache
def _usual_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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


def _clustered(
    streams: tuple[int, int],
    codes: affine.Codes,
    index: Pair,
    tables: Mapping[str, Pair],
    count: int,
) -> list[Arrays]:
    """Arrays of each tensor, streams as batch and heads."""
    return _by_tensor(streams, {**codes._asdict(), "index": index, **tables}, count)


def _by_tensor(streams: tuple[int, int], named: Mapping[str, tuple[Tensor, Tensor]], count: int) -> list[Arrays]:
    """Pairs of both tensors as arrays of each, streams as batch and heads."""
    return [
        {name: pair[tensor].view(*streams, *pair[tensor].shape[1:]) for name, pair in named.items()}
        for tensor in range(count)
    ]


def _qvg(jobs: Sequence[Asked], status: Tensor) -> list[Arrays]:
    method = cast("QVG", jobs[0].method)
    batch, heads, tokens, channels = jobs[0].shape
    group = core_affine.default_group_size(channels) if method.group_size is None else method.group_size
    core_affine.check_group_size(channels, group)
    layer = Layer.of(*(job.exact for job in jobs))
    rows = _rows(method, tokens)
    named: dict[str, tuple[Tensor, Tensor]] = {}
    for stage in range(method.stages):
        suffix = f"_{stage + 1}" if stage else ""
        frame = codebook.begin(layer, rows, None, None)
        codebook.refine(frame, method.iterations)
        magnitudes = None if stage else status[Status.MAGNITUDE]
        index, largest = qsac.choose_layer(frame, codebook.rank(frame, 1, 1), group, None, 1, 1, magnitudes)
        named |= {f"index{suffix}": index, f"centroids{suffix}": frame.stored}
        residual = Residual(index, frame.stored)
        if stage + 1 < method.stages:
            layer = _subtracted(layer, residual)
    code: Mapping[str, tuple[Tensor, Tensor]]
    if method.quantizer == "affine":
        code = affine.encode_layer(layer, group, largest, residual)._asdict()
    else:
        code = symmetric.encode_layer(layer, group, residual)._asdict()
    return _by_tensor((batch, heads), {**code, **named}, len(jobs))


def _subtracted(layer: Layer, residual: Residual) -> Layer:
    """What a stage of centroids leaves, FP32."""
    parts = []
    for tensor, index, stored in zip((layer.first, layer.second), residual.index, residual.stored, strict=True):
        rows = index.long()[..., None].expand(-1, -1, layer.channels)
        parts.append(tensor.float() - stored.float().gather(1, rows).view(tensor.shape))
    return Layer.of(*parts[: layer.tensors])


def _rtn(jobs: Sequence[Asked], layer: Layer) -> list[Arrays]:
    method = cast("RoundToNearest", jobs[0].method)
    batch, heads, _, channels = jobs[0].shape
    size = method.group(channels)
    if method.granularity == "channel":
        return [baselines.encode_channels(job.exact, size)._asdict() for job in jobs]
    core_affine.check_group_size(channels, size)
    codes = affine.encode_layer(layer, size, affine.largest_ranges(layer, size))
    return _by_tensor((batch, heads), codes._asdict(), len(jobs))


def _kivi(job: Asked) -> Arrays:
    method = cast("Kivi", job.method)
    rows = job.exact.transpose(-1, -2) if job.kind == "keys" else job.exact
    codes, scales, minima = baselines.encode_minmax(rows, method.group_size)
    by_token = codes.transpose(-1, -2) if job.kind == "keys" else codes
    parts = (packing.pack(by_token), scales, minima)
    return dict(zip(method.array_names(job.kind), parts, strict=True))
