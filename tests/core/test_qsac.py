import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import affine, codebook, qsac, statistics
from quantwm_core.codebook import Metric
from quantwm_core.domain import BF16
from quantwm_core.errors import ParameterError
from tests.core import distances, scalar, strategies, tolerances
from tests.core.compare import assert_bits

METRICS = ("uniform", "diagonal", "full")


def _weights(name: str, heads: int, channels: int) -> tuple[np.ndarray, Metric]:
    moment = strategies.moment(3, heads, channels).mean
    if name == "uniform":
        return np.ones((1, heads, channels), np.float32), None
    weights = statistics.sensitivity(moment)
    return weights, weights if name == "diagonal" else statistics.normalised(moment)


def _costs(unit: np.ndarray, table: np.ndarray, weights: np.ndarray, group_size: int) -> np.ndarray:
    """Cost of every token against every centroid, FP64."""
    residual = unit.astype(np.float64)[:, :, :, None] - table.astype(np.float64)[:, :, None]
    grouped = residual.reshape(*residual.shape[:-1], -1, group_size)
    span = np.maximum(grouped.max(axis=-1), 0) - np.minimum(grouped.min(axis=-1), 0)
    per_group = weights.astype(np.float64).reshape(*weights.shape[:2], 1, 1, -1, group_size).sum(axis=-1)
    return np.asarray((per_group * np.square(span)).sum(axis=-1))


@given(strategies.small_units(), st.sampled_from(METRICS))
def test_one_candidate_is_the_nearest_centroid(unit: np.ndarray, name: str) -> None:
    weights, metric = _weights(name, unit.shape[1], unit.shape[3])
    table = codebook.fit(unit, 8, metric, 2)
    index = qsac.choose(unit, table, affine.default_group_size(unit.shape[3]), weights, metric, 1)
    assert_bits("index", index, codebook.nearest(unit, table, metric)[..., 0].astype(np.uint8))
    distances.assert_nearest(index[..., None].astype(np.int64), unit, table, metric)


@given(strategies.small_units(), st.sampled_from(METRICS), st.sampled_from([2, 4, 8, 256]))
def test_the_choice_is_the_cheapest_of_the_candidates(unit: np.ndarray, name: str, candidates: int) -> None:
    weights, metric = _weights(name, unit.shape[1], unit.shape[3])
    size = affine.default_group_size(unit.shape[3])
    table = codebook.fit(unit, 8, metric, 2)
    count = min(candidates, table.shape[2])
    index = qsac.choose(unit, table, size, weights, metric, candidates)
    near = codebook.nearest(unit, table, metric, count)
    assert (near == index[..., None]).any(axis=-1).all(), "a choice that is no candidate"
    costs = _costs(unit, table, weights, size)
    chosen = np.take_along_axis(costs, index[..., None].astype(np.int64), axis=-1)[..., 0]
    best = np.take_along_axis(costs, near, axis=-1).min(axis=-1)
    # Squares of ranges below 2**-63 of the largest key vanish in FP32, all alike.
    vanished = table.shape[-1] * (np.abs(unit.astype(np.float64)).max(axis=(-2, -1)) * 2.0**-62)[..., None] ** 2
    assert (chosen <= best * (1 + tolerances.NEAR_TIE) + vanished).all()


@pytest.mark.parametrize("name", METRICS)
def test_all_candidates_are_the_brute_force_optimum(name: str) -> None:
    unit = strategies.unit(("normal",), 1, tokens=40, channels=32)
    weights, metric = _weights(name, 1, 32)
    table = codebook.fit(unit, 16, metric)
    index = qsac.choose(unit, table, 8, weights, metric, 16)
    wide, rows = unit[0, 0].astype(float).tolist(), table[0, 0].astype(float).tolist()
    for token, chosen in zip(wide, index[0, 0], strict=True):
        costs = [scalar.qsac_cost(token, row, weights[0, 0].tolist(), 8) for row in rows]
        assert costs[chosen] <= min(costs) * (1 + tolerances.NEAR_TIE)


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=8, max_size=8), min_size=1, max_size=8),
    st.lists(st.lists(st.integers(-3, 3), min_size=8, max_size=8), min_size=1, max_size=6),
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
    st.integers(1, 6),
)
def test_it_is_the_scalar_code_ties_included(
    tokens: list[list[int]], rows: list[list[int]], weights: list[int], candidates: int
) -> None:
    # Small integers: distances and costs are exact, so ties are real and go to the nearer, then to the lower index.
    keys, table = np.array([tokens], np.float32), np.array([rows], np.float32)
    sensitivity = np.array([weights], np.float32)
    index = qsac.choose(keys, table, 4, sensitivity, sensitivity, candidates)
    for token, chosen in zip(tokens, index[0], strict=True):
        near = sorted(range(len(rows)), key=lambda row: scalar.distance(token, rows[row], sensitivity[0]))
        costs = [scalar.qsac_cost(token, rows[row], weights, 4) for row in near[:candidates]]
        assert chosen == near[costs.index(min(costs))]


