"""What the reads of one layer keep from one to the next: how they are planned, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from quantwm_core.stream import Stream
from quantwm_kernels.reading import ReadPlan
from quantwm_models.contents import Contents, Part
from quantwm_models.offload import Staged
from quantwm_models.stopwatch import Stopwatch
from quantwm_models.workspace import Workspace

# Different ranges that a host reads in turn between two chunks.
MOST_PLANS = 8

# Hosts read in rounds of four or five passes, and some twice in each: one read in so many is of each kind in turn.
TIMED_OF = 7


class Reads:
    """Reads of one layer through a workspace.

    Attributes:
        captured: Whether a CUDA graph holds one of the plans: the memory of its units must then stay theirs.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.captured = False
        self._watch = Stopwatch(TIMED_OF)
        self._plans: dict[tuple[tuple[int, ...], int, tuple[Part, ...]], ReadPlan] = {}
        self._generation = 0
        self._stream: Stream | None = None
        self._parts: dict[tuple[int, int], tuple[Part, ...]] = {}

    def seconds(self) -> float:
        """Seconds that filling the workspace took; waits for what was launched."""
        return self._watch.seconds()

    def restart(self) -> None:
        """Count time anew, and forget the plans."""
        self._watch.restart()
        self.forget()

    def forget(self) -> None:
        """Forget the plans: they keep units alive, and point to where they were."""
        self._plans.clear()
        self.captured = False

    def parts(self, contents: Contents, start: int, stop: int) -> tuple[Part, ...]:
        """Where the window tokens ``start`` to ``stop`` are stored; looked up once as long as no token comes or goes.

        Raises:
            RangeError: The range lies outside the window.
        """
        if contents.stream is not self._stream or len(self._parts) > MOST_PLANS:
            self._stream, self._parts = contents.stream, {}
        if type(start) is not int or type(stop) is not int:  # what is no number is refused, not looked up
            return contents.parts(start, stop)
        found = self._parts.get((start, stop))
        if found is None:
            found = self._parts[start, stop] = contents.parts(start, stop)
        return found

    def fill(
        self,
        contents: Contents,
        parts: tuple[Part, ...],
        device: torch.device,
        staged: Callable[[Sequence[Part]], AbstractContextManager[Staged | None]],
    ) -> None:
        """Bring the workspace to hold ``parts``; leading ones that are there already are kept.

        Args:
            contents: What is read.
            parts: Of them.
            device: Where the workspace is.
            staged: Brings the units from host memory, if they are there.
        """
        segments = contents.segments(parts)
        kept = self.workspace.kept(segments)
        if kept == len(segments):
            return
        begun = self._watch.start(device)
        self.workspace.holds(segments[:kept])
        missing = parts[kept:]
        with staged(missing) as there:
            self.plan(contents, missing, there).into(*self.workspace.part(missing[0].place, missing[-1].end))
        places: list[Tensor] = []
        exact: list[Tensor] = []
        for part, *pair in contents.plain(missing):
            places += self.workspace.part(part.place, part.end)
            exact += pair
        if exact:
            torch._foreach_copy_(places, exact)  # in one launch, where they lie alike
        self.workspace.holds(segments)
        self._watch.stop(begun)

    def plan(self, contents: Contents, parts: tuple[Part, ...], staged: Staged | None) -> ReadPlan:
        """How to reconstruct the sealed ones among ``parts`` from the first of them on, made once as long as no unit comes or goes."""
        if staged is not None and staged.key[0] != self._generation:
            self._generation = staged.key[0]
            self.forget()  # they keep memory alive that was given back
        sealed = tuple([part for part in parts if part.unit is not None])
        known = (() if staged is None else staged.key, parts[0].place if parts else 0, sealed)
        plan = self._plans.get(known)
        if plan is None:
            if len(self._plans) == MOST_PLANS:
                self._plans.clear()
            chunks = contents.chunks() if staged is None else staged.chunks()
            plan = self._plans[known] = ReadPlan(contents.pieces(parts, chunks))
        self.captured = self.captured or capturing()
        return plan


def capturing() -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
