"""Peak signal-to-noise ratio against the BF16 video."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import UInt8

from quantwm_eval.evidence import Curve, Frames, check_pair
from quantwm_eval.metric import Measurement, Quantity, Walk, walking


def frame_errors(video: Frames, reference: Frames) -> Curve:
    """Mean squared error of each frame, squared grey levels, float64 ``[T]``.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: The videos differ in length or size.
    """
    check_pair(video, reference)
    return np.array([_squared_error(a, b) for a, b in zip(video, reference, strict=True)])


def decibels(error: float) -> float:
    """Turn a mean squared error into dB below the peak of 255; infinity for no error.

    >>> decibels(255.0**2)
    0.0
    """
    return math.inf if error == 0 else 10 * math.log10(255.0**2 / error)


def psnr(video: Frames, reference: Frames) -> float:
    """Peak signal-to-noise ratio.

    ``10 log10(255² / mean (video - reference)²)``, the mean over all frames, pixels and channels together, so that frames
    which are still identical do not make the average infinite. Range 0 to infinity, higher is better, in dB.
    Infinity means identical. Source: the QuantWM paper, against the BF16 rollout.

    Args:
        video: uint8 ``[T, H, W, 3]``.
        reference: The same shape.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: The videos differ in length or size.

    >>> psnr(np.zeros((2, 4, 4, 3), np.uint8), np.full((2, 4, 4, 3), 255, np.uint8))
    0.0
    """
    return decibels(float(frame_errors(video, reference).mean()))


def _squared_error(frame: UInt8[np.ndarray, "height width 3"], reference: UInt8[np.ndarray, "height width 3"]) -> float:
    difference = frame.astype(np.int32) - reference
    return float(np.square(difference).mean())


def _conclude(errors: Curve) -> Measurement:
    curve = np.array([decibels(float(error)) for error in errors])
    return Measurement({"psnr": decibels(float(errors.mean()))}, {"psnr": curve})


METRIC = walking("psnr", (Quantity("psnr", "PSNR", "dB", "higher"),), ("reference",), Walk(frame_errors, 0, _conclude))
