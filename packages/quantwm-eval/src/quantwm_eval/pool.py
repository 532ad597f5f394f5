"""Pairs of videos over several processes, each computing with one thread."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import torch

from quantwm_eval.compare import Pair, Score, score

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""What keeps a process's libraries from starting threads of their own; it is read when they are loaded."""


def scores(pairs: Sequence[Pair], wanted: Sequence[str], jobs: int) -> Iterator[Score]:
    """Scores of :func:`quantwm_eval.compare.score`, in the order of the pairs; the figures do not depend on ``jobs``.

    Args:
        pairs: What to compare.
        wanted: Names of metrics.
        jobs: Processes at a time; with one, or one pair, everything happens in this process.

    Raises:
        QuantWMError: As for one pair, of the first pair that fails; pairs that were not begun are left.
    """
    count = min(jobs, len(pairs))
    if count <= 1:
        yield from (score(pair, wanted) for pair in pairs)
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit the threads' locks
    with one_thread_for_children(), ProcessPoolExecutor(count, context, initializer=_prepare) as pool:
        try:
            yield from pool.map(partial(score, wanted=tuple(wanted)), pairs)
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def one_thread_for_children() -> Iterator[None]:
    """Let processes that are started inside load their libraries with one thread each."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _prepare() -> None:
    torch.set_num_threads(1)
    if find_spec("cv2") is not None:
        importlib.import_module("cv2").setNumThreads(1)
