"""What a world model must offer to be measured; fulfilled by :mod:`quantwm_eval.demo_host`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int64

from quantwm_core.errors import ParameterError
from quantwm_core.method import Scheme
from quantwm_eval.evidence import CacheBytes, Frames, LookAway
from quantwm_models.observer import CacheObserver


@dataclass(frozen=True)
class Episode:
    """One thing to generate: where it starts, what is done, and what would truly be seen.

    Attributes:
        kind: ``"walk"``, ``"look-away"`` or ``"prompt"``.
        scene: Its number.
        first_frames: Real frames to start from; none where a prompt is all that there is.
        actions: One per generated frame.
        truth: True video of the generated frames; None where there is none.
        look_away: What the look-away test needs, for episodes of that kind.
        prompt: What the video is to show, for hosts that read.
    """

    kind: str
    scene: int
    first_frames: Frames
    actions: Int64[np.ndarray, " frames"]
    truth: Frames | None = None
    look_away: LookAway | None = None
    prompt: str = ""


@dataclass(frozen=True)
class CacheUse:
    """What the caches of all layers cost, over the whole batch.

    Attributes:
        stored: Bytes at this moment.
        seal_seconds: Time spent encoding so far.
        decode_seconds: Time spent reconstructing so far.
    """

    stored: CacheBytes
    seal_seconds: float
    decode_seconds: float


class Attached(Protocol):
    """A cache that stands under a live host."""

    def use(self) -> CacheUse:
        """What it cost so far."""


def check_batch(host: str, batch: int, makes_batches: bool) -> None:
    """Refuse several videos together where a host of that name makes one.

    Raises:
        ParameterError: It does.
    """
    if batch > 1 and not makes_batches:
        raise ParameterError(f"batch {batch}: host {host!r} makes one video at a time; use batch 1")


class Host(Protocol):
    """A world model that generates episodes, with or without a quantwm cache under it.

    Attributes:
        name: Public name.
        kinds: Kinds of episodes that it can do.
        frames: Frames of a video where nobody says otherwise.
        frame_rate: Frames a second.
        chunks_per_seal: Chunks per sealed unit, likewise.
        device: Where it runs.
        makes_batches: Whether it makes several videos together.
    """

    name: str
    kinds: tuple[str, ...]
    frames: int
    frame_rate: int
    chunks_per_seal: int
    device: torch.device
    makes_batches: bool

    def frames_of(self, chunks: int) -> int:
        """Frames that so many chunks, the first ones, make."""

    def check(self, scenes: Sequence[int], frames: int, degrees: int) -> None:
        """Raise where the model cannot do these scenes.

        Raises:
            ParameterError: There is no such scene, or the frames or the angle do not fit the model.
        """

    def episodes(self, kind: str, scenes: Sequence[int], frames: int, degrees: int) -> tuple[Episode, ...]:
        """Make the episodes of some scenes.

        Raises:
            ParameterError: The model cannot do that many frames or that angle.
        """

    def attach(
        self, scheme: Scheme, observers: Sequence[CacheObserver], window: int | None = None
    ) -> AbstractContextManager[Attached]:
        """Put a cache under the model for the length of a ``with`` block.

        Args:
            scheme: How the cache is stored.
            observers: Who is told of it.
            window: Past chunks that the model sees meanwhile; None leaves it its own window.

        Raises:
            ParameterError: The model has no such window.
        """

    def generate(self, episodes: Sequence[Episode], seeds: Sequence[int], progress: Callable[[], None]) -> list[Frames]:
        """Generate a batch of episodes of equal length.

        Args:
            episodes: What to generate.
            seeds: Noise seed of each.
            progress: Called after every chunk.
        """
