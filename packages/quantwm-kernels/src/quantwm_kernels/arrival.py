"""Memory that one stream of a GPU writes and others read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """:func:`torch.cuda.current_stream` of a tensor's device, which makes an object of it anew for whoever asks."""
    raw = torch._C._cuda_getCurrentRawStream(device.index)  # noqa: SLF001 - by which Triton launches, too
    return _stream(device.index, raw)


def is_current(stream: torch.cuda.Stream) -> bool:
    """Whether work is launched on a stream, and on its device."""
    return torch.cuda.current_device() == stream.device.index and current_stream(stream.device) == stream


@lru_cache(maxsize=64)
def _stream(index: int, _: int) -> torch.cuda.Stream:
    """The current stream of a device, known again by its address."""
    return torch.cuda.current_stream(index)


class Arrival:
    """When tensors stand written that the current stream was told to write.

    Args:
        tensors: CUDA tensors of one device, allocated and written on its current stream.
        device: That device.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = tuple(tensors)
        self._device = device
        self._stream = current_stream(device)
        self._written = torch.cuda.Event()
        self._written.record(self._stream)

    def expect(self) -> None:
        """Let the current stream wait until they are written, and keep their memory until it has read them.

        A stream that a CUDA graph captures may not wait for what happened before; a graph replays after it, and whoever
        keeps the graph keeps the tensors.
        """
        current = current_stream(self._device)
        if current == self._stream or torch.cuda.is_current_stream_capturing():
            return
        current.wait_event(self._written)
        for tensor in self._tensors:
            tensor.record_stream(current)


class Tabled(Protocol):
    """A launch that takes what it does from a table."""

    @property
    def table(self) -> Tensor:
        """The table, on the device."""


Launched = TypeVar("Launched", bound=Tabled)


class Planned(Generic[Launched]):
    """Launches that any stream may repeat; each is itself, so that a set of them keeps one of each.

    Args:
        launches: Whose tables were made on the current stream.
        device: Where they are.
    """

    def __init__(self, launches: Sequence[Launched], device: torch.device) -> None:
        self.device = device
        self._launches = tuple(launches)
        tables = [each.table for each in self._launches]
        self._arrival = Arrival(tables, device) if tables and device.type == "cuda" else None

    def expected(self) -> tuple[Launched, ...]:
        """The launches; what the current stream launches next waits for their tables."""
        if self._arrival is not None:
            self._arrival.expect()
        return self._launches
