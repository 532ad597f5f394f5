"""A world model of a few hundred numbers, driven through a real cache: hosts and their tests without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quantwm_core.errors import ParameterError
from quantwm_core.method import Scheme, scheme
from quantwm_eval.evidence import CacheBytes, Frames, LookAway
from quantwm_eval.host import CacheUse, Episode
from quantwm_models.cache import LayerCache
from quantwm_models.observer import CacheObserver

SIDE, CHUNK, HEADS, CHANNELS, LAYERS = 32, 2, 2, 16, 2
ENLARGED = 2  # the world is 16 pixels wide; LPIPS looks at frames of 31 or more
TOKENS = CHUNK * 16
WINDOW = 4 * TOKENS


def layer_cache(chosen: Scheme, layer: int = 0, observers: Sequence[CacheObserver] = ()) -> LayerCache:
    return LayerCache(chosen, layer=layer, window=WINDOW, observers=observers)


@dataclass
class FakeAttached:
    caches: list[LayerCache]

    def use(self) -> CacheUse:
        reports = [cache.report() for cache in self.caches]
        units = sum(chunk.bf16_nbytes for cache in self.caches for chunk in cache.chunks)
        active = sum(report.active_nbytes for report in reports)
        live = active + sum(report.sealed_bf16_nbytes for report in reports)
        stored = CacheBytes(
            sum(report.sealed_nbytes for report in reports),
            units,
            active,
            live,
            sum(report.state_nbytes for report in reports),
            sum(report.shared_nbytes for report in reports),
        )
        return CacheUse(stored, sum(r.seal_seconds for r in reports), sum(r.decode_seconds for r in reports))


@dataclass
class FakeHost:
    """Frames are patches; a layer attends from noisy patches to all cached ones and adds what it finds.

    Attributes:
        unsteady: Whether rollouts differ from each other, so that the control must fail.
        batches: Sizes of the batches that were asked for.
    """

    unsteady: bool = False
    name: str = "demo"
    kinds: tuple[str, ...] = ("walk", "look-away")
    frames: int = 40
    frame_rate: int = 4
    chunks_per_seal: int = 2
    makes_batches: bool = True
    batches: list[int] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _scheme: Scheme | None = None
    _observers: Sequence[CacheObserver] = ()
    _attached: FakeAttached | None = None

    def frames_of(self, chunks: int) -> int:
        return chunks * CHUNK

    def check(self, scenes: Sequence[int], frames: int, degrees: int) -> None:
        if frames % CHUNK:
            raise ParameterError(f"frames {frames}: need a multiple of {CHUNK}")

    def episodes(self, kind: str, scenes: Sequence[int], frames: int, degrees: int) -> tuple[Episode, ...]:
        return tuple(self._episode(kind, scene, frames) for scene in scenes)

    @contextmanager
    def attach(
        self, chosen: Scheme, observers: Sequence[CacheObserver], window: int | None = None
    ) -> Iterator[FakeAttached]:
        self._scheme, self._observers = chosen, observers
        self._attached = FakeAttached([])
        try:
            yield self._attached
        finally:
            self._scheme, self._observers, self._attached = None, (), None

    def generate(self, episodes: Sequence[Episode], seeds: Sequence[int], progress: Callable[[], None]) -> list[Frames]:
        self.batches.append(len(episodes))
        caches = [layer_cache(self._scheme or _plain(), layer, self._observers) for layer in range(LAYERS)]
        if self._attached is not None:
            self._attached.caches[:] = caches
        first = torch.from_numpy(np.stack([episode.first_frames for episode in episodes]))
        state = first[:, -CHUNK:, ::ENLARGED, ::ENLARGED].float() / 255
        noise = [torch.Generator().manual_seed(1000 * seed + e.scene) for e, seed in zip(episodes, seeds, strict=True)]
        chunks = []
        for _ in range(len(episodes[0].actions) // CHUNK):
            drawn = torch.stack([torch.randn(state.shape[1:], generator=generator) for generator in noise])
            state = self._step(state + 0.1 * drawn, caches)
            chunks.append(state)
            progress()
        if self.unsteady:
            chunks[-1] = 1 - chunks[-1] if len(self.batches) % 2 else chunks[-1]
        video = (torch.cat(chunks, 1).clamp(0, 1) * 255).round().to(torch.uint8)
        return list(video.repeat_interleave(ENLARGED, 2).repeat_interleave(ENLARGED, 3).numpy())

    def _step(self, frames: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        split = frames.unflatten(3, (4, 4)).unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5, 6)
        x = split.reshape(len(frames), TOKENS, -1)
        for layer, cache in enumerate(caches):
            q, k, v = (x @ _weight(layer, part) for part in range(3))
            q, k, v = (t.unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2).bfloat16() for t in (q, k, v))
            cache.append(k, v)
            found = cache.attend(q).float().transpose(1, 2).flatten(2)
            x = 0.5 * x + 0.5 * torch.sigmoid(found @ _weight(layer, 3).T)
        patches = x.view(len(frames), CHUNK, 4, 4, 4, 4, 3).permute(0, 1, 2, 4, 3, 5, 6)
        return patches.reshape(frames.shape)

    def _episode(self, kind: str, scene: int, frames: int) -> Episode:
        draw = np.random.default_rng(scene)
        first = draw.integers(0, 256, (CHUNK, SIDE, SIDE, 3), dtype=np.uint8)
        truth = draw.integers(0, 256, (frames, SIDE, SIDE, 3), dtype=np.uint8)
        look_away = None
        if kind == "look-away":
            region = np.zeros((frames, SIDE, SIDE), bool)
            region[-1, 4:8, 4:8] = True
            look_away = LookAway(truth, 255 - truth, region)
        return Episode(kind, scene, first, np.zeros(frames, np.int64), truth, look_away)


def _plain() -> Scheme:
    return scheme("bf16")


def _weight(layer: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * layer + part)
    return torch.randn(48, HEADS * CHANNELS, generator=generator) / 3
