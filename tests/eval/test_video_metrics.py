"""PSNR, SSIM and both flickers against independent implementations and against cases known by hand."""

import math
from itertools import pairwise

import cv2
import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torchmetrics.functional.image import peak_signal_noise_ratio as torch_psnr
from torchmetrics.functional.image import structural_similarity_index_measure as torch_ssim

from quantwm_core.errors import DtypeError, ShapeError
from quantwm_eval.evidence import Frames
from quantwm_eval.metrics.excess_flicker import excess_flicker, flicker_errors
from quantwm_eval.metrics.psnr import psnr
from quantwm_eval.metrics.ssim import ssim
from quantwm_eval.metrics.temporal_flickering import temporal_flickering


def video(seed: int, frames: int = 5, height: int = 24, width: int = 31) -> Frames:
    """Smooth pictures that drift, with noise: neither metric is at its end of the scale."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    clean = [
        127 + 90 * np.sin((rows + 2 * t) / 5)[..., None] * np.cos(columns / 7)[..., None] * np.ones(3)
        for t in range(frames)
    ]
    return (np.stack(clean) + draw.normal(0, 12, (frames, height, width, 3))).clip(0, 255).astype(np.uint8)


A, B = video(1), video(2)


def test_psnr_agrees_with_scikit_image_and_torchmetrics() -> None:
    assert psnr(A, B) == pytest.approx(peak_signal_noise_ratio(B, A, data_range=255), abs=1e-9)
    other = torch_psnr(torch.tensor(A, dtype=torch.float64), torch.tensor(B, dtype=torch.float64), data_range=255.0)
    assert psnr(A, B) == pytest.approx(float(other), abs=1e-4)


def test_psnr_of_equal_videos_is_infinite_and_one_level_is_not() -> None:
    nearly = A.copy()
    nearly[2, 3, 4, 0] ^= 1
    assert psnr(A, A) == math.inf
    assert psnr(nearly, A) == pytest.approx(10 * math.log10(255**2 * A.size))


def test_ssim_agrees_with_scikit_image() -> None:
    for index, value in enumerate(ssim(A, B)):
        other = structural_similarity(
            A[index],
            B[index],
            channel_axis=2,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=255,
        )
        assert value == pytest.approx(other, abs=1e-7)


def test_ssim_agrees_with_torchmetrics() -> None:
    a, b = (torch.tensor(v, dtype=torch.float64).permute(0, 3, 1, 2) for v in (A, B))
    _, full = torch_ssim(a, b, data_range=255.0, reduction="none", return_full_image=True)
    # Its mean takes in a border of mirrored pixels; only windows inside the frame are compared.
    other = full[..., 5:-5, 5:-5].mean(dim=(1, 2, 3))
    np.testing.assert_allclose(ssim(A, B), other.numpy(), atol=1e-6)


def test_ssim_is_one_for_equal_videos_and_negative_for_inverted_ones() -> None:
    assert (ssim(A, A) == 1).all()
    assert (ssim(A, 255 - A) < 0).all()


def test_temporal_flickering_gives_vbench_digits() -> None:
    # VBench: FP32 mean of cv2.absdiff of FP32 frames, mean over pairs, (255 - mean) / 255.
    for seed in range(5):
        frames = video(seed, frames=7)
        pairs = [np.mean(cv2.absdiff(np.array(a, np.float32), np.array(b, np.float32))) for a, b in pairwise(frames)]
        assert temporal_flickering(frames) == (255.0 - np.mean(np.array(pairs)).item()) / 255.0


def test_temporal_flickering_by_hand() -> None:
    frames = np.zeros((3, 2, 2, 3), np.uint8)
    frames[1] = 51  # up by 51, down by 51
    assert temporal_flickering(frames) == pytest.approx(0.8)


def test_shared_motion_and_standing_errors_are_no_excess_flicker() -> None:
    assert excess_flicker(A, A) == 0
    shifted = (A // 2 + 40).astype(np.uint8)
    assert excess_flicker(shifted, (A // 2).astype(np.uint8)) == 0


def test_excess_flicker_by_hand() -> None:
    still = np.full((4, 2, 2, 3), 100, np.uint8)
    blinking = still.copy()
    blinking[2] = 106
    np.testing.assert_allclose(flicker_errors(blinking, still), [0, 36, 36])
    assert excess_flicker(blinking, still) == pytest.approx(math.sqrt(24))


def test_excess_flicker_reaches_its_bound() -> None:
    swapped = np.zeros((2, 1, 1, 3), np.uint8)
    swapped[1] = 255
    assert excess_flicker(swapped, swapped[::-1]) == 510


@pytest.mark.parametrize("metric", [psnr, ssim, excess_flicker])
def test_pairs_that_do_not_fit_are_refused(metric: object) -> None:
    assert callable(metric)
    with pytest.raises(ShapeError, match="equal length and size"):
        metric(A, B[:-1])
    with pytest.raises(ShapeError, match="equal length and size"):
        metric(A, B[:, :-1])
    with pytest.raises(DtypeError, match="reference: got float64"):
        metric(A, B.astype(np.float64))
    with pytest.raises(ShapeError, match="at least one frame"):
        metric(A[:0], B[:0])
    with pytest.raises(ShapeError, match=r"\[frames, height, width, 3\]"):
        metric(A[..., :1], B[..., :1])


def test_too_few_frames_and_too_small_pictures_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least two"):
        temporal_flickering(A[:1])
    with pytest.raises(ShapeError, match="at least two"):
        excess_flicker(A[:1], B[:1])
    with pytest.raises(ShapeError, match="11 x 11"):
        ssim(A[:, :10], B[:, :10])