def test_a_tie_goes_to_the_nearer_centroid() -> None:
    # Residuals (2, 0, 0, 0) and (2, 2, 2, 2) span the same range; the first is nearer, though of the higher index.
    keys = np.zeros((1, 1, 4), np.float32)
    table = strategies.fp32([[[-2, -2, -2, -2], [-2, 0, 0, 0]]])
    assert qsac.choose(keys, table, 4, np.ones((1, 4), np.float32), candidates=2).item() == 1


def test_the_candidates_are_nearest_under_the_query_metric() -> None:
    keys = np.zeros((1, 1, 4), np.float32)
    table = strategies.fp32([[[3, 0, 0, 0], [0, 2, 0, 0]]])
    weights = strategies.fp32([[0.1, 1, 1, 1.9]])
    assert qsac.choose(keys, table, 4, weights, None, 1).item() == 1
    assert qsac.choose(keys, table, 4, weights, weights, 1).item() == 0


def test_the_full_metric_sees_what_the_diagonal_does_not() -> None:
    # Queries are along (1, 1): an error along (1, -1) costs nothing, one along (1, 1) everything.
    full = strategies.fp32([[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]])
    keys = np.zeros((1, 1, 4), np.float32)
    table = strategies.fp32([[[1, 1, 0, 0], [2, -2, 0, 0]]])
    weights = statistics.sensitivity(full)
    assert qsac.choose(keys, table, 4, weights, weights, 1).item() == 0
    assert qsac.choose(keys, table, 4, weights, statistics.normalised(full), 1).item() == 1


@given(strategies.small_units(kinds=strategies.MODERATE), st.integers(-40, 40), st.sampled_from(METRICS))
def test_powers_of_two_change_no_choice(unit: np.ndarray, power: int, name: str) -> None:
    weights, metric = _weights(name, unit.shape[1], unit.shape[3])
    size = affine.default_group_size(unit.shape[3])
    table = codebook.fit(unit, 8, metric, 1)
    scaled = [np.ldexp(array.astype(np.float32), power).astype(BF16) for array in (unit, table)]
    index = qsac.choose(unit, table, size, weights, metric)
    assert_bits("index", qsac.choose(scaled[0], scaled[1], size, weights, metric), index)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("candidates", [1, 4, 32])
def test_permuted_tokens_and_heads_permute_the_index(name: str, candidates: int) -> None:
    unit = strategies.unit(("normal", "channels", "offset"), 4, tokens=60, channels=32)
    weights, metric = _weights(name, 3, 32)
    table = codebook.fit(unit, 32, metric)
    index = qsac.choose(unit, table, 32, weights, metric, candidates)
    order = np.random.default_rng(0).permutation(60)
    permuted = qsac.choose(unit[:, :, order], table, 32, weights, metric, candidates)
    assert_bits("tokens", permuted, index[:, :, order])
    heads = [2, 0, 1]
    swapped_metric = None if metric is None else metric[:, heads]
    swapped = qsac.choose(unit[:, heads], table[:, heads], 32, weights[:, heads], swapped_metric, candidates)
    assert_bits("heads", swapped, index[:, heads])


def test_far_centroids_of_another_magnitude_overflow_nowhere() -> None:
    keys = strategies.unit(("tiny",), 0, 20, 32)
    table = strategies.unit(("huge",), 1, 4, 32)
    index = qsac.choose(keys, table, 32, np.ones((1, 1, 32), np.float32))
    assert index.shape == (1, 1, 20)


@pytest.mark.parametrize("candidates", [0, -3])
def test_no_candidate_is_refused(candidates: int) -> None:
    keys = np.ones((1, 2, 8), np.float32)
    with pytest.raises(ParameterError, match=f"{candidates} nearest of 2 centroids"):
        qsac.choose(keys, keys, 4, np.ones((1, 8), np.float32), candidates=candidates)


def test_a_group_size_that_does_not_fit_is_refused() -> None:
    keys = np.ones((1, 2, 8), np.float32)
    with pytest.raises(ParameterError, match="group size 3"):
        qsac.choose(keys, keys, 3, np.ones((1, 8), np.float32))
