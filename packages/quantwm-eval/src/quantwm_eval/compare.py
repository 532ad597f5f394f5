"""Two videos, or two folders of them, scored by every metric that needs nothing but pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantwm_core.errors import ParameterError, ShapeError, StateError
from quantwm_eval import metrics, results, summary, text_table
from quantwm_eval.estimate import bootstrap
from quantwm_eval.evidence import Curve, Evidence, Frames
from quantwm_eval.footage import Footage, Picture, find
from quantwm_eval.metric import Measurement, Metric, Quantity, Walk
from quantwm_eval.provenance import Provenance

BLOCK = 8
"""Frames that are held at a time."""
FORMAT = "quantwm-scores"
VERSION = 1


@dataclass(frozen=True)
class Pair:
    """A video and what it is compared with.

    Attributes:
        name: The name that both bear; the video's path where two paths were given.
        video: The video.
        reference: Its reference.
    """

    name: str
    video: Footage
    reference: Footage


@dataclass(frozen=True)
class Score:
    """What two videos give.

    Attributes:
        pair: The videos.
        frames: Their length.
        measurement: Figures of the video against its reference.
        of_reference: Figures of the reference alone, from metrics that need no second video.
    """

    pair: Pair
    frames: int
    measurement: Measurement
    of_reference: Mapping[str, float]


def names() -> tuple[str, ...]:
    """Metrics that need nothing but pictures, whether or not what they depend on is installed.

    >>> "psnr" in names() and "memory" not in names()
    True
    """
    return tuple(name for name, metric in metrics.loaded().items() if metric.pictorial)


def match(video: Path, reference: Path) -> list[Pair]:
    """Match what lies at two paths: two videos, or two folders of videos by name.

    Raises:
        StateError: A path holds nothing that can be compared, or a video has no partner.
        FormatError: Two files of a folder bear one name.
    """
    ours, theirs = find(video), find(reference)
    if ("" in ours) is not ("" in theirs):
        one, many = (video, reference) if "" in ours else (reference, video)
        raise StateError(f"{one} is one video, {many} a folder of videos; name two videos or two folders")
    lonely = [(name, video, reference) for name in ours if name not in theirs]
    lonely += [(name, reference, video) for name in theirs if name not in ours]
    if lonely:
        told = "; ".join(f"{name!r} of {here} has no partner in {there}" for name, here, there in lonely)
        raise StateError(f"{told}; partners bear the same name")
    return [Pair(name or str(video), ours[name], theirs[name]) for name in ours]


def score(pair: Pair, wanted: Sequence[str]) -> Score:
    """Score two videos in one pass, a few frames at a time.

    A metric that looks at pairs of frames gives NaN for videos of one frame.

    Args:
        pair: What to compare.
        wanted: Names of metrics, each one of :func:`names`.

    Raises:
        ParameterError: The frame rates differ, or a metric needs more than pictures.
        ShapeError: The videos differ in length or size, or are too small for a metric.
        FormatError: A file cannot be read.
        UnknownNameError: There is no such metric.
    """
    chosen = [metrics.get(name) for name in wanted]
    if not chosen:
        raise ParameterError(f"metrics: got none, need at least one of {', '.join(names())}")
    for metric in chosen:
        if not metric.pictorial:
            raise ParameterError(f"metric {metric.name!r} needs {', '.join(metric.needs)}; comparing takes {names()}")
    _check_rates(pair)
    steps = [_Steps(metric.walk) for metric in chosen if metric.walk is not None]
    alone = [_Steps(metric.walk) for metric in chosen if metric.walk is not None and not metric.needs]
    held: list[tuple[Frames, Frames]] = []
    frames = 0
    for video, reference in _blocks(pair):
        frames += len(video)
        for step in steps:
            step.take(video, reference)
        for step in alone:
            step.take(reference, reference)
        if len(steps) < len(chosen):
            held.append((video, reference))
    found = dict(zip((m.name for m in chosen if m.walk is not None), (step.conclude() for step in steps), strict=True))
    if held:
        whole = Evidence(np.concatenate([video for video, _ in held]), np.concatenate([other for _, other in held]))
        found |= {metric.name: metric.measure(whole) for metric in chosen if metric.walk is None}
    measured = [found[metric.name] or _nothing(metric) for metric in chosen]
    of_reference = [one.values for step in alone if (one := step.conclude()) is not None]
    return Score(
        pair,
        frames,
        Measurement(
            {name: value for one in measured for name, value in one.values.items()},
            {name: curve for one in measured for name, curve in one.curves.items()},
        ),
        {name: value for values in of_reference for name, value in values.items()},
    )


def table(scores: Sequence[Score], wanted: Sequence[str]) -> str:
    """Scores as text: a row per pair, and for several their mean with its 95 % interval."""
    columns = []
    for quantity in (quantity for name in wanted for quantity in metrics.get(name).quantities):
        columns.append((quantity, False))
        if any(quantity.name in one.of_reference for one in scores):
            columns.append((quantity, True))
    figures = [[_value(one, *column) for column in columns] for one in scores]
    heads = ("of the reference" if alone else summary.head(quantity) for quantity, alone in columns)
    rows = [["video", "frames", *heads]]
    for one, line in zip(scores, figures, strict=True):
        shown = [
            summary.entry(quantity, bootstrap([value]), best=False, why="no two frames to compare").text
            for (quantity, _), value in zip(columns, line, strict=True)
        ]
        rows.append([one.pair.name, str(one.frames), *shown])
    if len(scores) > 1:
        per_column = zip(columns, zip(*figures, strict=True), strict=True)
        means = [summary.entry(quantity, bootstrap(values), best=False) for (quantity, _), values in per_column]
        rows.append([f"mean, n = {len(scores)}", "", *(mean.text for mean in means)])
        rows.append(["95 % interval", "", *(mean.interval for mean in means)])
    return text_table.grid(rows)


def to_json(scores: Sequence[Score], provenance: Provenance) -> str:
    """Scores as strict JSON: versions, and for every pair its paths, figures and curves over frames.

    Numbers that JSON does not know are the strings ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``.
    """
    pairs = [
        {
            "name": one.pair.name,
            "video": str(one.pair.video.path),
            "reference": str(one.pair.reference.path),
            "frames": one.frames,
            "values": dict(one.measurement.values),
            "values_of_reference": dict(one.of_reference),
            "curves": {name: curve.tolist() for name, curve in one.measurement.curves.items()},
        }
        for one in scores
    ]
    return results.dump({"format": FORMAT, "version": VERSION, "provenance": provenance.to_json(), "pairs": pairs})


def _value(one: Score, quantity: Quantity, alone: bool) -> float:
    return (one.of_reference if alone else one.measurement.values)[quantity.name]


class _Steps:
    """A metric on its way along a video."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._parts: list[Curve] = []
        self._last: tuple[Frames, Frames] | None = None

    def take(self, video: Frames, reference: Frames) -> None:
        """Go on by some frames."""
        if self._walk.overlap and self._last is not None:
            video = np.concatenate([self._last[0], video])
            reference = np.concatenate([self._last[1], reference])
        if len(video) > self._walk.overlap:
            self._parts.append(self._walk.curve(video, reference))
        if self._walk.overlap:
            self._last = video[-self._walk.overlap :], reference[-self._walk.overlap :]

    def conclude(self) -> Measurement | None:
        """The figures, None where the video was too short for any."""
        return self._walk.conclude(np.concatenate(self._parts)) if self._parts else None


