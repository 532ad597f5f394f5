"""What the reads of one layer keep from one to the next: how they are planned, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from quantwm_kernels.reading import ReadPlan
from quantwm_models.contents import Contents, pieces, placed
from quantwm_models.offload import Staged
from quantwm_models.stopwatch import Stopwatch
from quantwm_models.workspace import Segment, Workspace

# Different ranges that a host reads in turn between two chunks.
MOST_PLANS = 8


class Reads:
    """Reads of one layer through a workspace.

    Attributes:
        captured: Whether a CUDA graph holds one of the plans: the memory of its units must then stay theirs.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.captured = False
        self._watch = Stopwatch()
        self._plans: dict[tuple[tuple[int, ...], tuple[tuple[Segment, int], ...]], ReadPlan] = {}
        self._generation = 0

    def seconds(self) -> float:
        """Seconds that filling the workspace took; waits for what was launched."""
        return self._watch.seconds()

    def restart(self) -> None:
        """Count time anew, and forget the plans."""
        self._watch = Stopwatch()
        self.forget()

    def forget(self) -> None:
        """Forget the plans: they keep units alive, and point to where they were."""
        self._plans.clear()
        self.captured = False

    def fill(
        self,
        contents: Contents,
        segments: tuple[Segment, ...],
        into: tuple[Tensor, Tensor],
        staged: Callable[[Sequence[Segment]], AbstractContextManager[Staged]],
    ) -> None:
        """Bring the workspace's views to hold ``segments``; leading ones that are there already are kept.

        Args:
            contents: What is read.
            segments: Of them.
            into: The views, ``[B, H, n, D]``.
            staged: Brings the units to where they can be read.
        """
        kept = self.workspace.kept(segments)
        if kept == len(segments):
            return
        begun = self._watch.start(into[0].device)
        self.workspace.holds(segments[:kept])
        offset = sum(segment.stop - segment.start for segment in segments[:kept])
        missing = segments[kept:]
        keys, values = (each[:, :, offset:] for each in into)
        with staged(missing) as there:
            self.plan(missing, there).into(keys, values)
        contents.write_exact(missing, keys, values)
        self.workspace.holds(segments)
        self._watch.stop(begun)

    def plan(self, segments: tuple[Segment, ...], staged: Staged) -> ReadPlan:
        """How to reconstruct the sealed ones among ``segments``, made once as long as no unit comes or goes."""
        if staged.slot is not None and staged.key[0] != self._generation:
            self._generation = staged.key[0]
            self.forget()  # they keep memory alive that was given back
        sealed = {unit.serial for unit in staged.units}
        wanted = tuple((segment, place) for segment, place in placed(segments) if segment.source in sealed)
        if (staged.key, wanted) not in self._plans:
            if len(self._plans) == MOST_PLANS:
                self._plans.clear()
            self._plans[staged.key, wanted] = ReadPlan(pieces(segments, staged.chunks()))
        self.captured = self.captured or capturing()
        return self._plans[staged.key, wanted]


def capturing() -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
