"""How a rollout leaves the truth, and its sharpness, over time."""

from __future__ import annotations

import numpy as np

from quantwm_eval.evidence import Curve, Evidence, Frames, check_video
from quantwm_eval.metric import Measurement, Metric, Quantity
from quantwm_eval.metrics.psnr import decibels, frame_errors

SHARE = 0.15
"""Part of a video that is its beginning, and its end."""


def sharpness(video: Frames) -> Curve:
    """Mean absolute difference of neighbouring pixels, down and across, of each frame.

    Args:
        video: uint8 ``[T, H, W, 3]``.

    Returns:
        float64 ``[T]``, grey levels.

    Raises:
        DtypeError, ShapeError: It is no video.

    >>> sharpness(np.full((2, 4, 4, 3), 9, np.uint8))
    array([0., 0.])
    """
    wide = check_video(video).astype(np.int16)
    return np.array([sum(np.abs(np.diff(frame, axis=axis)).mean() for axis in (0, 1)) / 2 for frame in wide])


def ends(curve: Curve) -> tuple[float, float]:
    """Means over the first and the last 15 % of a curve, at least one entry each.

    >>> ends(np.arange(10.0))
    (0.0, 9.0)
    """
    count = max(1, int(SHARE * len(curve)))
    return float(curve[:count].mean()), float(curve[-count:].mean())


def drift(video: Frames, truth: Frames) -> dict[str, float]:
    """What time does to a rollout.

    ``truth_psnr_start`` and ``truth_psnr_end`` are the PSNR against the true video over the first and the last 15 % of the
    frames (errors averaged before the logarithm), higher is better, in dB; ``drift`` is the former minus the latter, range
    minus infinity to infinity, lower is better, in dB. BF16 drifts too: the method's own part is its difference from BF16.
    ``sharpness_drift`` is the sharpness of the end over that of the beginning minus one, range -1 to infinity, describes, no
    unit: below zero a video blurs. Source: beginning against end after FramePack (arXiv 2504.12626), which takes 15 % too;
    the truth is at hand where the world is a function.

    Args:
        video: uint8 ``[T, H, W, 3]``.
        truth: The same shape.

    Raises:
        DtypeError, ShapeError: The videos cannot be compared.

    >>> still = np.zeros((4, 4, 4, 3), np.uint8)
    >>> drift(still, still)["truth_psnr_end"]
    inf
    """
    start, end = map(decibels, ends(frame_errors(video, truth)))
    first, last = ends(sharpness(video))
    return {
        "truth_psnr_start": start,
        "truth_psnr_end": end,
        "drift": 0.0 if start == end else start - end,  # infinite both
        "sharpness_drift": last / first - 1 if first else float("nan"),
    }


def _measure(evidence: Evidence) -> Measurement:
    truth: Frames = evidence.need("truth")
    curve = np.array([decibels(error) for error in frame_errors(evidence.video, truth)])
    return Measurement(drift(evidence.video, truth), {"truth_psnr_end": curve})


METRIC = Metric(
    "drift",
    (
        Quantity("truth_psnr_start", "PSNR against the truth, first 15 %", "dB", "higher"),
        Quantity("truth_psnr_end", "last 15 %", "dB", "higher"),
        Quantity("drift", "Drift", "dB", "lower", -np.inf),
        Quantity("sharpness_drift", "Change of sharpness", "share", "neither", -1.0, digits=1),
    ),
    ("truth",),
    _measure,
)
