"""Seconds of a chunk's passes."""

from __future__ import annotations

import time
from typing import Any

import torch

from quantwm_core.errors import StateError
from quantwm_eval.true_shapes.stack import Stack


def chunk_seconds(passes: dict[str, list[float]], steps: int) -> float:
    """Seconds of a chunk, its denoising steps extrapolated to as many as the model makes.

    The first step counts once: what is sealed when a chunk begins is sealed in it.

    >>> chunk_seconds({"build": [3.0], "step": [2.0, 1.0, 1.0]}, 50), chunk_seconds({"step": [2.0]}, 4)
    (54.0, 8.0)
    """
    others = sum(sum(each) for name, each in passes.items() if name != "step")
    first, *rest = passes["step"]
    return others + first + (steps - 1) * (sum(rest) / len(rest) if rest else first)


def timed(stack: Stack, number: int, steps: int, *, gpu: bool) -> dict[str, list[float]]:
    """Seconds of a chunk's passes; between them nothing is waited for."""
    marks, result = [_mark(gpu)], None
    names = []
    for name, made in stack.chunk(number, steps):
        names.append(name)
        result = made
        marks.append(_mark(gpu))
    if result is not None and not bool(result.isfinite().all()):  # which waits
        raise StateError(f"chunk {number}: the stack gave numbers that are not finite, so nothing was measured")
    passes: dict[str, list[float]] = {}
    for name, begin, end in zip(names, marks, marks[1:], strict=False):
        seconds = begin.elapsed_time(end) / 1000 if gpu else end - begin
        passes.setdefault(name, []).append(seconds)
    return passes


def _mark(gpu: bool) -> Any:
    """A point in time, on the GPU's clock where one works."""
    if not gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
