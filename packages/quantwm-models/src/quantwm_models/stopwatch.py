"""How long work takes where it runs, which on a GPU the host's clock does not tell: there it only launches."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from quantwm_kernels.arrival import current_stream


class Mark(NamedTuple):
    """Where something began: on the host's clock, or on a GPU's stream, or untimed with neither."""

    host: float | None
    event: torch.cuda.Event | None = None
    stream: torch.cuda.Stream | None = None


class Stopwatch:
    """Seconds between starts and stops.

    On a GPU these are events in the stream that is current at the start: what was queued before does
    not count, nor does the time that the host waits, and only :meth:`seconds` waits for them. What a CUDA graph captures is
    not timed, and neither are its replays.

    Args:
        every: On a GPU one start in so many is timed, the first among them, and all so far tell how long each takes: events
            take the host about as long as what they time.

    >>> watch = Stopwatch()
    >>> watch.stop(watch.start(torch.device("cpu")))
    >>> watch.seconds() > 0
    True
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._before, self._started, self._timed = 0, 0, 0
        self._seconds, self._host_seconds = 0.0, 0.0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._device: torch.device | None = None
        self._spare: list[torch.cuda.Event] = []

    def restart(self) -> None:
        """Count anew, those that were started and stopped."""
        self._before, self._host_seconds = self._started, 0.0

    def start(self, device: torch.device) -> Mark:
        """Work on ``device`` begins."""
        if device.type != "cuda":
            return Mark(time.perf_counter())
        if torch.cuda.is_current_stream_capturing():
            return Mark(None)
        self._started += 1
        if (self._started - 1) % self._every:
            return Mark(None)
        stream, event = current_stream(device), self._event(device)
        event.record(stream)
        return Mark(None, event, stream)

    def stop(self, mark: Mark) -> None:
        """It is done, or launched."""
        if mark.host is not None:
            self._host_seconds += time.perf_counter() - mark.host
        elif mark.event is not None and mark.stream is not None:
            event = self._event(self._device)
            event.record(mark.stream)
            self._running.append((mark.event, event))
            while self._running and self._running[0][1].query():  # what is over need not be kept
                self._add_first()

    def seconds(self) -> float:
        """Seconds so far, once the GPU has passed all that was stopped."""
        while self._running:
            self._running[0][1].synchronize()
            self._add_first()
        each = self._seconds / self._timed if self._timed else 0.0
        return self._host_seconds + each * (self._started - self._before)

    def _add_first(self) -> None:
        first, last = self._running.popleft()
        self._timed += 1
        self._seconds += first.elapsed_time(last) / 1000  # from milliseconds
        self._spare += (first, last)

    def _event(self, device: torch.device | None) -> torch.cuda.Event:
        """An event that is not in use, and was on no other device."""
        if device != self._device:
            self._device, self._spare = device, []
            self._running.clear()
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
