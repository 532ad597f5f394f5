"""VBench's temporal flickering, by its formula."""

from __future__ import annotations

import itertools

import numpy as np

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Curve, Frames, check_video
from quantwm_eval.metric import Measurement, Quantity, Walk, walking


def frame_differences(video: Frames) -> Curve:
    """Mean absolute difference of each pair of consecutive frames, in FP32 as VBench computes it.

    Returns:
        float64 ``[T - 1]`` of FP32 numbers, grey levels.

    Raises:
        DtypeError: The video is not uint8.
        ShapeError: Fewer than two frames.
    """
    check_video(video)
    if len(video) < 2:
        raise ShapeError("video: got one frame, temporal flickering needs at least two")
    differences = [np.mean(np.abs(a.astype(np.float32) - b.astype(np.float32))) for a, b in itertools.pairwise(video)]
    return np.array(differences, np.float64)


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
    return _score(frame_differences(video))


def _score(differences: Curve) -> float:
    return float((255.0 - np.mean(differences.astype(np.float32)).item()) / 255.0)


def _conclude(differences: Curve) -> Measurement:
    return Measurement({"temporal_flickering": _score(differences)})


METRIC = walking(
    "temporal_flickering",
    (Quantity("temporal_flickering", "VBench temporal flickering", "", "higher", 0.0, 1.0, 4),),
    (),
    Walk(lambda video, _reference: frame_differences(video), 1, _conclude),
)
