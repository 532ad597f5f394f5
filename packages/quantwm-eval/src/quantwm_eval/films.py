"""Some of a run's videos on disk, and back into a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av

from quantwm_core.errors import FormatError
from quantwm_eval import film
from quantwm_eval.experiment import CONTROL, Experiment
from quantwm_eval.gallery import TRUTH, Reel, Tile, show
from quantwm_eval.run import Outcome

VIDEOS = "videos"
"""Folder beside the results."""


def stem(kind: str, scene: int, label: str) -> str:
    """Name of a video's file.

    >>> stem("walk", 0, "quantwm:rank=16")
    'walk-0-quantwm-rank=16'
    """
    return f"{kind}-{scene}-{label}".replace(":", "-").replace("/", "-")


@dataclass(frozen=True)
class Films:
    """Keeps the videos of an experiment's first scenes, whatever they show; further seeds are not kept.

    Attributes:
        folder: Where to; made when the first video comes.
        experiment: Whose videos.
        scenes: Of how many scenes.
        rate: Frames a second.
    """

    folder: Path
    experiment: Experiment
    scenes: int
    rate: int

    def add(self, outcome: Outcome) -> None:
        """Write a finished video, its difference from BF16, and what would truly be seen.

        Raises:
            OSError: A file cannot be written.
        """
        cell = outcome.cell
        if cell.scene not in self.experiment.scenes[: self.scenes] or cell.seed != self.experiment.seeds[0]:
            return
        self.folder.mkdir(exist_ok=True)
        name = stem(cell.kind, cell.scene, cell.method)
        (self.folder / f"{name}.mp4").write_bytes(show(outcome.video, self.rate))
        if cell.method != CONTROL:
            differs = film.difference(outcome.video, outcome.reference)
            (self.folder / f"{name}.difference.mp4").write_bytes(show(differs, self.rate))
        elif outcome.episode.truth is not None:
            truth = self.folder / f"{stem(cell.kind, cell.scene, TRUTH)}.mp4"
            truth.write_bytes(show(outcome.episode.truth, self.rate))


def paths(folder: Path, experiment: Experiment) -> dict[tuple[str, int, str], Path]:
    """What should be kept of all scenes under all methods: file by kind, scene and label, there or not."""
    labels = [method.label for method in experiment.methods]
    videos = [(kind, scene, label) for kind in experiment.kinds for scene in experiment.scenes for label in labels]
    return {video: folder / f"{stem(*video)}.mp4" for video in videos}


def reels(folder: Path, experiment: Experiment) -> Iterator[Reel]:
    """What :class:`Films` kept, look-away episodes first; nothing where there is no such folder.

    Raises:
        FormatError: A file is not a video.
        OSError: It cannot be read.
    """
    for kind in sorted(experiment.kinds):
        for scene in experiment.scenes:
            labels = (TRUTH, *(method.label for method in experiment.methods))
            paths = {label: folder / f"{stem(kind, scene, label)}.mp4" for label in labels}
            there = {label: path for label, path in paths.items() if path.is_file()}
            if there:
                frames, rate = _length(next(iter(there.values())))
                yield Reel(kind, scene, frames, rate, tuple(_tile(label, path) for label, path in there.items()))


def _tile(label: str, path: Path) -> Tile:
    difference = path.with_name(f"{path.stem}.difference.mp4")
    return Tile(label, path.read_bytes(), difference.read_bytes() if difference.is_file() else None)


def _length(path: Path) -> tuple[int, int]:
    """Frames, and frames a second."""
    try:
        with av.open(str(path), "r") as container:
            stream = container.streams.video[0]
            return stream.frames, round(stream.average_rate or 0)
    except (av.FFmpegError, IndexError) as error:
        raise FormatError(f"{path}: not a video that can be read: {error}") from error
