"""Sealing the tensors of a layer on a GPU: keys and values share every launch where they can, and nothing is waited for.

A unit below 64 MiB is sealed by replaying what was recorded when one like it was sealed the second time
(:mod:`quantwm_kernels.triton.replay`): one launch for the host. The recordings of a device keep copies of at most 256 MiB of
units, what is stored of them, and one workspace, until :func:`quantwm_kernels.sealing.forget_recordings`.

A transform code, and a rotation, are launched when the unit is waited for (:mod:`quantwm_kernels.triton.transform_sealing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from quantwm_core import affine as core_affine
from quantwm_core import basis, methods
from quantwm_core.chunk import SHARED
from quantwm_core.errors import DeviceError
from quantwm_core.methods.bf16 import BF16Method
from quantwm_core.methods.kivi import Kivi
from quantwm_core.methods.oscar import Oscar
from quantwm_core.methods.quantwm import QuantWM
from quantwm_core.methods.qvg import QVG
from quantwm_core.methods.rtn import RoundToNearest
from quantwm_core.transform_method import TransformMethod
from quantwm_kernels.chunk import SealedTensor
from quantwm_kernels.launch import on_device, ranks
from quantwm_kernels.sealing import Asked, Draft, PendingTensors, Status
from quantwm_kernels.statistics import QueryMoment
from quantwm_kernels.triton import affine, baselines, codebook, packing, replay, statistics, transform_sealing
from quantwm_kernels.triton.clustered_sealing import seal_quantwm, seal_qvg, warm_table
from quantwm_kernels.triton.layer import Arrays, Layer

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
    tables = [warm_table(job) for job in jobs]
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
    return same and (warm_table(first) is None) == (warm_table(second) is None)


def _group(jobs: Sequence[Asked], moment: QueryMoment | None, status: Tensor) -> Sequence[Arrays]:
    """Arrays of tensors that are sealed alike, in order."""
    match jobs[0].method:
        case QuantWM():
            return seal_quantwm(jobs, moment, status)
        case QVG():
            return seal_qvg(jobs, status)
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


def _rtn(jobs: Sequence[Asked], layer: Layer) -> list[Arrays]:
    method = cast("RoundToNearest", jobs[0].method)
    size = method.group(layer.channels)
    if method.granularity == "channel":
        return [baselines.encode_channels(job.exact, size)._asdict() for job in jobs]
    core_affine.check_group_size(layer.channels, size)
    codes = affine.encode_layer(layer, size, affine.largest_ranges(layer, size))
    return layer.by_tensor(codes._asdict())


def _kivi(job: Asked) -> Arrays:
    method = cast("Kivi", job.method)
    rows = job.exact.transpose(-1, -2) if job.kind == "keys" else job.exact
    codes, scales, minima = baselines.encode_minmax(rows, method.group_size)
    by_token = codes.transpose(-1, -2) if job.kind == "keys" else codes
    parts = (packing.pack(by_token), scales, minima)
    return dict(zip(method.array_names(job.kind), parts, strict=True))
