"""Replaying the launches of a call as one CUDA graph, where the host takes longer over them than the device.

A graph reads and writes memory of its own: the tensors of a call are copied there, and what it makes is copied out. That is
little beside tens of launches as long as the tensors are small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

MOST_NBYTES = 64 << 20
"""Bytes of a call's tensors from which on it is not recorded: the device takes about as long as the host then."""

MOST_KEPT_NBYTES = 256 << 20
"""Bytes of tensors that recordings of a device keep, but for what the last one adds."""

MOST_SEEN = 64
"""Calls that are remembered, recorded or not."""

Made = Sequence[Mapping[str, Tensor]]
Call = Callable[[Sequence[Tensor]], Made]


@dataclass
class Kept:
    """What the recordings of a device share.

    Attributes:
        pool: Memory for what is there during a replay only.
        nbytes: Bytes of inputs of all recordings, and of what they make.
        last: Where the last replay had been copied out.
    """

    pool: Any
    nbytes: int = 0
    last: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class Recording:
    """A call's launches, and the memory that they read and write.

    Args:
        call: Launches kernels, and waits for nothing.
        inputs: Tensors like those that it will be given.
        kept: Of their device.
    """

    def __init__(self, call: Call, inputs: Sequence[Tensor], kept: Kept) -> None:
        device = inputs[0].device
        self._kept = kept
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            self._inputs = [torch.empty_like(each).copy_(each) for each in inputs]
            beside = torch.cuda.Stream(device)
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):  # so that whatever happens once has happened
                call(self._inputs)
            torch.cuda.current_stream(device).wait_stream(beside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, kept.pool, beside, capture_error_mode="thread_local"):
                self._made = call(self._inputs)
        self.nbytes = nbytes_of(self._inputs) + sum(nbytes_of(list(each.values())) for each in self._made)

    def replay(self, inputs: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """What the call makes of other tensors, in memory of its own."""
        stream = torch.cuda.current_stream(self._inputs[0].device)
        stream.wait_event(self._kept.last)  # of a replay on another stream
        copy_all(self._inputs, inputs)
        self._graph.replay()
        made = [{name: torch.empty_like(tensor) for name, tensor in each.items()} for each in self._made]
        copy_all(*([tensor for each in parts for tensor in each.values()] for parts in (made, self._made)))
        self._kept.last.record(stream)
        return made


class Recordings:
    """Recordings of calls that came before, by what they depend on."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Recording | None] = {}
        self._kept: dict[torch.device, Kept] = {}
        self._lock = Lock()

    def run(self, key: Hashable, call: Call, inputs: Sequence[Tensor]) -> Made:
        """``call(inputs)``; from the second time on it is replayed, as long as there is room to record it.

        Recording waits for the device, once. Where its memory does not suffice for a recording, the call is made.

        Args:
            key: What, beside the layout of ``inputs``, decides about the launches.
            call: As in :class:`Recording`.
            inputs: All tensors that it reads, on one CUDA device.
        """
        known = (key, inputs[0].device, tuple((each.shape, each.stride(), each.dtype) for each in inputs))
        with self._lock:
            if known not in self._seen:
                if len(self._seen) < MOST_SEEN:
                    self._seen[known] = None
                return call(inputs)
            recording = self._seen[known] or self._recorded(call, inputs)
            self._seen[known] = recording
            return call(inputs) if recording is None else recording.replay(inputs)

    def nbytes(self) -> int:
        """Bytes that recordings keep, of all devices."""
        with self._lock:
            return sum(each.nbytes for each in self._kept.values())

    def clear(self) -> None:
        """Give the memory back, once what was replayed in it is done."""
        with self._lock:
            for kept in self._kept.values():
                kept.last.synchronize()
            self._seen.clear()
            self._kept.clear()

    def _recorded(self, call: Call, inputs: Sequence[Tensor]) -> Recording | None:
        """A recording, if there is room for it."""
        device = inputs[0].device
        if device not in self._kept:
            self._kept[device] = Kept(torch.cuda.graph_pool_handle())
        kept = self._kept[device]
        if kept.nbytes + nbytes_of(inputs) > MOST_KEPT_NBYTES:
            return None
        try:
            made = Recording(call, inputs, kept)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            return None
        kept.nbytes += made.nbytes
        return made


RECORDINGS = Recordings()


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into others like them; those of a number format together, for a launch of each takes the host long.

    >>> twos = [torch.zeros(2), torch.zeros(1, dtype=torch.float8_e4m3fn)]
    >>> copy_all(twos, [torch.full_like(each, 2) for each in twos])
    >>> twos
    [tensor([2., 2.]), tensor([2.], dtype=torch.float8_e4m3fn)]
    """
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for pair in zip(into, tensors, strict=True):
        # Not everywhere are numbers of eight bits copied together, but bytes are.
        to, given = (each.view(torch.uint8) for each in pair) if pair[0].dtype is torch.float8_e4m3fn else pair
        targets, sources = alike.setdefault(to.dtype, ([], []))
        targets.append(to)
        sources.append(given)
    for targets, sources in alike.values():
        torch._foreach_copy_(targets, sources)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out; a recording that this ends raises another error while it is being left.

    >>> ran_out_of_memory(torch.OutOfMemoryError()), ran_out_of_memory(RuntimeError("capture was invalidated"))
    (True, False)
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None


def nbytes_of(inputs: Sequence[Tensor]) -> int:
    """Bytes of the elements of tensors."""
    return sum(each.nbytes for each in inputs)


def pays(inputs: Sequence[Tensor]) -> bool:
    """Whether a call should be replayed: on a GPU, small, not itself being recorded, and where PyTorch manages memory."""
    if not all(each.is_cuda for each in inputs) or torch.cuda.is_current_stream_capturing():
        return False
    return nbytes_of(inputs) < MOST_NBYTES and not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
