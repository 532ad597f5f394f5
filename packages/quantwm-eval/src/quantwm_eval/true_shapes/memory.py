"""What is allocated on a device while a video is made."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch


class DeviceMemory:
    """Memory of a device, watched inside; a CPU does not tell.

    Attributes:
        before: Bytes that were allocated when the watch began.

    >>> with DeviceMemory(torch.device("cpu")) as memory:
    ...     memory.before, memory.most
    (0, 0)
    """

    def __init__(self, device: torch.device) -> None:
        self.before = 0
        self._device = device

    @property
    def most(self) -> int:
        """Most bytes that were allocated at once since then."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing has to be undone."""
