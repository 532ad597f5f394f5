"""Replaying the launches of a call as one CUDA graph, where the host takes longer over them than the device.

A graph reads and writes memory of its own: the tensors of a call are copied there, and what it makes is copied out. That is
little beside tens of launches as long as the tensors are small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor

MOST_NBYTES = 64 << 20
"""Bytes of a call's tensors from which on the device takes longer than the host, and copies would cost memory."""

MOST_RECORDINGS = 4
"""Recordings that are kept, those that were used last."""

Made = Sequence[Mapping[str, Tensor]]
Call = Callable[[Sequence[Tensor]], Made]


class Recording:
    """A call's launches, and the memory that they read and write.

    Args:
        call: Launches kernels, and waits for nothing.
        inputs: Tensors like those that it will be given.
    """

    def __init__(self, call: Call, inputs: Sequence[Tensor]) -> None:
        device = inputs[0].device
        with torch.inference_mode(False), torch.no_grad():
            self._inputs = [torch.empty_like(each).copy_(each) for each in inputs]
            beside = torch.cuda.Stream(device)
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):  # so that whatever happens once has happened
                call(self._inputs)
            torch.cuda.current_stream(device).wait_stream(beside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._made = call(self._inputs)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(device))

    def replay(self, inputs: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """What the call makes of other tensors, in memory of its own."""
        stream = torch.cuda.current_stream(self._inputs[0].device)
        stream.wait_event(self._copied)  # of a replay on another stream
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        made = [{name: tensor.clone() for name, tensor in each.items()} for each in self._made]
        self._copied.record(stream)
        return made


class Recordings:
    """Recordings of calls that came before, by what they depend on."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, Recording | None] = OrderedDict()
        self._lock = Lock()

    def run(self, key: Hashable, call: Call, inputs: Sequence[Tensor]) -> Made:
        """``call(inputs)``; from the second time on it is replayed.

        Args:
            key: What, beside the layout of ``inputs``, decides about the launches.
            call: As in :class:`Recording`.
            inputs: All tensors that it reads, on one CUDA device.
        """
        layouts = tuple((each.shape, each.stride(), each.dtype, each.data_ptr() % 16) for each in inputs)
        known = (key, inputs[0].device, layouts)
        with self._lock:
            if known not in self._seen:
                self._seen[known] = None
                self._forget()
                return call(inputs)
            recording = self._seen[known]
            if recording is None:
                recording = self._seen[known] = Recording(call, inputs)
            self._seen.move_to_end(known)
            self._forget()
            return recording.replay(inputs)

    def clear(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._seen.clear()

    def _forget(self) -> None:
        """Keep the last of those that were recorded, and of those that were seen once."""
        for recorded in (True, False):
            alike = [each for each, recording in self._seen.items() if (recording is not None) is recorded]
            for each in alike[:-MOST_RECORDINGS]:
                del self._seen[each]


RECORDINGS = Recordings()


def pays(inputs: Sequence[Tensor]) -> bool:
    """Whether a call should be replayed: on a GPU, small, and not itself being recorded."""
    if not all(each.is_cuda for each in inputs) or torch.cuda.is_current_stream_capturing():
        return False
    return sum(each.nbytes for each in inputs) < MOST_NBYTES
