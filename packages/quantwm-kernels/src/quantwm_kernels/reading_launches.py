"""Launching what reads sealed tensors: on whichever stream, as often as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quantwm_kernels.arrival import Planned
from quantwm_kernels.chunk import SealedTensor
from quantwm_kernels.reading_batches import Batch, Part, batches
from quantwm_kernels.recipe import Row

_TABLES = 1024
# A graph replays with the tables it captured, and nobody else would keep those.
_captured: set[Planned[Batch]] = set()


def run(planned: Sequence[Batch], keys: Tensor, values: Tensor) -> None:
    """Launch batches; a workspace whose channels lie apart is written through a copy."""
    from quantwm_kernels.triton import reading as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    if keys.stride(3) != 1 or values.stride(3) != 1:
        dense = [out.clone(memory_format=torch.contiguous_format) for out in (keys, values)]
        run(planned, dense[0], dense[0] if values is keys else dense[1])
        for out, written in zip((keys,) if values is keys else (keys, values), dense, strict=False):
            out.copy_(written)
        return
    for batch in planned:
        kernels.read(batch, keys, values)


def read_single(sealed: SealedTensor, out: Tensor, start: int, stop: int) -> None:
    """Reconstruct tokens ``start`` to ``stop`` of one tensor on a GPU, from the begin of ``out``.

    Raises:
        QuantWMError: As :meth:`quantwm_kernels.reading.ReadPlan.into`.
    """
    if stop > start:
        planned = _single(sealed.row, start, stop, out.device)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            _captured.add(planned)
        run(planned.expected(), out, out)


@lru_cache(maxsize=_TABLES)
def _single(row: Row, start: int, stop: int, device: torch.device) -> Planned[Batch]:
    """Launches of one tensor. A table holds nothing but what the arguments say: it may serve whenever they come again."""
    return Planned(batches([Part(row, start, stop, 0)], [], device), device)
