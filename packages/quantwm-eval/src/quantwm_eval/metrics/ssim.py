"""Structural similarity against the BF16 video."""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64, UInt8

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Curve, Frames, check_pair
from quantwm_eval.metric import Quantity, Walk, mean_of_frames, walking

RADIUS = 5
SIGMA = 1.5
C1 = (0.01 * 255) ** 2
C2 = (0.03 * 255) ** 2

TILE = 16
"""Means that one product gives: the more, the more of its band is zeros, the fewer, the more products."""

Image: TypeAlias = Float64[np.ndarray, "height width"]


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
    # One channel at a time: its planes stay in the processor's cache.
    return sum(_of_channel(frame[..., channel], reference[..., channel]) for channel in range(3)) / 3


def _of_channel(frame: UInt8[np.ndarray, "height width"], reference: UInt8[np.ndarray, "height width"]) -> float:
    a, b = (np.ascontiguousarray(plane, np.float64) for plane in (frame, reference))
    mean_a, mean_b = _windowed(a), _windowed(b)
    products, squares = mean_a * mean_b, mean_a**2 + mean_b**2
    covariance = _windowed(a * b) - products
    variances = _windowed(a * a + b * b) - squares  # only their sum is asked for
    return float(((2 * products + C1) * (2 * covariance + C2) / ((squares + C1) * (variances + C2))).mean())


def _windowed(image: Image) -> Image:
    """Gaussian means of an image at the pixels whose window lies inside."""
    return _along_rows(_along_rows(image.T).T)


def _along_rows(image: Image) -> Image:
    """Gaussian means over the last axis, as products with a banded matrix: several times faster than a convolution."""
    length = image.shape[-1] - 2 * RADIUS
    means = np.empty((*image.shape[:-1], length))
    for start in range(0, length, TILE):
        width = min(TILE, length - start)
        np.matmul(image[..., start : start + width + 2 * RADIUS], _band(width), out=means[..., start : start + width])
    return means


@functools.cache
def _band(width: int) -> Float64[np.ndarray, "inputs outputs"]:
    """Column ``i`` holds the window's weights from row ``i`` on."""
    taps = np.exp(-0.5 * (np.arange(-RADIUS, RADIUS + 1) / SIGMA) ** 2)
    band = np.zeros((width + 2 * RADIUS, width))
    for column in range(width):
        band[column : column + taps.size, column] = taps / taps.sum()
    return band


METRIC = walking(
    "ssim",
    (Quantity("ssim", "SSIM", "", "higher", -1.0, 1.0, 4),),
    ("reference",),
    Walk(ssim, 0, mean_of_frames("ssim")),
)
