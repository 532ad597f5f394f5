"""VBench's temporal flickering, by its formula."""

from __future__ import annotations

import itertools

import numpy as np

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Evidence, Frames, check_video
from quantwm_eval.metric import Measurement, Metric, Quantity


def temporal_flickering(video: Frames) -> float:
    """VBench's temporal flickering.

    ``(255 - mean over t of mean |I_t - I_{t+1}|) / 255`` on grey levels. Range 0 to 1, higher is better, no unit: a still
    video scores 1, so motion costs as much as flicker does. Source: VBench (arXiv 2311.17982), dimension
    ``temporal_flickering``, whose arithmetic (FP32 means) is followed so that equal frames give equal digits. VBench reads
    frames from a compressed file; here they are the frames that the model gave.

    Args:
        video: uint8 ``[T, H, W, 3]``, at least two frames.

    Raises:
        DtypeError: The video is not uint8.
        ShapeError: Fewer than two frames.

    >>> temporal_flickering(np.zeros((3, 2, 2, 3), np.uint8))
    1.0
    """
    check_video(video)
    if len(video) < 2:
        raise ShapeError("video: got one frame, temporal flickering needs at least two")
    differences = [np.mean(np.abs(a.astype(np.float32) - b.astype(np.float32))) for a, b in itertools.pairwise(video)]
    return float((255.0 - np.mean(np.array(differences)).item()) / 255.0)


def _measure(evidence: Evidence) -> Measurement:
    return Measurement({"temporal_flickering": temporal_flickering(evidence.video)})


METRIC = Metric(
    "temporal_flickering",
    (Quantity("temporal_flickering", "VBench temporal flickering", "", "higher", 0.0, 1.0, 4),),
    (),
    _measure,
)
