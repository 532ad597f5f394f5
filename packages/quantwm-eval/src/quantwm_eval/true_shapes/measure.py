"""Running a stack with the host's own cache and with compressed ones, in one process, and what that takes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from quantwm_core.errors import ParameterError, ShapeError, StateError
from quantwm_eval.experiment import MethodChoice
from quantwm_eval.true_shapes.memory import DeviceMemory
from quantwm_eval.true_shapes.plan import Plan
from quantwm_eval.true_shapes.stack import Stack
from quantwm_eval.true_shapes.timing import chunk_seconds, timed
from quantwm_kernels.sealing import recorded_nbytes
from quantwm_models import Attachment, attach
from quantwm_models.adapters.hy_world import HyWorld

HOST, AGAIN = "host", "host again"
"""What the untouched host is called, first and last: its own BF16 cache, with which all others are compared."""

NOT_FOR_IT = "not for this shape"


@dataclass
class Measured:
    """What a cache took while a video was made.

    Attributes:
        method: Label of the method; ``"host"`` is the untouched host.
        chunks: Seconds of each chunk's passes, by the name of the pass.
        seal_seconds, decode_seconds: Of each chunk, as the cache counts them.
        own_nbytes: BF16 bytes of the host's own cache at the end, wherever it lies.
        sealed_nbytes, active_nbytes, state_nbytes, workspace_nbytes, staging_nbytes, host_nbytes: As
            :class:`quantwm_models.CacheReport` states them at the end.
        sealed_bf16_nbytes: What the sealed tokens would take in BF16.
        held_nbytes: Most that the cache held on the device after any chunk: sealed and BF16 tokens, and statistics.
        before_nbytes: Allocated on the device before the video: weights and prompt.
        peak_nbytes: Most that was allocated at once; 0 on a CPU, which does not tell.
        unit_nbytes: BF16 bytes of the largest unit that a layer sealed.
        recorded_nbytes: What :func:`quantwm_kernels.sealing.recorded_nbytes` says after the last chunk.
        does_not_fit: What was said where memory ran out; then the other figures are of the chunks before, and no result.
        refused: What was said where the method cannot store keys and values of that shape; then there is no result, either.
    """

    method: str
    chunks: list[dict[str, list[float]]] = field(default_factory=list)
    seal_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    own_nbytes: int = 0
    sealed_nbytes: int = 0
    sealed_bf16_nbytes: int = 0
    active_nbytes: int = 0
    state_nbytes: int = 0
    workspace_nbytes: int = 0
    staging_nbytes: int = 0
    host_nbytes: int = 0
    held_nbytes: int = 0
    before_nbytes: int = 0
    peak_nbytes: int = 0
    unit_nbytes: int = 0
    recorded_nbytes: int = 0
    does_not_fit: str = ""
    refused: str = ""


def run(plan: Plan, methods: Sequence[MethodChoice], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure the untouched host, then each method, then the host again, which tells how steady the machine is; one line each.

    A stack of one layer makes the same videos first: kernels are compiled then, and what a pass takes beside weights and
    cache is read off it. Then the whole stack makes one with a single step a chunk, so that memory was allocated before.
    A cache that does not fit into the device's memory has a line that says so, as has a method that is none for this shape, and
    those after it are measured.

    Raises:
        ParameterError, UnknownNameError: The plan asks for what there is not.
        ParameterError, ShapeError: A pass failed after units of that shape had been sealed.
        StateError: A result is not finite, or not even the weights fit, or a pass of one layer under the untouched host.
    """
    schemes: dict[str, Any] = {HOST: None}
    schemes |= {method.label: method.scheme(plan.shape.per_seal) for method in methods}
    single = _built(plan, layers=1)
    warm = [_tried(plan, single, *each) for each in schemes.items()]
    if warm[0].does_not_fit:
        raise StateError(f"{plan.shape.title}: a pass of one layer does not fit: {warm[0].does_not_fit}")
    beside = max(0, warm[0].peak_nbytes - warm[0].before_nbytes - (0 if plan.offload else warm[0].own_nbytes))
    del single
    stack = _built(plan)
    tell(f"{plan.shape.title}: {stack.weight_nbytes / 2**30:.2f} GiB of random weights, {stack.chunks} chunks")
    if plan.alone:
        del schemes[HOST]
    elif not _tried(replace(plan, steps=1), stack, HOST, None).does_not_fit:
        schemes[AGAIN] = None
    for name, scheme in schemes.items():
        measured = _tried(plan, stack, name, scheme)
        yield _line(plan, stack, measured, beside)
        seconds = sum(chunk_seconds(each, plan.shape.steps) for each in measured.chunks)
        missing = {"does not fit": measured.does_not_fit, NOT_FOR_IT: measured.refused}
        said = [f"{what}: {why}" for what, why in missing.items() if why]
        tell(f"{name}: {said[0] if said else f'{seconds:.2f} s'}")


def _built(plan: Plan, layers: int | None = None) -> Stack:
    """The stack, whose weights may already be too much."""
    try:
        return plan.build(layers)
    except torch.OutOfMemoryError as error:
        raise StateError(f"{plan.shape.title}: the weights do not fit: {_said(error)}") from error


