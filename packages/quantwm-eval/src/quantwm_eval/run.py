"""Experiment to measurements: every method generates the same episodes with the same noise and the same actions."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, field, replace
from functools import partial

import numpy as np
import torch

from quantwm_core.errors import StateError, lookup
from quantwm_eval import metrics
from quantwm_eval.evidence import CacheBytes, Evidence, Frames, Seconds
from quantwm_eval.experiment import CONTROL, Experiment, MethodChoice
from quantwm_eval.host import Attached, Episode, Host, check_batch
from quantwm_eval.metric import Measurement
from quantwm_eval.recorder import Recorder
from quantwm_eval.results import Cell, Key

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A finished video: its cell for the results, and what pictures are made of.

    Attributes:
        cell: What was measured.
        episode: What was to be generated.
        video: What was generated.
        reference: What the model gives without a quantwm cache under it.
    """

    cell: Cell
    episode: Episode
    video: Frames
    reference: Frames


@dataclass
class Meter:
    """Follows a cache through a rollout: bytes after every chunk, and the time that following took."""

    attached: Attached
    moments: list[CacheBytes] = field(default_factory=list)
    seconds: float = 0.0

    def chunk_done(self, videos: int) -> None:
        """Note the share of each of the batch's videos."""
        began = time.perf_counter()
        stored = self.attached.use().stored
        self.moments.append(CacheBytes(*(part / videos for part in astuple(stored))))
        self.seconds += time.perf_counter() - began


def count_chunks(experiment: Experiment, host: Host, finished: Sequence[Cell] = ()) -> int:
    """How often :func:`run` calls its ``progress``: once per chunk of every video, references included.

    Raises:
        QuantWMError: The host cannot do the experiment, or a method or metric is unknown.
    """
    experiment.check()
    for kind in experiment.kinds:
        lookup(f"kind of episode of host {host.name!r}:", kind, host.kinds)
    check_batch(host.name, experiment.batch, host.makes_batches)
    host.check(experiment.scenes, experiment.frames, experiment.degrees)
    known = {cell.key for cell in finished}
    one = experiment.scenes[:1]
    chunks = {
        kind: _chunks(host, host.episodes(kind, one, experiment.frames, experiment.degrees)[0])
        for kind in experiment.kinds
    }
    total = 0
    for seed, kind, scenes in experiment.batches():
        due = len(_due(experiment, seed, kind, scenes, known))
        total += len(scenes) * chunks[kind] * (due + 1 if due else 0)
    return total


def _chunks(host: Host, episode: Episode) -> int:
    """How many chunks an episode takes."""
    return next(count for count in itertools.count(1) if host.frames_of(count) >= len(episode.actions))


def run(
    experiment: Experiment,
    host: Host,
    progress: Progress = lambda _title: None,
    finished: Sequence[Cell] = (),
    warm: bool = False,
) -> Iterator[Outcome]:
    """Generate and measure, batch after batch of scenes, the BF16 control of a batch before its other methods.

    The reference is the model as it is, with its own BF16 cache. The control is the method ``bf16`` through the quantwm
    cache: another rollout, which must equal the reference to the last bit. Where it does not, every cell of that scene is
    marked invalid.

    Args:
        experiment: What to do.
        host: The model.
        progress: Called after every chunk of every video with what is being made.
        finished: Cells of an earlier run of the same experiment, which are not yielded again. A batch is generated whole
            even where only some of its cells are missing, so that their figures are those of an uninterrupted run.
        warm: Whether this process has run these methods before, and need not be warmed up.

    Raises:
        QuantWMError: The host cannot do it, or a method or metric is unknown.
        StateError: A reference is another one than finished cells were compared with.
    """
    experiment.check()
    known = {cell.key: cell for cell in finished}
    cold = not warm
    for seed, kind, scenes in experiment.batches():
        due = _due(experiment, seed, kind, scenes, known.keys())
        if not due:
            continue
        if cold:
            _warm_up(experiment, host)
            cold = False
        episodes = host.episodes(kind, scenes, experiment.frames, experiment.degrees)
        for outcome in _measure_batch(experiment, host, episodes, seed, due, known, progress):
            if outcome.cell.key not in known:
                yield outcome


def _due(
    experiment: Experiment, seed: int, kind: str, scenes: Sequence[int], known: Set[Key]
) -> tuple[MethodChoice, ...]:
    """Methods of which a batch lacks a cell."""
    return tuple(
        method
        for method in experiment.methods
        if any((kind, scene, seed, method.label) not in known for scene in scenes)
    )


