"""The pictures that a run leaves for its report: a few whole videos, and every look-away ending."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass, field

import matplotlib.image
import numpy as np
from jaxtyping import UInt8

from quantwm_eval import film
from quantwm_eval.evidence import Frames
from quantwm_eval.experiment import CONTROL
from quantwm_eval.run import Outcome

TRUTH = "truth"
FILM_SIDE = 256

Picture = UInt8[np.ndarray, "height width 3"]


@dataclass(frozen=True)
class Tile:
    """One of several videos that play in step.

    Attributes:
        label: Method, or ``"truth"``.
        film: MP4 file.
        difference: MP4 file of the difference from BF16, for compressed methods.
    """

    label: str
    film: bytes
    difference: bytes | None


@dataclass(frozen=True)
class Reel:
    """Videos of one episode under every method."""

    kind: str
    scene: int
    frames: int
    rate: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Ending:
    """How one method's look-away episode ended.

    Attributes:
        picture: Last frame, as a PNG file.
        redrawn: Whether the ball is there; None for the truth.
    """

    picture: bytes
    redrawn: bool | None


@dataclass
class Gallery:
    """Gathers pictures while a run goes on.

    Args:
        rate: Frames a second.
        films: How many scenes of each kind are kept as videos: the first ones, whatever they show.

    Attributes:
        endings: By scene and label, in the order of the run.
        before: By scene, the ball before looking away, as a PNG file.
        away: By scene, the view farthest away, as a PNG file.
    """

    rate: int
    films: int = 2
    endings: dict[int, dict[str, Ending]] = field(default_factory=dict)
    before: dict[int, bytes] = field(default_factory=dict)
    away: dict[int, bytes] = field(default_factory=dict)
    _videos: dict[tuple[str, int], dict[str, Frames]] = field(default_factory=dict)
    _seeds: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Keep what the page will show of a finished video; further seeds of a scene are not shown."""
        cell, episode = outcome.cell, outcome.episode
        key = (cell.kind, cell.scene)
        if self._seeds.setdefault(key, cell.seed) != cell.seed:
            return
        if episode.look_away is not None and episode.truth is not None:
            if cell.scene not in self.endings:
                self.before[cell.scene] = png(episode.first_frames[-1])
                self.away[cell.scene] = png(episode.truth[len(episode.truth) // 2 - 1])
                self.endings[cell.scene] = {TRUTH: Ending(png(episode.truth[-1]), None)}
            redrawn = cell.measurement.values.get("balls_redrawn")
            ending = Ending(png(outcome.video[-1]), None if redrawn is None else bool(redrawn))
            self.endings[cell.scene][cell.method] = ending
        shown = self._videos.get(key)
        if shown is None and sum(kind == cell.kind for kind, _ in self._videos) < self.films:
            shown = self._videos[key] = {} if episode.truth is None else {TRUTH: episode.truth}
        if shown is not None:
            shown[cell.method] = outcome.video

    def reels(self) -> Iterator[Reel]:
        """Encode the kept videos, one episode at a time, look-away episodes first."""
        for (kind, scene), videos in sorted(self._videos.items()):
            reference = videos.get(CONTROL)
            tiles = []
            for label, frames in videos.items():
                compared = reference is not None and label not in (TRUTH, CONTROL)
                differs = film.difference(frames, reference) if compared and reference is not None else None
                film_of_difference = None if differs is None else show(differs, self.rate)
                tiles.append(Tile(label, show(frames, self.rate), film_of_difference))
            yield Reel(kind, scene, len(next(iter(videos.values()))), self.rate, tuple(tiles))


def show(frames: Frames, rate: int) -> bytes:
    """MP4 file of a video, small ones enlarged by whole factors."""
    return film.encode(film.enlarge(frames, max(1, FILM_SIDE // max(frames.shape[1:3]))), rate)


def png(picture: Picture) -> bytes:
    """PNG file of a picture."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, picture, format="png", metadata={"Software": "quantwm"})
    return buffer.getvalue()


def data_uri(content: bytes, kind: str) -> str:
    """A file as an address that needs no network.

    >>> data_uri(b"abc", "image/png")
    'data:image/png;base64,YWJj'
    """
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
