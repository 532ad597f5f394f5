"""The bundled demo world model as a host of experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from quantwm_core.errors import ParameterError, StateError
from quantwm_core.method import Scheme
from quantwm_eval.attached import AttachedCache
from quantwm_eval.demo import episodes as room_episodes
from quantwm_eval.demo.sampler import WorldPipeline, load
from quantwm_eval.evidence import Frames, LookAway
from quantwm_eval.host import Episode
from quantwm_models.attach import attach
from quantwm_models.observer import CacheObserver

# Held-out seeds, those that the model's gates are measured on: figures here and there can be compared.
FIRST_SEED = {"walk": 1_000, "look-away": 2_000}
MOST_SCENES = 1_000
JUDGED_FRAMES = 4
NOISE_STRIDE = 1 << 24


class DemoHost:
    """The bundled toy room and its video model.

    Args:
        pipeline: The model; None loads the bundled weights.
        device: Where to, as torch calls it.

    Raises:
        StateError: The bundled weights are not installed.
    """

    name = "demo"
    kinds: tuple[str, ...] = ("walk", "look-away")
    frames = 40
    frame_rate = 8
    chunks_per_seal = 2
    makes_batches = True

    def __init__(self, pipeline: WorldPipeline | None = None, device: str = "cpu") -> None:
        if pipeline is None:
            try:
                pipeline = load(device=device)
            except FileNotFoundError as error:
                raise StateError("the weights of the demo world are not installed; reinstall quantwm-eval") from error
        self.pipeline = pipeline
        self.chunk_frames = pipeline.config.chunk_frames
        self.device = pipeline.device

    def frames_of(self, chunks: int) -> int:
        """Frames that so many chunks make."""
        return chunks * self.chunk_frames

    def check(self, scenes: Sequence[int], frames: int, degrees: int) -> None:
        """Raise where the world cannot do these scenes.

        Raises:
            ParameterError: The frames do not fill chunks or exceed the model, the angle is no multiple of 10, or there
                is no such scene.
        """
        most = self.pipeline.config.max_frames - self.chunk_frames
        if frames % self.chunk_frames or not 0 < frames <= most:
            raise ParameterError(
                f"frames {frames}: the demo world makes {self.chunk_frames} at a time, "
                f"need a multiple of {self.chunk_frames} up to {most}"
            )
        if degrees % 10 or not 0 < degrees <= 180:
            raise ParameterError(f"degrees {degrees}: need a multiple of 10 from 10 to 180")
        if not all(0 <= scene < MOST_SCENES for scene in scenes):
            raise ParameterError(f"scenes {min(scenes)} to {max(scenes)}: the demo world has 0 to {MOST_SCENES - 1}")

    def episodes(self, kind: str, scenes: Sequence[int], frames: int, degrees: int) -> tuple[Episode, ...]:
        """Make the episodes of some scenes.

        Raises:
            ParameterError: As :meth:`check`.
        """
        self.check(scenes, frames, degrees)
        seeds = torch.tensor([FIRST_SEED[kind] + scene for scene in scenes])
        first = self.chunk_frames
        if kind == "walk":
            walk = room_episodes.random_walk(seeds, first + frames)
            video = walk.video().numpy()
            actions = walk.actions[:, first:].numpy()
            return tuple(
                Episode(kind, scene, video[i, :first], actions[i], video[i, first:]) for i, scene in enumerate(scenes)
            )
        made = room_episodes.look_away(seeds, degrees)
        video, absent, region = (tensor.numpy() for tensor in (made.video, made.counterfactual, made.mask))
        region[:, :-JUDGED_FRAMES] = False
        return tuple(
            Episode(
                kind,
                scene,
                video[i, :first],
                made.actions[i].numpy(),
                video[i, first:],
                LookAway(video[i, first:], absent[i, first:], region[i, first:]),
            )
            for i, scene in enumerate(scenes)
        )

    @contextmanager
    def attach(
        self, scheme: Scheme, observers: Sequence[CacheObserver], window: int | None = None
    ) -> Iterator[AttachedCache]:
        """Put a cache under the model for the length of a ``with`` block.

        Raises:
            ParameterError: The model has no such window.
        """
        own, most = self.pipeline.local_attn_chunks, self.pipeline.config.past_chunks
        if window is not None and not 1 <= window <= most:
            raise ParameterError(f"window {window}: the demo world sees 1 to {most} past chunks")
        self.pipeline.local_attn_chunks = own if window is None else window
        try:
            with attach(self.pipeline, scheme, observers=tuple(observers)) as attachment:
                yield AttachedCache(attachment)
        finally:
            self.pipeline.local_attn_chunks = own

    def generate(self, episodes: Sequence[Episode], seeds: Sequence[int], progress: Callable[[], None]) -> list[Frames]:
        """Generate a batch of episodes of equal length; noise depends on a video's own scene and seed only."""
        noise = [FIRST_SEED[e.kind] + e.scene + NOISE_STRIDE * seed for e, seed in zip(episodes, seeds, strict=True)]
        first = torch.stack([torch.from_numpy(episode.first_frames) for episode in episodes])
        actions = torch.stack([torch.from_numpy(episode.actions) for episode in episodes])
        videos = self.pipeline.generate(first, actions, seeds=noise, progress=lambda _made, _all: progress())
        return list(videos.cpu().numpy())
