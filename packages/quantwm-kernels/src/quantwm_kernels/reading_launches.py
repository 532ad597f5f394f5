"""Launching what reads sealed tensors: on whichever stream, as often as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quantwm_kernels.arrival import Arrival
from quantwm_kernels.chunk import SealedTensor
from quantwm_kernels.reading_batches import Batch, Part, batches
from quantwm_kernels.recipe import Row

_TABLES = 1024
# A graph replays with the tables it captured, and nobody else would keep those.
_captured: set[Planned] = set()


class Planned:
    """Launches that any stream may repeat; each is itself, so that a set of them keeps one of each.

    Args:
        launches: What :func:`quantwm_kernels.reading_batches.batches` made on the current stream.
        device: Where it is.
    """

    def __init__(self, launches: Sequence[Batch], device: torch.device) -> None:
        self.device = device
        self._launches = tuple(launches)
        tables = [batch.table for batch in self._launches]
        self._arrival = Arrival(tables, device) if tables and device.type == "cuda" else None

    def run(self, keys: Tensor, values: Tensor) -> None:
        """Launch, behind the tables."""
        if self._arrival is not None:
            self._arrival.expect()
        run(self._launches, keys, values)


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
        planned.run(out, out)


@lru_cache(maxsize=_TABLES)
def _single(row: Row, start: int, stop: int, device: torch.device) -> Planned:
    """Launches of one tensor. A table holds nothing but what the arguments say: it may serve whenever they come again."""
    return Planned(batches([Part(row, start, stop, 0)], [], device), device)
