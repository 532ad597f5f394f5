"""What is found on a stream of its own, beside launches that a device is waiting for."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quantwm_kernels.triton import psac, statistics


class Directions:
    """Principal directions of a moment, found on a stream of their own while k-means runs.

    Few programs take long over them, so they would leave a device idle.

    Args:
        mean: FP32 ``[B, H, D, D]``.
        rank: How many.
        begun: Behind what they are found; None where there is no device.

    Attributes:
        basis, energies: As :func:`quantwm_kernels.triton.statistics.principal_basis` returns them.
    """

    def __init__(self, mean: Tensor, rank: int, begun: torch.cuda.Event | None) -> None:
        self._stream = None
        if begun is not None:
            self._stream = _side_stream(mean.device)
            self._stream.wait_event(begun)
        with torch.cuda.stream(self._stream):
            self.basis, self.energies = statistics.principal_basis(mean, rank)
            self._matrix = psac.projection_of(self.basis.flatten(0, 1))

    def matrix(self) -> Tensor:
        """FP32 ``[S, D, r]`` to project on; whatever is launched from here on may use basis and energies, too."""
        if self._stream is not None:
            caller = torch.cuda.current_stream(self.basis.device)
            caller.wait_stream(self._stream)
            for each in (self.basis, self.energies, self._matrix):
                each.record_stream(caller)
        return self._matrix


def now(device: torch.device) -> torch.cuda.Event | None:
    """An event of the current stream of a CUDA device."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which directions are found; one of its own while launches are recorded, which nobody else may use."""
    return torch.cuda.Stream(device) if torch.cuda.is_current_stream_capturing() else _usual_side_stream(device)


@cache
def _usual_side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
