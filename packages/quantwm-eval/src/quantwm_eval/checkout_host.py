"""What the hosts have in common that run from a user's checkout: scenes from a suite, one video at a time, chunks told of."""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantwm_core.errors import FormatError, ParameterError
from quantwm_core.method import Scheme
from quantwm_eval.attached import AttachedCache
from quantwm_eval.checkout_given import POSITIONS, check_frames, check_numbers, check_weights
from quantwm_eval.evidence import Frames
from quantwm_eval.host import Episode
from quantwm_eval.latents import frames_of
from quantwm_eval.suite import Scene
from quantwm_models.attach import attach
from quantwm_models.observer import CacheObserver

NOISE_STRIDE = 1 << 24


class CheckoutHost(ABC):
    """A pipeline of the host's own, with the scenes of a suite; a subclass says how one video is asked for.

    Args:
        pipeline: What an adapter of that name attaches to.
        suite: Scene ``n`` is the n-th, from 0.
        device: Where it runs.
    """

    name: ClassVar[str]
    kinds: tuple[str, ...] = ("prompt",)
    frames: int
    frame_rate: int
    makes_batches = False  # what a host draws for one video would depend on the others
    chunks_per_seal = 2
    chunk: int
    """Latent frames that are generated together."""
    most_chunks: int = POSITIONS
    """Chunks that the host's own cache or positions hold."""

    def __init__(self, pipeline: Any, suite: Sequence[Scene], device: torch.device) -> None:
        self.pipeline, self.suite, self.device = pipeline, suite, device

    def frames_of(self, chunks: int) -> int:
        """Frames of video that so many chunks make."""
        return frames_of(chunks * self.chunk)

    @abstractmethod
    def check_scene(self, scene: Scene, frames: int) -> None:
        """Raise where a scene lacks what the host needs for so many frames.

        Raises:
            QuantWMError: The message says what is missing.
        """

    @abstractmethod
    def video(self, scene: Scene, frames: int, number: int, progress: Callable[[], None]) -> Frames:
        """Generate.

        Args:
            scene: What is asked for.
            frames: How many.
            number: What noise is to depend on; global generators are seeded with it, and put back afterwards.
            progress: To be called after every chunk.
        """

    def check(self, scenes: Sequence[int], frames: int, degrees: int) -> None:
        """Raise where there are not so many scenes, one lacks something, or frames do not fill chunks that the host holds.

        Raises:
            QuantWMError: The message says what would do.
        """
        check_numbers(scenes, self.suite)
        check_frames(self.name, frames, [self.frames_of(1 + chunk) for chunk in range(self.most_chunks)])
        with redirect_stdout(sys.stderr):  # of hosts whose own code reads a scene
            for scene in scenes:
                self.check_scene(self.suite[scene], frames)

    def episodes(self, kind: str, scenes: Sequence[int], frames: int, degrees: int) -> tuple[Episode, ...]:
        """An episode for each scene; what is done in it, the host's pipeline is told.

        Raises:
            QuantWMError: As :meth:`check`.
        """
        self.check(scenes, frames, degrees)
        none, still = np.zeros((0, 1, 1, 3), np.uint8), np.zeros(frames, np.int64)
        return tuple(Episode(kind, scene, none, still, prompt=self.suite[scene].prompt) for scene in scenes)

    @contextmanager
    def attach(
        self, scheme: Scheme, observers: Sequence[CacheObserver], window: int | None = None
    ) -> Iterator[AttachedCache]:
        """Put a cache under the pipeline for the length of a ``with`` block.

        Raises:
            ParameterError: ``window``: the host's is part of its weights.
        """
        if window is not None:
            raise ParameterError(f"window {window}: the window of {self.name} is part of its configuration")
        with attach(self.pipeline, scheme, adapter=self.name, observers=tuple(observers)) as attachment:
            yield AttachedCache(attachment)

    def generate(self, episodes: Sequence[Episode], seeds: Sequence[int], progress: Callable[[], None]) -> list[Frames]:
        """Generate one video; noise depends on its scene and seed only.

        Args:
            episodes: One.
            seeds: Its seed.
            progress: Called after every chunk.
        """
        (episode,), (seed,) = episodes, seeds
        number = NOISE_STRIDE * seed + episode.scene
        with seeded(number), torch.no_grad(), redirect_stdout(sys.stderr):
            return [self.video(self.suite[episode.scene], len(episode.actions), number, progress)]


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed the global generators that hosts draw from, PyTorch's and Python's, and put them back afterwards."""
    python = random.getstate()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(number)
        random.seed(number)
        try:
            yield
        finally:
            random.setstate(python)


@contextmanager
def watched(model: torch.nn.Module, progress: Callable[[], None]) -> Iterator[None]:
    """Tell of every chunk as soon as the next one, or the end, shows that it is done.

    Args:
        model: Called with the keyword ``current_start``, the chunk's first token.
        progress: Who is told.
    """
    begun: set[int] = set()

    def called(_module: object, _arguments: object, named: dict[str, Any]) -> None:
        if begun and named["current_start"] not in begun:
            progress()
        begun.add(named["current_start"])

    handle = model.register_forward_pre_hook(called, with_kwargs=True)
    try:
        yield
        progress()
    finally:
        handle.remove()


def levels(video: Tensor | np.ndarray, low: float = 0, high: float = 1) -> Frames:
    """Grey levels of a video.

    Args:
        video: Floats ``[frames, height, width, channels]``.
        low: What is black.
        high: What is white.

    Returns:
        uint8, of the same shape.

    >>> levels(np.array([[[[0.0, 0.5, 2.0]]]]))
    array([[[[  0, 128, 255]]]], dtype=uint8)
    """
    scaled = (torch.as_tensor(video).float() - low) * (255 / (high - low))
    return scaled.clamp(0, 255).round().to(torch.uint8).cpu().numpy()


def weights_of(path: Path) -> dict[str, Tensor]:
    """Read a state dict.

    Raises:
        FormatError: It is no safetensors file.
    """
    check_weights(path)
    return load_file(path)


def load_weights(model: torch.nn.Module, path: Path, named: Callable[[str], str] = lambda name: name) -> None:
    """Load a released state dict into the host's model, all of it.

    Args:
        model: The host's.
        path: Its safetensors file.
        named: From the names in the file to those of the model.

    Raises:
        FormatError: The file is no safetensors file, or another model's.
    """
    plain = {named(name): tensor for name, tensor in weights_of(path).items()}
    try:
        model.load_state_dict(plain)
    except RuntimeError as error:
        raise FormatError(f"{path}: not the weights of {type(model).__name__}: {str(error)[:500]}") from error
