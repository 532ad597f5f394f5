"""What fewer rounds of k-means cost where a history is made anew before each chunk, on the demo world's keys.

    python -m benchmarks.activations.anew --inputs 4

A history grows by a chunk of 256 tokens up to four of them, which are the newest four from then on. Positions are counted from its first
frame, as HY-World counts them; what else a host that makes it anew would change, as keys have seen other frames, is left out. Each is
sealed as one unit by the queries of the chunks before, and scored by those of the chunk that follows. The first of a video begins from nothing
in any case and is left out, the others follow each other. Layers 0, 3 and 7.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.activations import room
from benchmarks.activations.ideas import LAYERS
from benchmarks.activations.recording import Recording
from quantwm_core import archive, attention, statistics
from quantwm_core.chunk import SealedChunk
from quantwm_core.rotary import Turning
from quantwm_core.statistics import QueryMoment
from quantwm_eval.estimate import bootstrap
from quantwm_eval.experiment import MethodChoice

HISTORY = 4  # chunks
FRAMES = 64
METHODS = ("quantwm:centroids=64", "quantwm:preset=sharp:centroids=64")
STARTS = {
    "ten rounds from nothing": "",
    "five from nothing": ":iterations=5",
    "five, relaxed": ":iterations=5:relaxation=1.5",
    "two from nothing": ":iterations=2",
    "two from the history before": ":warm_start=True",
}


def counted_from(frame: int, exact: np.ndarray, turning: Turning) -> np.ndarray:
    """Keys or queries ``[B, H, T, D]`` as if ``frame`` were frame 0."""
    pairs = exact.astype(np.float32).reshape(*exact.shape[:3], -1, 2)
    back = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(-1j * turning.angles(frame, frame + 1)[0])
    return np.stack([back.real, back.imag], axis=-1).reshape(exact.shape).astype(exact.dtype)


def histories(recording: Recording, label: str) -> Iterator[float]:
    """Relative error of the logits of each history but the first."""
    scheme, dump, turning = MethodChoice.parse(label).scheme(1), recording.dump, recording.turning
    if dump.queries is None or turning is None:
        raise ValueError("a recording without queries, or whose positions are unknown, cannot be scored")
    before: SealedChunk | None = None
    known: QueryMoment | None = None
    for end in range(room.CHUNK_TOKENS, dump.keys.shape[2], room.CHUNK_TOKENS):
        first = max(0, end - HISTORY * room.CHUNK_TOKENS)
        frame = first // turning.frame_tokens
        keys = counted_from(frame, dump.keys[:, :, first:end], turning)
        asked = counted_from(frame, dump.queries[:, :, end : end + room.CHUNK_TOKENS], turning)
        sealed = scheme.seal(keys, dump.values[:, :, first:end], known, before)
        exact, ours = (attention.logits(asked, each) for each in (keys, archive.restore([sealed]).keys))
        if before is not None:
            yield float(attention.logit_error(exact, ours).mean())
        moment = statistics.second_moment(asked, keys.shape[1])
        before, known = sealed, moment if known is None else statistics.merge(known, moment)


def ratio(errors: np.ndarray, to: np.ndarray) -> str:
    """Mean over layers and scenes of the ratio of their errors, with its interval."""
    found = bootstrap((errors.mean(axis=1) / to.mean(axis=1)).tolist())
    return f"{found.mean:.2f} ({found.low:.2f}–{found.high:.2f})"


@torch.inference_mode()
def main() -> None:
    """Measure and print the errors of the logits, and their ratios to those of ten rounds from nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=4)
    recordings = list(room.record(parser.parse_args().inputs, FRAMES, LAYERS))
    print("| method | k-means | while it grows | ratio | then | ratio |\n|---|---|---|---|---|---|")
    for method in METHODS:
        first: np.ndarray | None = None
        for name, option in STARTS.items():
            errors = np.array([list(histories(each, method + option)) for each in recordings])
            first = errors if first is None else first
            parts = (slice(HISTORY - 1), slice(HISTORY - 1, None))
            told = (f"{errors[:, part].mean():.4f} | {ratio(errors[:, part], first[:, part])}" for part in parts)
            print(f"| `{method}` | {name} | {' | '.join(told)} |")


if __name__ == "__main__":
    main()
