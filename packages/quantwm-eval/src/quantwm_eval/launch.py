"""An experiment over several processes, on one machine or, through Ray, on many: a batch of scenes is a task.

Whoever works on a task loads the host once and sends back cells; the results file is written by the one process that
started them. So a run over many processes is as resumable as one in a single process, and its figures are the same.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from quantwm_core.errors import StateError, lookup
from quantwm_eval import hosts
from quantwm_eval.experiment import Experiment
from quantwm_eval.films import Films
from quantwm_eval.host import Host
from quantwm_eval.hosts import Setup
from quantwm_eval.pool import one_thread_for_children
from quantwm_eval.results import Cell
from quantwm_eval.run import run


@dataclass(frozen=True)
class Task:
    """A batch of scenes of one kind under one seed and all methods.

    Attributes:
        experiment: That part of the experiment.
        finished: Its cells that are there already.
        setup: What the host is made from.
        films: Keeps some of the videos, or None.
    """

    experiment: Experiment
    finished: tuple[Cell, ...]
    setup: Setup
    films: Films | None = None


Launcher: TypeAlias = Callable[[Sequence[Task], int], Iterator[tuple[Cell, ...]]]
"""Tasks and how many at a time to the cells of each, as they come."""


def tasks(experiment: Experiment, finished: Sequence[Cell], setup: Setup, films: Films | None = None) -> list[Task]:
    """What is left to do, batch by batch."""
    known = {cell.key: cell for cell in finished}
    found = []
    for seed, kind, scenes in experiment.batches():
        part = replace(experiment, seeds=(seed,), kinds=(kind,), scenes=scenes)
        keys = list(part.keys())
        there = tuple(known[key] for key in keys if key in known)
        if len(there) < len(keys):
            found.append(Task(part, there, setup, films))
    return found


def work(task: Task) -> tuple[Cell, ...]:
    """Do a task, and return the cells that were missing."""
    host, fresh = _loaded(task.experiment.model, task.setup), task.experiment.methods not in _warm
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
    threads = torch.get_num_threads()
    with (
        one_thread_for_children(),
        ProcessPoolExecutor(jobs, context, initializer=_prepare, initargs=(devices, threads)) as pool,
    ):
        futures = [pool.submit(work, task) for task in given]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def on_ray(given: Sequence[Task], jobs: int) -> Iterator[tuple[Cell, ...]]:
    """Workers of a Ray cluster, the one that ``RAY_ADDRESS`` names or one that is started here.

    A task that runs on a GPU asks Ray for one. Videos that are kept lie where the worker can write them, so the folder must
    be one that all machines share.

    Raises:
        StateError: Ray is not installed.
        QuantWMError: Whatever a task raises.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise StateError("--launcher ray: Ray is not installed; pip install 'quantwm-eval[ray]'") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = 1 if given and given[0].setup.device.startswith("cuda") else 0
    remote = ray.remote(num_gpus=gpus, num_cpus=0 if gpus else 1)(work)
    waiting: list[Any] = []
    left = list(given)
    while waiting or left:
        while left and len(waiting) < jobs:
            waiting.append(remote.remote(left.pop(0)))
        done, waiting = ray.wait(waiting, num_returns=1)
        try:
            yield from ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error


LAUNCHERS: Mapping[str, Launcher] = {"local": local, "ray": on_ray}


def get(name: str) -> Launcher:
    """Return the launcher of that name.

    Raises:
        UnknownNameError: There is none.
    """
    return LAUNCHERS[lookup("launcher", name, LAUNCHERS)]


_warm: set[Any] = set()
_device: list[int] = []


@functools.cache
def _loaded(model: str, setup: Setup) -> Host:
    """A process's host, on its own GPU where there are several."""
    count = torch.cuda.device_count()
    if _device and setup.device == "cuda" and count:
        setup = replace(setup, device=f"cuda:{_device[0] % count}")
    return hosts.get(model)(setup)


def _prepare(devices: Any, threads: int) -> None:
    """Set a process up: its number, and its threads."""
    _device.append(devices.get())
    torch.set_num_threads(threads)
