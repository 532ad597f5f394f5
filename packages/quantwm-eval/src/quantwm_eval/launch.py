"""An experiment over several processes, on one machine or, through Ray, on many: a batch of scenes is a task.

Whoever works on a task loads the host once and sends back cells; the results file is written by the one process that
started them. So a run over many processes is as resumable as one in a single process, and its figures are the same: a worker
computes with as many threads as the file's first line says, and refuses where versions, platform, device or what the host is
made from are not its.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from quantwm_core.errors import StateError, lookup
from quantwm_eval import hosts, identity, provenance, resume
from quantwm_eval.experiment import Experiment
from quantwm_eval.films import Films
from quantwm_eval.host import Host
from quantwm_eval.hosts import Setup
from quantwm_eval.pool import one_thread_for_children
from quantwm_eval.provenance import Provenance
from quantwm_eval.results import Cell, Results
from quantwm_eval.run import run
from quantwm_eval.threads import limit_threads

OF_FIGURES = ("platform", "device")
"""What must be equal, beside versions and threads, for figures to be: workers may differ in cores."""


@dataclass(frozen=True)
class Task:
    """A batch of scenes of one kind under one seed and all methods.

    Attributes:
        experiment: That part of the experiment.
        finished: Its cells that are there already.
        source: Versions, machine, threads and host of the results file that its cells are for.
        setup: What the host is made from.
        films: Keeps some of the videos, or None.
    """

    experiment: Experiment
    finished: tuple[Cell, ...]
    source: Provenance
    setup: Setup
    films: Films | None = None


Launcher: TypeAlias = Callable[[Sequence[Task], int], Iterator[tuple[Cell, ...]]]
"""Tasks and how many at a time to the cells of each, as they come."""


def tasks(begun: Results, setup: Setup, films: Films | None = None) -> list[Task]:
    """What is left to do of a results file that was begun, batch by batch."""
    known = {cell.key: cell for cell in begun.cells}
    found = []
    for seed, kind, scenes in begun.experiment.batches():
        part = replace(begun.experiment, seeds=(seed,), kinds=(kind,), scenes=scenes)
        keys = list(part.keys())
        there = tuple(known[key] for key in keys if key in known)
        if len(there) < len(keys):
            found.append(Task(part, there, begun.provenance, setup, films))
    return found


def work(task: Task) -> tuple[Cell, ...]:
    """Do a task, and return the cells that were missing.

    Raises:
        StateError: This process has other versions, another platform or another device than the results file, or makes the
            host from something else.
        QuantWMError: The host cannot do it.
    """
    limit_threads(task.source.threads)
    setup = _placed(task.setup)
    _check_same(task, setup)
    host, fresh = _loaded(task.experiment.model, setup), task.experiment.methods not in _warm
    cells = []
    for outcome in run(task.experiment, host, finished=task.finished, warm=not fresh):
        if task.films is not None:
            task.films.add(outcome)
        cells.append(outcome.cell)
    _warm.add(task.experiment.methods)
    return tuple(cells)


def local(given: Sequence[Task], jobs: int) -> Iterator[tuple[Cell, ...]]:
    """Processes of this machine, spread over its GPUs where tasks run on one.

    Raises:
        QuantWMError: Whatever a task raises; others that run are waited for, further ones not begun.
    """
    context = multiprocessing.get_context("spawn")
    devices = context.Queue()
    for index in range(jobs):
        devices.put(index)
    with (
        one_thread_for_children(),
        ProcessPoolExecutor(jobs, context, initializer=_prepare, initargs=(devices,)) as pool,
    ):
        futures = [pool.submit(work, task) for task in given]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def on_ray(given: Sequence[Task], jobs: int) -> Iterator[tuple[Cell, ...]]:
    """Workers of a Ray cluster, the one that ``RAY_ADDRESS`` names or one that is started here.

    A task that runs on a GPU asks Ray for one, any other for as many CPUs as it has threads. Videos that are kept lie where
    the worker can write them, so the folder must be one that all machines share.

    Raises:
        StateError: Ray is not installed, or a worker's versions or machine are others than the results file's.
        QuantWMError: Whatever a task raises; others that wait or run are cancelled.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise StateError(
            "--launcher ray: Ray is not installed; pip install 'packages/quantwm-eval[ray]' in a clone of the repository"
        ) from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    remote = ray.remote(work)
    waiting: list[Any] = []
    left = list(given)
    try:
        while waiting or left:
            while left and len(waiting) < jobs:
                task = left.pop(0)
                waiting.append(remote.options(**_needs(task)).remote(task))
            done, waiting = ray.wait(waiting, num_returns=1)
            yield from ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    finally:
        for reference in waiting:
            ray.cancel(reference)


LAUNCHERS: Mapping[str, Launcher] = {"local": local, "ray": on_ray}


def get(name: str) -> Launcher:
    """Return the launcher of that name.

    Raises:
        UnknownNameError: There is none.
    """
    return LAUNCHERS[lookup("launcher", name, LAUNCHERS)]


_identified = functools.cache(identity.identify)  # files are read once in each process, as the host is loaded once
_warm: set[Any] = set()
_device: list[int] = []


@functools.cache
def _loaded(model: str, setup: Setup) -> Host:
    """A process's host."""
    return hosts.get(model)(setup)


def _placed(setup: Setup) -> Setup:
    """On the process's own GPU where there are several."""
    count = torch.cuda.device_count()
    if _device and setup.device == "cuda" and count:
        return replace(setup, device=f"cuda:{_device[0] % count}")
    return setup


def _check_same(task: Task, setup: Setup) -> None:
    here = provenance.collect((), setup.device, task.experiment.distributions(), _identified(setup))
    unlike = resume.unlike(task.source, here, OF_FIGURES)
    if unlike:
        raise StateError(
            f"worker on {platform.node()}: not as the results file: {'; '.join(unlike)}; install the same versions and put the "
            "same files there, or keep that machine out of the run"
        )


def _needs(task: Task) -> dict[str, int]:
    """What Ray is asked for."""
    gpu = task.setup.device.startswith("cuda")
    return {"num_gpus": int(gpu), "num_cpus": 0 if gpu else task.source.threads}


def _prepare(devices: Any) -> None:
    """Give a process its number."""
    _device.append(devices.get())
