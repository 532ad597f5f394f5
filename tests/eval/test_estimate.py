"""Intervals against closed forms and published values."""

import math

import numpy as np
import pytest

from quantwm_eval.estimate import bootstrap, proportion
from quantwm_eval.paired import certain


def test_the_bootstrap_interval_is_near_the_normal_one_for_many_scenes() -> None:
    values = np.random.default_rng(1).normal(10, 2, 200)
    found = bootstrap(list(values))
    reach = 1.96 * values.std() / math.sqrt(200)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - reach, abs=0.05)
    assert found.high == pytest.approx(values.mean() + reach, abs=0.05)
    assert found.n == 200


def test_the_bootstrap_gives_the_same_twice_and_touches_no_global_state() -> None:
    before = np.random.get_state(legacy=False)  # noqa: NPY002 - the legacy state is what must not change
    assert bootstrap([1.0, 2.0, 4.0]) == bootstrap([1.0, 2.0, 4.0])
    after = np.random.get_state(legacy=False)  # noqa: NPY002 - the same
    np.testing.assert_equal(after, before)


@pytest.mark.parametrize(("scenes", "stated"), [(3, 0.75), (8, 0.87), (16, 0.92)])
def test_few_scenes_are_covered_as_often_as_is_stated(scenes: int, stated: float) -> None:
    drawn = np.random.default_rng(scenes).normal(size=(1000, scenes))
    found = [bootstrap(list(values)) for values in drawn]
    covered = np.mean([one.low <= 0 <= one.high for one in found])
    assert covered == pytest.approx(stated, abs=0.03)  # three standard errors of both


def test_a_difference_of_few_scenes_is_never_certain() -> None:
    values = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0]
    assert [certain(bootstrap(values[:n])) for n in range(7)] == [False] * 6 + [True]


def test_nan_is_left_out_and_infinity_stays() -> None:
    assert bootstrap([1.0, math.nan, 3.0]).n == 2
    assert bootstrap([1.0, math.nan, 3.0]).mean == 2
    assert bootstrap([1.0, math.inf]).low == math.inf
    assert bootstrap([]).n == 0
    assert math.isnan(bootstrap([math.nan]).mean)


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # Wilson 1927 as tabulated by Newcombe 1998, table I.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_as_published(hits: int, n: int, low: float, high: float) -> None:
    found = proportion([1.0] * hits + [0.0] * (n - hits))
    assert [found.low, found.high] == pytest.approx([low, high], abs=5e-5)
    assert found.mean == hits / n


def test_a_share_of_nothing_is_unknown() -> None:
    assert proportion([math.nan]).n == 0
