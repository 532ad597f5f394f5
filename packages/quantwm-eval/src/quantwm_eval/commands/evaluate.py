"""``quantwm eval``: an experiment from a file or from options, taken up again where it was left."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from quantwm_core.errors import QuantWMError, StateError
from quantwm_eval import (
    experiment_file,
    films,
    hosts,
    identity,
    launch,
    named,
    output,
    ownership,
    paired,
    provenance,
    resume,
    tables,
    text_table,
    vbench,
)
from quantwm_eval.commands import eval_options
from quantwm_eval.commands.answer import BAD_OPTIONS, FAILED, Answer, Tell
from quantwm_eval.commands.arguments import check_device
from quantwm_eval.commands.eval_options import OF_EXPERIMENT, OF_HOST
from quantwm_eval.evaluate import append, evaluate
from quantwm_eval.experiment import Experiment
from quantwm_eval.host import Host
from quantwm_eval.hosts import Setup
from quantwm_eval.results import Cell, Results
from quantwm_eval.run import count_chunks
from quantwm_eval.threads import limit_threads

SECONDS_BETWEEN_LOG_LINES = 30


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add its options."""
    eval_options.add(commands).set_defaults(run=run)


def run(options: argparse.Namespace, given: Sequence[str], tell: Tell) -> Answer:
    """Do it."""
    with ExitStack() as held:
        return _run(options, given, tell, held)


def _run(options: argparse.Namespace, given: Sequence[str], tell: Tell, held: ExitStack) -> Answer:
    if options.list:
        listed = [(name, named.get(name).about) for name in named.names()]
        return Answer(text_table.grid([("experiment", "what it asks"), *listed], left=2))
    if "threads" in options or options.jobs > 1:
        limit_threads(_threads(options))
    path: Path = options.out / output.RESULTS
    try:
        judge = vbench.find(options.vbench) if "vbench" in options else None
        vbench.check_dimensions(options.vbench_dimensions)
        check_device(options.device)
        output.check_folder(options.out)
        output.check_appendable(path)
        if options.videos or "vbench" in options:
            output.check_folder(options.out / films.VIDEOS)
        setup = Setup(options.device, **{part: getattr(options, part) for part in OF_HOST if part in options})
        identity.check_apart(setup, options.out)
        wanted, host = _prepared(options, setup)
        count_chunks(wanted, host)
        source = provenance.collect(given, options.device, wanted.distributions(), identity.identify(setup))
        options.out.mkdir(parents=True, exist_ok=True)
        held.enter_context(ownership.owned(options.out))
        begun = resume.begin(path, wanted, source)
    except QuantWMError as error:
        return Answer("", f"quantwm eval: {error}", BAD_OPTIONS)
    tell(f"{path}: {len(begun.cells)} of {len(begun.cells) + begun.missing} cells are there")
    count = len(wanted.scenes) if judge is not None else options.videos
    kept = films.Films(options.out / films.VIDEOS, wanted, count, host.frame_rate) if count else None
    apart = options.jobs > 1 or options.launcher != "local"
    found = begun if apart else _here(wanted, host, begun, path, kept)
    del host
    _free_memory()  # workers have hosts of their own, and VBench its models
    if apart:
        found = _apart(options, begun, path, launch.tasks(begun, setup, kept))
    text = f"{tables.text(found, paired.opponent(found, None))}\n\n{path}"
    if not found.valid:
        return Answer(text, "quantwm eval: INVALID, a BF16 control differed from its reference", FAILED)
    if judge is None:
        return Answer(text)
    try:
        return Answer(f"{_judged(judge, options, wanted, tell)}\n\n{text}")
    except QuantWMError as error:  # what was measured stands
        return Answer(text, f"quantwm eval: {error}", FAILED)


def _threads(options: argparse.Namespace) -> int:
    """Threads of torch in each process: as typed, or such that all processes together have no more than there are cores."""
    if "threads" in options:
        return int(options.threads)
    return min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // options.jobs))


def _free_memory() -> None:
    """Give back what objects that are gone took, on the GPU too."""
    gc.collect()  # a model's hooks may refer to it
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _here(wanted: Experiment, host: Host, begun: Results, path: Path, kept: films.Films | None) -> Results:
    """Run in this process."""
    with _bar(count_chunks(wanted, host, begun.cells), "chunk") as bar:

        def progress(title: str) -> None:
            bar.set_postfix_str(title, refresh=False)
            bar.update()

        return evaluate(wanted, host, begun, path, progress, kept)


def _apart(options: argparse.Namespace, begun: Results, path: Path, tasks: Sequence[launch.Task]) -> Results:
    """Run in other processes; this one writes."""
    with _bar(len(tasks), "batch") as bar:

        def cells() -> Iterator[Cell]:
            for done in launch.get(options.launcher)(tasks, options.jobs):
                yield from done
                bar.update()

        return append(begun, path, cells())


def _prepared(options: argparse.Namespace, setup: Setup) -> tuple[Experiment, Host]:
    """The experiment, and the host that it is about.

    Raises:
        QuantWMError: A setting is wrong, or the host cannot be loaded; settings are looked at first.
    """
    chosen: dict[str, Any] = {}
    fixed: Set[str] = set()
    if options.experiment is not None:
        path = Path(options.experiment)
        if path.suffix == ".toml":
            chosen = experiment_file.read(path)
            fixed = chosen.keys()
        else:
            chosen = named.get(options.experiment).settings
    typed = {name: getattr(options, name) for name in OF_EXPERIMENT if name in options}
    chosen = chosen | typed
    known, fixed = experiment_file.build(chosen), fixed | typed.keys()
    own = {name: getattr(known, name) for name in ("frames", "batch") if name in fixed}
    host = hosts.get(known.model)(replace(setup, scenes=known.scenes, **own))
    return experiment_file.build(_fitted(chosen, host, fixed)), host


def _fitted(chosen: Mapping[str, Any], host: Host, fixed: Set[str]) -> dict[str, Any]:
    """Settings that are the demo world's replaced by another host's, where the user did not make them."""
    if host.name == "demo":
        return dict(chosen)
    own = {"kinds": host.kinds, "frames": host.frames, "batch": 1, "chunks_per_seal": host.chunks_per_seal}
    return {**chosen, **{name: value for name, value in own.items() if name not in fixed}}


def _judged(command: Path, options: argparse.Namespace, wanted: Experiment, tell: Tell) -> str:
    """VBench's scores of the kept videos, written beside the results, as tables.

    Raises:
        StateError: A video was not kept, or VBench fails.
        FormatError: VBench answers in another form than is known.
    """
    videos = films.paths(options.out / films.VIDEOS, wanted)
    lost = [path for path in videos.values() if not path.is_file()]
    if lost:
        raise StateError(
            f"{lost[0]}: was not kept when its cell was measured; run again into another --out with --vbench"
        )
    scores = vbench.score(command, videos, options.vbench_dimensions, lambda dimension: tell(f"VBench: {dimension}"))
    vbench.save(options.out / vbench.FILE, scores)
    labels = [method.label for method in wanted.methods]
    return "\n\n".join(tables.grid(scores.table(labels, kind)) for kind in wanted.kinds)


def _bar(total: int, unit: str) -> Any:
    """A bar with the time left: redrawn on a terminal, a line now and then in a log."""
    pause = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LOG_LINES
    return tqdm(total=total, unit=unit, smoothing=0.05, dynamic_ncols=True, mininterval=pause)