def _nothing(metric: Metric) -> Measurement:
    return Measurement({quantity.name: math.nan for quantity in metric.quantities})


def _blocks(pair: Pair) -> Iterator[tuple[Frames, Frames]]:
    """Frames of both videos, a few at a time.

    Raises:
        ShapeError: The videos differ in length or size; both lengths are counted before the message is written.
    """
    blocks: list[tuple[Picture, Picture]] = []
    lengths = [0, 0]
    for video, reference in itertools.zip_longest(pair.video.frames(), pair.reference.frames()):
        lengths[0] += video is not None
        lengths[1] += reference is not None
        if lengths[0] != lengths[1]:
            continue
        if video.shape != reference.shape:
            raise ShapeError(
                f"{pair.video.path} is {video.shape[1]} x {video.shape[0]}, {pair.reference.path} "
                f"{reference.shape[1]} x {reference.shape[0]}; resize one of them first"
            )
        blocks.append((video, reference))
        if len(blocks) == BLOCK:
            yield _stacked(blocks)
            blocks = []
    if lengths[0] != lengths[1]:
        raise ShapeError(
            f"{pair.video.path} has {lengths[0]} frames, {pair.reference.path} {lengths[1]}; cut one of them first"
        )
    if blocks:
        yield _stacked(blocks)


def _stacked(block: Sequence[tuple[Picture, Picture]]) -> tuple[Frames, Frames]:
    videos, references = zip(*block, strict=True)
    return np.stack(videos), np.stack(references)


def _check_rates(pair: Pair) -> None:
    ours, theirs = pair.video.rate, pair.reference.rate
    if ours is not None and theirs is not None and ours != theirs:
        raise ParameterError(
            f"{pair.video.path} has {float(ours):g} frames a second, {pair.reference.path} {float(theirs):g}; "
            "bring both to one rate, or compare folders of their frames"
        )
