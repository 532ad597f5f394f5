"""Beginning against end, by hand and against scikit-image, and the energy that leading directions hold."""

import math

import numpy as np
import pytest
from skimage.metrics import peak_signal_noise_ratio

from quantwm_core.errors import ShapeError
from quantwm_eval.metrics.drift import drift, ends, sharpness
from quantwm_eval.metrics.query_energy import cumulative_energy


def test_drift_is_the_psnr_of_the_beginning_minus_that_of_the_end() -> None:
    draw = np.random.default_rng(0)
    truth = draw.integers(60, 190, (40, 12, 20, 3), dtype=np.uint8)
    noise = draw.normal(0, 1, truth.shape) * np.linspace(1, 20, 40)[:, None, None, None]
    video = (truth + noise).round().clip(0, 255).astype(np.uint8)
    found = drift(video, truth)
    first, last = (peak_signal_noise_ratio(truth[x], video[x], data_range=255) for x in (slice(0, 6), slice(34, 40)))
    assert found["truth_psnr_start"] == pytest.approx(first)
    assert found["truth_psnr_end"] == pytest.approx(last)
    assert found["drift"] == pytest.approx(first - last)
    assert found["drift"] > 10


def test_a_perfect_beginning_or_end_is_infinite_and_both_are_no_drift() -> None:
    truth = np.random.default_rng(1).integers(0, 256, (10, 4, 4, 3), dtype=np.uint8)
    late, early = truth.copy(), truth.copy()
    late[-1] ^= 255
    early[0] ^= 255
    assert drift(late, truth)["drift"] == math.inf
    assert drift(early, truth)["drift"] == -math.inf
    assert drift(truth, truth)["drift"] == 0
    with pytest.raises(ShapeError):
        drift(truth, truth[1:])


def test_a_blurred_end_loses_sharpness() -> None:
    checks = (np.indices((8, 8)).sum(0) % 2 * 200).astype(np.uint8)
    video = np.broadcast_to(checks[None, ..., None], (20, 8, 8, 3)).copy()
    assert sharpness(video).tolist() == [200.0] * 20
    video[-3:] = video[-3:] // 2
    assert drift(video, video)["sharpness_drift"] == pytest.approx(-0.5)


def test_the_ends_of_short_curves_are_one_entry() -> None:
    assert ends(np.array([4.0, 1.0])) == (4.0, 1.0)
    assert ends(np.arange(20.0)) == (1.0, 18.0)


def test_energy_is_that_of_projections_onto_the_leading_directions() -> None:
    queries = np.random.default_rng(2).normal(size=(500, 12)) * np.linspace(3, 0.1, 12)
    _, spectrum, directions = np.linalg.svd(queries)
    shares = cumulative_energy(np.square(spectrum))
    for rank in (1, 8, 12):
        held = np.square(queries @ directions[:rank].T).sum() / np.square(queries).sum()
        assert shares[rank - 1] == pytest.approx(held)
    assert np.isnan(cumulative_energy(np.zeros((2, 3)))).all()
