"""What moves in the BF16 video should move in this one, and nothing else should change."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Curve, Frames, check_pair
from quantwm_eval.metric import Measurement, Quantity, Walk, walking

SMALLEST = 16
"""Side below which the flow has too few patches."""


def visible(
    backward: Float32[np.ndarray, "height width 2"], forward: Float32[np.ndarray, "height width 2"]
) -> Bool[np.ndarray, "height width"]:
    """Pixels of the later frame that the earlier one shows too.

    A pixel counts if it comes from inside the frame and flow there and back ends near where it began:
    ``|b(x) + f(x + b(x))|² <= 0.01 (|b|² + |f|²) + 0.5`` (Sundaram et al., Dense Point Trajectories, 2010).

    Args:
        backward: Flow from the later frame to the earlier one, pixels.
        forward: Flow from the earlier frame to the later one.
    """
    return _visible(backward, forward, _sources(backward))


def _visible(
    backward: Float32[np.ndarray, "height width 2"],
    forward: Float32[np.ndarray, "height width 2"],
    sources: Float32[np.ndarray, "height width 2"],
) -> Bool[np.ndarray, "height width"]:
    back = _remap(forward, sources)
    gap = _squares(backward + back)
    allowed = 0.01 * (_squares(backward) + _squares(back)) + 0.5
    height, width = gap.shape
    column, row = sources[..., 0], sources[..., 1]
    inside = (column >= 0) & (row >= 0) & (column <= width - 1) & (row <= height - 1)
    return np.asarray(inside & (gap <= allowed))


def warping_errors(video: Frames, reference: Frames) -> Curve:
    """Mean square of what each frame differs from the one before it, moved along the reference's optical flow.

    Returns:
        float64 ``[T - 1]``, squared grey levels; NaN where no pixel is visible in both frames.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: The videos differ in length or size, have fewer than two frames, or are too small for a flow.
    """
    check_pair(video, reference)
    if len(video) < 2 or min(video.shape[1:3]) < SMALLEST:
        raise ShapeError(
            f"video: got shape {video.shape}, the warping error needs two frames of at least {SMALLEST} x {SMALLEST}"
        )
    grey = [_cv2().cvtColor(np.ascontiguousarray(frame), _cv2().COLOR_RGB2GRAY) for frame in reference]
    flow = _cv2().DISOpticalFlow_create(_cv2().DISOPTICAL_FLOW_PRESET_MEDIUM)
    return np.array([_pair_error(flow, video[t], video[t + 1], grey[t], grey[t + 1]) for t in range(len(video) - 1)])


def warping_error(video: Frames, reference: Frames) -> float:
    """Warping error of a video along its reference's motion.

    ``sqrt(mean (I_{t+1}(x) - I_t(x + b_t(x)))²)`` over pairs of frames, channels and the pixels that both frames of the
    reference show, where ``b_t`` is the reference's optical flow from frame ``t + 1`` to ``t`` (OpenCV's DIS, medium preset):
    flicker counts, motion that the reference has too does not. The flow is not perfect, so the reference's own error is above
    zero. Range 0 to 255, lower is better, in grey levels; needs OpenCV (the extra ``flow``). Source: Lai et al., Learning
    Blind Video Temporal Consistency, 2018, with the flow taken from the BF16 video; Kroeger et al., Fast Optical Flow Using
    Dense Inverse Search, 2016.

    Args:
        video: uint8 ``[T, H, W, 3]``, at least two frames.
        reference: The same shape.

    Raises:
        DtypeError, ShapeError: As :func:`warping_errors`.
    """
    return _root(warping_errors(video, reference))


def _pair_error(
    flow: Any,
    before: UInt8[np.ndarray, "height width 3"],
    after: UInt8[np.ndarray, "height width 3"],
    grey_before: UInt8[np.ndarray, "height width"],
    grey_after: UInt8[np.ndarray, "height width"],
) -> float:
    backward, forward = flow.calc(grey_after, grey_before, None), flow.calc(grey_before, grey_after, None)
    sources = _sources(backward)
    seen = _visible(backward, forward, sources)
    if not seen.any():
        return float("nan")
    moved = _remap(before.astype(np.float32), sources)
    errors = _squares(after - moved)[seen]
    return float(errors.mean(dtype=np.float64)) / 3


def _squares(vectors: Float32[np.ndarray, "height width parts"]) -> Float32[np.ndarray, "height width"]:
    """Squared length of every pixel's vector."""
    return np.asarray(np.einsum("hwp,hwp->hw", vectors, vectors))


def _sources(flow: Float32[np.ndarray, "height width 2"]) -> Float32[np.ndarray, "height width 2"]:
    """Where each pixel comes from: column and row."""
    return _places(*flow.shape[:2]) + flow


@functools.lru_cache(maxsize=1)
def _places(height: int, width: int) -> Float32[np.ndarray, "height width 2"]:
    """Column and row of every pixel."""
    rows, columns = np.indices((height, width), dtype=np.float32)
    return np.stack([columns, rows], -1)


def _remap(image: Any, sources: Float32[np.ndarray, "height width 2"]) -> Any:
    return _cv2().remap(image, sources, None, _cv2().INTER_LINEAR, borderMode=_cv2().BORDER_REPLICATE)


def _root(errors: Curve) -> float:
    known = errors[np.isfinite(errors)]
    return float(np.sqrt(known.mean())) if known.size else float("nan")


def _cv2() -> Any:
    """OpenCV, which is optional."""
    return importlib.import_module("cv2")


def _conclude(errors: Curve) -> Measurement:
    return Measurement({"warping_error": _root(errors)}, {"warping_error": np.sqrt(errors)})


METRIC = walking(
    "warping_error",
    (Quantity("warping_error", "Warping error", "grey levels", "lower", 0.0, 255.0),),
    ("reference",),
    Walk(warping_errors, 1, _conclude),
    module="cv2",
)
