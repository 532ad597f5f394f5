"""The warping error against another warp, and on motion that is known by hand."""

import importlib
import math
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter, map_coordinates

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Frames
from quantwm_eval.metrics.warping_error import visible, warping_error, warping_errors

cv2: Any = importlib.import_module("cv2")  # its types lack the flow


def texture(seed: int = 0, side: int = 96) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(0, 1, (side, side, 3))
    smooth = gaussian_filter(drawn, (2.5, 2.5, 0))
    return (127 + 90 * smooth / np.abs(smooth).max()).astype(np.uint8)


def pan(frames: int = 5, step: int = 2, side: int = 64) -> Frames:
    """A window that moves over a texture by whole pixels."""
    picture = texture()
    return np.stack([picture[8 : 8 + side, step * t : step * t + side] for t in range(frames)])


def test_motion_of_the_reference_is_no_error_and_other_motion_is() -> None:
    moving = pan()
    still = np.repeat(moving[:1], len(moving), 0)
    assert warping_error(moving, moving) < 2
    assert warping_error(still, still) == 0
    assert warping_error(still, moving) > 5 * warping_error(moving, moving)
    plain = math.sqrt(float(np.square(np.diff(moving.astype(float), axis=0)).mean()))
    assert plain > 5 * warping_error(moving, moving)


def test_a_flash_counts_by_its_height() -> None:
    still = np.full((4, 32, 32, 3), 100, np.uint8)
    flash = still.copy()
    flash[2] = 106
    np.testing.assert_allclose(warping_errors(flash, still), [0, 36, 36])
    assert warping_error(flash, still) == pytest.approx(math.sqrt(24))


def test_another_warp_gives_the_same_error() -> None:
    video, reference = pan(2, step=3), pan(2, step=3)
    video = (video.astype(int) + np.random.default_rng(1).integers(-9, 10, video.shape)).clip(0, 255).astype(np.uint8)
    grey = [cv2.cvtColor(np.ascontiguousarray(frame), cv2.COLOR_RGB2GRAY) for frame in reference]
    flow = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    backward, forward = flow.calc(grey[1], grey[0], None), flow.calc(grey[0], grey[1], None)
    rows, columns = np.indices(grey[0].shape)
    where = [rows + backward[..., 1], columns + backward[..., 0]]
    back = np.stack([map_coordinates(forward[..., axis], where, order=1, mode="nearest") for axis in (0, 1)], -1)
    gap = np.square(backward + back).sum(-1)
    seen = gap <= 0.01 * (np.square(backward).sum(-1) + np.square(back).sum(-1)) + 0.5
    for place, size in zip(where, grey[0].shape, strict=True):
        seen &= (place >= 0) & (place <= size - 1)
    moved = [map_coordinates(video[0, ..., c].astype(float), where, order=1, mode="nearest") for c in range(3)]
    error = np.square(video[1] - np.stack(moved, -1))[seen].mean()
    # OpenCV interpolates at steps of 1/32 of a pixel.
    assert warping_errors(video, reference)[0] == pytest.approx(error, rel=0.02)
    assert (visible(backward, forward) == seen).mean() > 0.995
    assert 0.8 < seen.mean() < 1  # what came in at the edge is not seen in both


def test_the_same_videos_give_the_same_error() -> None:
    assert warping_errors(pan(3), pan(3)).tolist() == warping_errors(pan(3), pan(3)).tolist()


def test_pairs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="equal length and size"):
        warping_error(pan(), pan()[:-1])
    with pytest.raises(ShapeError, match="at least 16 x 16"):
        warping_error(pan()[:, :12], pan()[:, :12])
    with pytest.raises(ShapeError, match="two frames"):
        warping_error(pan()[:1], pan()[:1])