def _warm_up(experiment: Experiment, host: Host) -> None:
    """Generate a little under every method and forget it: what is loaded on first use counts in no video's time.

    On a GPU that is two units and a read of them, because kernels are compiled on first use, and the first unit, which has
    no statistics, needs others than the second.
    """
    (episode,) = host.episodes(experiment.kinds[0], experiment.scenes[:1], experiment.frames, experiment.degrees)
    compiles = host.device.type == "cuda"
    for method in experiment.methods:
        scheme = method.scheme(experiment.chunks_per_seal if compiles else 1)
        chunks = 2 * scheme.chunks_per_seal + 1 if compiles else 1
        short = replace(episode, actions=episode.actions[: host.frames_of(chunks)])
        with host.attach(scheme, _observers(Recorder(experiment.samples)), method.window):
            host.generate([short], [0], lambda: None)


def _measure_batch(
    experiment: Experiment,
    host: Host,
    episodes: Sequence[Episode],
    seed: int,
    due: Sequence[MethodChoice],
    known: Mapping[Key, Cell],
    progress: Progress,
) -> Iterator[Outcome]:
    """The methods that are due on a batch of episodes."""
    title = f"{episodes[0].kind} {'-'.join(str(number) for number in dict.fromkeys((episodes[0].scene, episodes[-1].scene)))}"

    def tick(method: str) -> None:
        for _ in episodes:
            progress(f"{title}, {method}")

    seeds = [seed] * len(episodes)
    references = host.generate(episodes, seeds, partial(tick, "reference"))
    digests = [hashlib.sha256(reference.tobytes()).hexdigest() for reference in references]
    _check_references(experiment, episodes, seed, digests, known)
    controls = [known.get((episode.kind, episode.scene, seed, CONTROL)) for episode in episodes]
    exact = [control is not None and control.valid for control in controls]
    for method in due:
        evidence = _roll_out(experiment, host, episodes, seeds, method, references, partial(tick, method.label))
        if method == MethodChoice(CONTROL):
            exact = [np.array_equal(found.video, wanted) for found, wanted in zip(evidence, references, strict=True)]
        for index, (episode, found) in enumerate(zip(episodes, evidence, strict=True)):
            measured = measure(experiment.metrics, found)
            key = episode.kind, episode.scene, seed, method.label
            cell = Cell(*key, exact[index], measured, digests[index])
            yield Outcome(cell, episode, found.video, references[index])


def _check_references(
    experiment: Experiment, episodes: Sequence[Episode], seed: int, digests: Sequence[str], known: Mapping[Key, Cell]
) -> None:
    """Refuse to put figures against two different references into one table.

    Raises:
        StateError: The model no longer generates the BF16 video that finished cells were compared with.
    """
    for episode, digest in zip(episodes, digests, strict=True):
        for method in experiment.methods:
            cell = known.get((episode.kind, episode.scene, seed, method.label))
            if cell is not None and cell.reference not in ("", digest):
                raise StateError(
                    f"{episode.kind} {episode.scene}, seed {seed}: the model's BF16 video is another one than that which the "
                    f"finished cell of {method.label!r} was compared with; its inputs, weights, configuration or code, the "
                    "device or the number of threads have changed: start a new results file"
                )


def _roll_out(
    experiment: Experiment,
    host: Host,
    episodes: Sequence[Episode],
    seeds: Sequence[int],
    method: MethodChoice,
    references: Sequence[Frames],
    tick: Callable[[], None],
) -> list[Evidence]:
    """Generate a batch with a method's cache under the model, and keep what metrics need."""
    recorder = Recorder(experiment.samples)
    with host.attach(method.scheme(experiment.chunks_per_seal), _observers(recorder), method.window) as attached:
        meter = Meter(attached)
        if host.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(host.device)

        def chunk_done() -> None:
            meter.chunk_done(len(episodes))
            tick()

        began = time.perf_counter()
        videos = host.generate(episodes, seeds, chunk_done)
        elapsed = time.perf_counter() - began - recorder.seconds - meter.seconds
        use = attached.use()
    peak = float(torch.cuda.max_memory_allocated(host.device)) if host.device.type == "cuda" else None
    seconds = Seconds(*(part / len(episodes) for part in (elapsed, use.seal_seconds, use.decode_seconds)))
    recordings = recorder.recordings() or [None] * len(episodes)
    return [
        Evidence(video, reference, episode.look_away, recording, tuple(meter.moments), seconds, episode.truth, peak)
        for video, reference, episode, recording in zip(videos, references, episodes, recordings, strict=True)
    ]


def _observers(recorder: Recorder) -> tuple[Recorder, ...]:
    """Nobody looks on where nothing is sampled."""
    return (recorder,) if recorder.samples else ()


def measure(names: Sequence[str], evidence: Evidence) -> Measurement:
    """Apply every metric of these names for which the evidence is at hand.

    Raises:
        UnknownNameError: There is no such metric.
    """
    found = [metric.measure(evidence) for metric in map(metrics.get, names) if metric.applies(evidence)]
    return Measurement(
        {name: value for one in found for name, value in one.values.items()},
        {name: curve for one in found for name, curve in one.curves.items()},
        {name: grid for one in found for name, grid in one.maps.items()},
        {name: curve for one in found for name, curve in one.ages.items()},
        {name: curve for one in found for name, curve in one.positions.items()},
    )
