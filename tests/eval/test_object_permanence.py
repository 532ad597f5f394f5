"""The look-away test on episodes that are written down by hand."""

import math

import numpy as np
import pytest

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Evidence, Frames, LookAway
from quantwm_eval.metrics.object_permanence import METRIC, object_permanence


def episode() -> LookAway:
    """Eight frames; in the last two a ball of grey level 200 stands in an empty room of 50."""
    absent = np.full((8, 6, 6, 3), 50, np.uint8)
    truth = absent.copy()
    region = np.zeros((8, 6, 6), bool)
    region[-2:, 2:4, 2:4] = True
    truth[region] = 200
    return LookAway(truth, absent, region)


def drawn(level: int) -> Frames:
    video = np.full((8, 6, 6, 3), 50, np.uint8)
    video[episode().region] = level
    return video


def test_truth_is_redrawn_and_the_empty_room_is_not() -> None:
    assert object_permanence(episode().truth, episode()) == (True, math.inf)
    redrawn, quality = object_permanence(episode().absent, episode())
    assert not redrawn
    assert quality == pytest.approx(10 * math.log10(255**2 / 150**2))


@pytest.mark.parametrize(("level", "redrawn"), [(124, False), (125, False), (126, True), (255, True)])
def test_the_nearer_of_the_two_decides_and_a_tie_is_lost(level: int, redrawn: bool) -> None:
    assert object_permanence(drawn(level), episode())[0] is redrawn


def test_nothing_outside_the_region_counts() -> None:
    noisy = np.random.default_rng(0).integers(0, 256, (8, 6, 6, 3), dtype=np.uint8)
    noisy[episode().region] = 200
    assert object_permanence(noisy, episode()) == (True, math.inf)


def test_the_metric_reports_both_figures() -> None:
    measured = METRIC.measure(Evidence(drawn(190), look_away=episode()))
    assert measured.values == {"balls_redrawn": 1.0, "ball_psnr": pytest.approx(10 * math.log10(255**2 / 100))}
    assert not METRIC.applies(Evidence(drawn(190)))


def test_a_region_that_is_empty_or_does_not_fit_is_refused() -> None:
    known = episode()
    with pytest.raises(ShapeError, match="at least one pixel"):
        object_permanence(known.truth, LookAway(known.truth, known.absent, np.zeros_like(known.region)))
    with pytest.raises(ShapeError, match="region: got shape"):
        object_permanence(known.truth, LookAway(known.truth, known.absent, known.region[1:]))
    with pytest.raises(ShapeError, match="equal length and size"):
        object_permanence(known.truth[1:], known)
