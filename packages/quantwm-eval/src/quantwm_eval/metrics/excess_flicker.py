"""Flicker that the BF16 video does not have."""

from __future__ import annotations

import numpy as np

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Curve, Frames, check_pair
from quantwm_eval.metric import Measurement, Quantity, Walk, walking


def flicker_errors(video: Frames, reference: Frames) -> Curve:
    """Mean square of the difference of frame differences, for each pair of consecutive frames.

    Returns:
        float64 ``[T - 1]``, squared grey levels.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: The videos differ in length or size, or have fewer than two frames.
    """
    check_pair(video, reference)
    if len(video) < 2:
        raise ShapeError("video: got one frame, flicker needs at least two")
    errors = []
    for t in range(len(video) - 1):
        before = video[t].astype(np.int32) - reference[t]
        after = video[t + 1].astype(np.int32) - reference[t + 1]
        errors.append(float(np.square(after - before).mean()))
    return np.array(errors)


def excess_flicker(video: Frames, reference: Frames) -> float:
    """Excess flicker against a reference.

    ``sqrt(mean ((I_{t+1} - I_t) - (R_{t+1} - R_t))²)`` over pairs of frames, pixels and channels: motion that both videos
    share cancels, and so does an error that stands still. ``excess_flicker_max`` is the same for the worst pair, which
    averages hide. Range 0 to 510, lower is better, in grey levels. Source: this project.

    Args:
        video: uint8 ``[T, H, W, 3]``, at least two frames.
        reference: The same shape.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: The videos differ in length or size, or have fewer than two frames.

    >>> still = np.zeros((3, 2, 2, 3), np.uint8)
    >>> excess_flicker(still + np.uint8(9), still)
    0.0
    """
    return float(np.sqrt(flicker_errors(video, reference).mean()))


def _conclude(errors: Curve) -> Measurement:
    curve = np.sqrt(errors)
    values = {"excess_flicker": float(np.sqrt(errors.mean())), "excess_flicker_max": float(curve.max())}
    return Measurement(values, {"excess_flicker": curve})


METRIC = walking(
    "excess_flicker",
    (
        Quantity("excess_flicker", "Excess flicker", "grey levels", "lower", 0.0, 510.0),
        Quantity("excess_flicker_max", "Flicker maximum", "grey levels", "lower", 0.0, 510.0),
    ),
    ("reference",),
    Walk(flicker_errors, 1, _conclude),
)
