"""Ideas for ``sharp``, for ``klt`` and for looking ahead that were left out, and settings that were chosen, on the demo world's keys.

    python -m benchmarks.activations.ideas sharp --inputs 3
    python -m benchmarks.activations.ideas klt --inputs 3
    python -m benchmarks.activations.ideas ahead --inputs 3
    python -m benchmarks.activations.ideas feedback --inputs 3      what feedback leaves of the expected cost of rounding

Every line changes one thing inside the package for as long as it is measured; the first line is the method as it is. Keys are scored
as in :mod:`benchmarks.activations.harness`, layers 0, 3 and 7.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.activations import room
from benchmarks.activations.harness import measure
from benchmarks.activations.recording import Recording
from quantwm_core import affine, basis, psac, rotary, rounding, statistics
from quantwm_core.methods import quantwm
from quantwm_core.rotary import Turning
from quantwm_core.statistics import QueryMoment
from quantwm_eval.demo.config import ModelConfig
from quantwm_eval.demo.rope import rotation_table
from quantwm_eval.estimate import bootstrap
from quantwm_kernels.bridge import to_numpy

LABEL = "quantwm:preset=sharp:values=bf16"
KLT = "klt:bits=2:values=bf16"
LAYERS = (0, 3, 7)
RANKS = (16, 8)

Idea: TypeAlias = tuple[str, Callable[[Recording], AbstractContextManager[object]]]
"""Label of a method, and what is changed inside it."""


def searched_by_sensitivity(recording: Recording) -> AbstractContextManager[object]:
    """Scales are searched by the error weighted by ``M_jj`` of all queries of the recording, so with more than causality allows."""
    queries = to_numpy(recording.queries.bfloat16())
    weights = statistics.sensitivity(statistics.second_moment(queries, recording.keys.shape[1]).mean)

    def weighted(
        groups: np.ndarray, codes: np.ndarray, stored: np.ndarray, zero_points: np.ndarray, super_scale: np.ndarray
    ) -> np.ndarray:
        error = np.square(groups - affine.decode_groups(codes, stored, zero_points, super_scale))
        lost: np.ndarray = (error * weights.reshape(*weights.shape[:2], 1, *groups.shape[3:])).sum(axis=-1)
        return lost

    return patch.object(affine, "_squared_error", weighted)


SHARP_IDEAS: Mapping[str, Idea] = {
    "the preset": (LABEL, lambda _: nullcontext()),
    "QSAC: metric of past queries, four candidates": (f"{LABEL}:metric=diagonal:candidates=4", lambda _: nullcontext()),
    "QSAC: the full metric": (f"{LABEL}:metric=full:candidates=4", lambda _: nullcontext()),
    "scales searched by error weighted with `M_jj`": (LABEL, searched_by_sensitivity),
    "two shares of a range": (f"{LABEL}:scale_candidates=2", lambda _: nullcontext()),
    "four shares of a range": (f"{LABEL}:scale_candidates=4", lambda _: nullcontext()),
    "damp 0.05": (LABEL, lambda _: patch.object(rounding, "DAMP", 0.05)),
    "damp 0.8": (LABEL, lambda _: patch.object(rounding, "DAMP", 0.8)),
    "INT4 coefficients scaled by their maximum": (LABEL, lambda _: patch.object(psac, "CLIPPED_RMS", np.inf)),
    "five rounds of k-means": (f"{LABEL}:iterations=5", lambda _: nullcontext()),
    "warm start, two rounds": (f"{LABEL}:warm_start=True", lambda _: nullcontext()),
    "codebook of the unit before, as it is": (
        f"{LABEL}:warm_start=True",
        lambda _: patch.object(quantwm, "WARM_ITERATIONS", 0),
    ),
}  # fmt: skip

KLT_IDEAS: Mapping[str, Idea] = {
    "the method": (KLT, lambda _: nullcontext()),
    "the first basis for ever": (f"{KLT}:lifetime=0", lambda _: nullcontext()),
    "units of one chunk": (f"{KLT}:chunks_per_seal=1", lambda _: nullcontext()),
    "units of one chunk, the first basis for ever": (f"{KLT}:chunks_per_seal=1:lifetime=0", lambda _: nullcontext()),
    "rows of the basis in INT4": (KLT, lambda _: patch.object(basis, "ROW_MAX", 7)),
    "damp 0.05": (f"{KLT}:damp=0.05", lambda _: nullcontext()),
    "damp 2": (f"{KLT}:damp=2", lambda _: nullcontext()),
}

AHEAD = "klt:bits=1:values=bf16"


def known_future(recording: Recording) -> AbstractContextManager[object]:
    """Units are sealed with the very queries that will judge them: what no cache can know."""
    queries = to_numpy(recording.queries.bfloat16())

    def coming(_: QueryMoment, stop: int, frames: int, turning: Turning) -> QueryMoment:
        asked = queries[:, :, stop : stop + frames * turning.frame_tokens]
        return statistics.second_moment(asked if asked.shape[2] else queries[:, :, -1:], recording.keys.shape[1])

    return patch.object(rotary, "coming_moment", coming)


def by_row_and_column(_: Recording) -> AbstractContextManager[object]:
    """Queries are turned back by their row and column, too, and then to those of all coming tokens alike."""
    cosines, sines = rotation_table(ModelConfig())
    angles = torch.atan2(sines, cosines).flatten(0, 1).double().numpy()

    def still(queries: np.ndarray, kv_heads: int, start: int, _: Turning) -> QueryMoment:
        pairs = queries.astype(np.float64).reshape(*queries.shape[:3], -1, 2)
        back = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(-1j * angles[start : start + queries.shape[2]])
        parts = np.stack([back.real, back.imag], axis=-1).reshape(queries.shape)
        return statistics.second_moment(parts.astype(np.float32), kv_heads)

    def coming(known: QueryMoment, stop: int, frames: int, turning: Turning) -> QueryMoment:
        places = angles[stop : stop + frames * turning.frame_tokens]
        return QueryMoment(rotary.turned_moment(known.mean, places), known.count)

    return patch.multiple(rotary, still_moment=still, coming_moment=coming)


AHEAD_IDEAS: Mapping[str, Idea] = {
    "queries as they were asked": (AHEAD, lambda _: nullcontext()),
    "damp 2": (f"{AHEAD}:damp=2", lambda _: nullcontext()),
    "turned to the next 12 frames": (f"{AHEAD}:frames_ahead=12", lambda _: nullcontext()),
    "turned, damp 0.1": (f"{AHEAD}:frames_ahead=12:damp=0.1", lambda _: nullcontext()),
    "turned, damp 2": (f"{AHEAD}:frames_ahead=12:damp=2", lambda _: nullcontext()),
    "by row and column, too": (f"{AHEAD}:frames_ahead=12", by_row_and_column),
    "the very queries to come": (f"{AHEAD}:frames_ahead=12", known_future),
}

IDEAS = {"sharp": SHARP_IDEAS, "klt": KLT_IDEAS, "ahead": AHEAD_IDEAS}


def compare(ideas: Mapping[str, Idea], recordings: Sequence[Recording]) -> None:
    """Print a table; ratios are to the first line."""
    print("| change | logit error | top-1 shift (%) | against the first, logit error |\n|---|---|---|---|")
    first: list[float] = []
    for name, (label, changed) in ideas.items():
        scores = []
        for recording in recordings:
            with changed(recording):
                scores.append(measure(recording, label, room.CHUNK_TOKENS))
        errors = [score.logit_error for score in scores]
        first = first or errors
        ratio = bootstrap([error / own for error, own in zip(errors, first, strict=True)])
        shift = 100 * np.mean([score.selection_shift for score in scores])
        print(f"| {name} | {np.mean(errors):.4f} | {shift:.1f} | {ratio.mean:.2f} ({ratio.low:.2f}–{ratio.high:.2f}) |")


def left_by_feedback(recordings: Sequence[Recording], rank: int, chunk_tokens: int = room.CHUNK_TOKENS) -> float:
    """Mean of ``sum_j D_j / sum_j H_jj`` (:mod:`quantwm_core.rounding`) over heads, units and layers."""
    shares: list[float] = []
    native = np.linalg.cholesky

    def factor(metric: np.ndarray) -> np.ndarray:
        lower: np.ndarray = native(metric)
        left = np.square(np.diagonal(lower, axis1=-2, axis2=-1)).sum(axis=-1)
        shares.extend((left / np.trace(metric, axis1=-2, axis2=-1)).ravel())
        return lower

    with patch.object(np.linalg, "cholesky", factor):
        for recording in recordings:
            measure(recording, f"{LABEL}:rank={rank}", chunk_tokens)
    return float(np.mean(shares))


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", choices=[*IDEAS, "feedback"])
    parser.add_argument("--inputs", type=int, default=3)
    arguments = parser.parse_args()
    recordings = [each for each in room.record(arguments.inputs) if each.layer in LAYERS]
    if arguments.of in IDEAS:
        compare(IDEAS[arguments.of], recordings)
        return
    for rank in RANKS:
        print(f"{rank} directions compensated: {100 * left_by_feedback(recordings, rank):.0f} % is left")


if __name__ == "__main__":
    main()