def _tried(plan: Plan, stack: Stack, name: str, scheme: Any) -> Measured:
    """Make a video with one kind of cache, or find out that it does not fit, or is none for the stack's shape."""
    measured = Measured(name)
    try:
        _measure(measured, plan, stack, scheme)
    except torch.OutOfMemoryError as error:
        measured.does_not_fit = _said(error)
        stack.forget()
    except (ParameterError, ShapeError) as error:
        if scheme is None or measured.unit_nbytes:  # what was sealed once can be: this is a fault
            raise
        measured.refused = str(error)
        stack.forget()
    if measured.does_not_fit:  # the traceback, which held tensors, is gone by now
        gc.collect()
        torch.cuda.empty_cache()
    return measured


def _said(error: torch.OutOfMemoryError) -> str:
    """What an allocator says, without its advice on settings, and without what other processes have on the device."""
    told = str(error).partition("\n")[0].partition(" If reserved but")[0]
    return re.sub(r" Process \d+ has \S+ \S+ memory in use\.", "", told)


def _measure(measured: Measured, plan: Plan, stack: Stack, scheme: Any) -> None:
    """Make a video with one kind of cache, and note what it takes."""
    device = stack.weights.device
    stack.forget()
    gc.collect()  # caches of the method before, of which some are in cycles
    with ExitStack() as inside:
        inside.enter_context(torch.no_grad())
        if device.type == "cuda":
            inside.enter_context(torch.cuda.device(device))
        attachment = inside.enter_context(_attached(plan, stack, scheme))
        memory = inside.enter_context(DeviceMemory(device))
        measured.before_nbytes = memory.before
        told = (0.0, 0.0)
        for number in range(stack.chunks):
            measured.chunks.append(timed(stack, number, plan.steps_run, gpu=device.type == "cuda"))
            if attachment is not None:
                told = _note(measured, attachment, told, anew=stack.shape.host != "rolling")
        measured.own_nbytes, measured.peak_nbytes = stack.own_nbytes(), memory.most
        stack.forget()


def _attached(plan: Plan, stack: Stack, scheme: Any) -> AbstractContextManager[Attachment | None]:
    if scheme is None:
        return nullcontext()
    # LongCat-Video moves its history away by itself, which a cache under it notices.
    adapter = HyWorld(once=True) if plan.once else None
    return attach(stack, scheme, adapter=adapter, offload=plan.offload and stack.shape.host != "segments")


def _note(
    measured: Measured, attachment: Attachment, before: tuple[float, float], *, anew: bool
) -> tuple[float, float]:
    """Note what the caches report after a chunk; where they are made anew, their clocks begin anew."""
    report = attachment.report()
    now = (report.seal_seconds, report.decode_seconds)
    seal, decode = now if anew else (now[0] - before[0], now[1] - before[1])
    measured.seal_seconds.append(seal)
    measured.decode_seconds.append(decode)
    for name, value in asdict(report).items():
        if name.endswith("_nbytes") and name != "shared_nbytes":
            setattr(measured, name, value)
    held = report.sealed_nbytes - report.host_nbytes + report.active_nbytes + report.state_nbytes
    measured.held_nbytes = max(measured.held_nbytes, held)
    units = (chunk.bf16_nbytes for cache in attachment.caches[:1] for chunk in cache.chunks)
    measured.unit_nbytes = max(measured.unit_nbytes, *units, 0)
    measured.recorded_nbytes = recorded_nbytes()
    return now


def modelled(measured: Measured, beside: int, *, once: bool = False) -> int:
    """Peak by the byte model: what was there, a pass of one layer, what the cache holds, and what its reads and its seals share.

    Args:
        measured: Under a compressed cache.
        beside: Bytes of a pass beside weights and cache.
        once: Whether a read derives two encodings from what is stored, a unit: keys and values of twice the channels each.

    >>> modelled(Measured("quantwm", held_nbytes=3, workspace_nbytes=2, before_nbytes=40, unit_nbytes=2), 5)
    50
    >>> modelled(Measured("quantwm", held_nbytes=3, workspace_nbytes=2, before_nbytes=40, unit_nbytes=2), 5, once=True)
    54
    """
    cache = measured.held_nbytes + measured.workspace_nbytes + measured.staging_nbytes + measured.recorded_nbytes
    derived = 2 * measured.unit_nbytes if once else 0
    return measured.before_nbytes + beside + cache + derived


def _line(plan: Plan, stack: Stack, measured: Measured, beside: int) -> dict[str, Any]:
    """A line of results."""
    shape = plan.shape
    return {
        "benchmark": "true-shapes",
        "model": plan.model,
        "resolution": plan.resolution or shape.resolutions[0],
        "frames": plan.frames,
        "window": shape.window,
        "offload": plan.offload,
        "once": plan.once,
        "tiny": plan.tiny,
        "layers": shape.layers,
        "layers_run": stack.layers,
        "steps": shape.steps,
        "steps_run": plan.steps_run,
        "tokens": stack.cached * stack.frame_tokens,
        "weight_nbytes": stack.weight_nbytes,
        "beside_nbytes": beside,
        "model_nbytes": modelled(measured, beside, once=plan.once),
        **asdict(measured),
    }
