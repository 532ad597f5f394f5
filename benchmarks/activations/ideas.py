"""Ideas for preset ``sharp`` that were left out, and settings that were chosen, on the demo world's keys.

    python -m benchmarks.activations.ideas --inputs 3

Every line changes one thing inside the package for as long as it is measured; the first line is the preset as it is. Keys are scored
as in :mod:`benchmarks.activations.harness`, layers 0, 3 and 7.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.activations import room
from benchmarks.activations.harness import measure
from benchmarks.activations.recording import Recording
from quantwm_core import affine, psac, rounding, statistics
from quantwm_core.methods import quantwm
from quantwm_eval.estimate import bootstrap
from quantwm_kernels.bridge import to_numpy

LABEL = "quantwm:preset=sharp:values=bf16"
LAYERS = (0, 3, 7)


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


IDEAS: Mapping[str, tuple[str, Callable[[Recording], AbstractContextManager[object]]]] = {
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


@torch.inference_mode()
def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=3)
    recordings = [each for each in room.record(parser.parse_args().inputs) if each.layer in LAYERS]
    print("| change | logit error | top-1 shift (%) | against the preset, logit error |\n|---|---|---|---|")
    preset: list[float] = []
    for name, (label, changed) in IDEAS.items():
        scores = []
        for recording in recordings:
            with changed(recording):
                scores.append(measure(recording, label, room.CHUNK_TOKENS))
        errors = [score.logit_error for score in scores]
        preset = preset or errors
        ratio = bootstrap([error / own for error, own in zip(errors, preset, strict=True)])
        shift = 100 * np.mean([score.selection_shift for score in scores])
        print(f"| {name} | {np.mean(errors):.4f} | {shift:.1f} | {ratio.mean:.2f} ({ratio.low:.2f}–{ratio.high:.2f}) |")


if __name__ == "__main__":
    main()
