"""The look-away test: is the ball still there after looking elsewhere?"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Evidence, Frames, LookAway, check_pair
from quantwm_eval.metric import Measurement, Metric, Quantity
from quantwm_eval.metrics.psnr import decibels


def region_error(video: Frames, truth: Frames, region: Bool[np.ndarray, "frames height width"]) -> float:
    """Mean squared error inside a region, squared grey levels.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: Sizes differ, or the region is empty.
    """
    check_pair(video, truth)
    if region.shape != video.shape[:3] or not region.any():
        raise ShapeError(
            f"region: got shape {region.shape} with {int(region.sum())} pixels, "
            f"need {video.shape[:3]} with at least one pixel set"
        )
    difference = video[region].astype(np.int32) - truth[region]
    return float(np.square(difference).mean())


def object_permanence(video: Frames, episode: LookAway) -> tuple[bool, float]:
    """Look-away test of one episode.

    In the region where the ball must be seen again, the ball counts as *redrawn* if the video is closer to the true video
    than to the true video without the ball: ``mean (I - truth)² < mean (I - absent)²``. ``balls_redrawn`` is 1 or 0 for an
    episode and a share in tables, range 0 to 1, higher is better, no unit. ``ball_psnr`` is the PSNR of that region
    against the truth, in dB, higher is better; a ball of the wrong colour lowers it. Source: this project.

    Args:
        video: uint8 ``[T, H, W, 3]``.
        episode: Truth, counterfactual and region.

    Returns:
        Whether the ball was redrawn, and the PSNR of its region.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: Sizes differ, or the region is empty.
    """
    with_ball = region_error(video, episode.truth, episode.region)
    without_ball = region_error(video, episode.absent, episode.region)
    return with_ball < without_ball, decibels(with_ball)


def _measure(evidence: Evidence) -> Measurement:
    redrawn, quality = object_permanence(evidence.video, evidence.need("look_away"))
    return Measurement({"balls_redrawn": float(redrawn), "ball_psnr": quality})


METRIC = Metric(
    "object_permanence",
    (
        Quantity("balls_redrawn", "Balls redrawn", "", "higher", 0.0, 1.0),
        Quantity("ball_psnr", "PSNR of the ball", "dB", "higher"),
    ),
    ("look_away",),
    _measure,
)
