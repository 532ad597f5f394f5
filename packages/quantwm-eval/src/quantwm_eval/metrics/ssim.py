"""Structural similarity against the BF16 video."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from jaxtyping import Float64, UInt8
from scipy.ndimage import correlate1d

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Curve, Frames, check_pair
from quantwm_eval.metric import Measurement, Quantity, Walk, walking

RADIUS = 5
SIGMA = 1.5
C1 = (0.01 * 255) ** 2
C2 = (0.03 * 255) ** 2

Image: TypeAlias = Float64[np.ndarray, "height width 3"]


def ssim(video: Frames, reference: Frames) -> Curve:
    """Structural similarity of each frame.

    ``(2 μa μb + C1)(2 σab + C2) / ((μa² + μb² + C1)(σa² + σb² + C2))`` with ``C1 = (0.01 · 255)²`` and
    ``C2 = (0.03 · 255)²``; means and (co)variances under an 11 x 11 Gaussian window of deviation 1.5, for each colour
    channel, averaged over channels and over the pixels whose window lies inside the frame. Range -1 to 1, higher is
    better, no unit. Source: Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity, 2004.

    Args:
        video: uint8 ``[T, H, W, 3]``.
        reference: The same shape.

    Returns:
        float64 ``[T]``.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: The videos differ in length or size, or are smaller than the window.

    >>> frames = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(1, 16, 16, 3)
    >>> ssim(frames, frames)
    array([1.])
    """
    check_pair(video, reference)
    window = 2 * RADIUS + 1
    if min(video.shape[1:3]) < window:
        raise ShapeError(f"video: got frames of {video.shape[1]} x {video.shape[2]}, SSIM needs {window} x {window}")
    return np.array([_similarity(a, b) for a, b in zip(video, reference, strict=True)])


def _similarity(frame: UInt8[np.ndarray, "height width 3"], reference: UInt8[np.ndarray, "height width 3"]) -> float:
    a, b = frame.astype(np.float64), reference.astype(np.float64)
    mean_a, mean_b = _windowed(a), _windowed(b)
    variance_a = _windowed(a * a) - mean_a**2
    variance_b = _windowed(b * b) - mean_b**2
    covariance = _windowed(a * b) - mean_a * mean_b
    numerator = (2 * mean_a * mean_b + C1) * (2 * covariance + C2)
    denominator = (mean_a**2 + mean_b**2 + C1) * (variance_a + variance_b + C2)
    return float((numerator / denominator).mean())


def _windowed(image: Image) -> Image:
    """Gaussian means of an image ``[H, W, 3]`` at the pixels whose window lies inside."""
    taps = np.exp(-0.5 * (np.arange(-RADIUS, RADIUS + 1) / SIGMA) ** 2)
    taps /= taps.sum()
    means: Image = correlate1d(correlate1d(image, taps, axis=0), taps, axis=1)
    return means[RADIUS:-RADIUS, RADIUS:-RADIUS]


def _conclude(curve: Curve) -> Measurement:
    return Measurement({"ssim": float(curve.mean())}, {"ssim": curve})


METRIC = walking(
    "ssim", (Quantity("ssim", "SSIM", "", "higher", -1.0, 1.0, 4),), ("reference",), Walk(ssim, 0, _conclude)
)
