from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import codebook, statistics
from quantwm_core.codebook import Metric
from quantwm_core.domain import BF16
from quantwm_core.errors import ParameterError, ShapeError
from tests.core import distances, scalar, strategies, tolerances
from tests.core.compare import assert_bits

METRICS = ("none", "diagonal", "full")


def _metric(name: str, heads: int, channels: int, seed: int = 0) -> Metric:
    moment = strategies.moment(seed, heads, channels).mean
    return {"none": None, "diagonal": statistics.sensitivity(moment), "full": statistics.normalised(moment)}[name]


@pytest.mark.parametrize("tokens", [*range(1, 70), 255, 256, 257, 1023, 1024, 4095, 4096, 4680, 9360, 29640])
def test_default_size(tokens: int) -> None:
    powers = [2**k for k in range(9) if 2**k <= Fraction(tokens, 16)]
    assert codebook.default_size(tokens) == max(powers, default=1)


def test_an_empty_unit_has_no_codebook() -> None:
    with pytest.raises(ShapeError, match="a unit of 0 tokens"):
        codebook.default_size(0)


@given(st.integers(1, 10_000), st.integers(1, 256))
def test_initial_tokens(tokens: int, centroids: int) -> None:
    size = min(tokens, centroids)
    want = [int((i + Fraction(1, 2)) * tokens / size) for i in range(size)]
    assert codebook.initial_tokens(tokens, size).tolist() == want
    assert len(set(want)) == size
    assert want[-1] < tokens


@given(strategies.small_units(), st.sampled_from(METRICS), st.integers(1, 9), st.integers(1, 9))
def test_nearest_agrees_with_brute_force(unit: np.ndarray, name: str, size: int, count: int) -> None:
    metric = _metric(name, unit.shape[1], unit.shape[3])
    table = codebook.fit(unit, size, metric, iterations=2)
    index = codebook.nearest(unit, table, metric, min(count, table.shape[2]))
    distances.assert_nearest(index, unit, table, metric)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("kind", ["normal", "offset", "channels"])
@pytest.mark.parametrize("count", [1, 4, 32])
def test_nearest_is_nearest_to_1e_5(name: str, kind: str, count: int) -> None:
    unit = strategies.unit((kind, kind), 7, tokens=400, channels=64)
    metric = _metric(name, 2, 64)
    table = codebook.fit(unit, 32, metric)
    distances.assert_nearest(codebook.nearest(unit, table, metric, count), unit, table, metric, frame=False)


@pytest.mark.parametrize("offset", [10, 100, 300])
def test_a_large_common_offset_does_not_blur_distances(offset: float) -> None:
    # Distances expanded around the origin are wrong by up to a tenth here, and 2 % of the tokens choose another centroid.
    rng = np.random.default_rng(0)
    values = (offset * rng.standard_normal(128) + rng.standard_normal((1, 2000, 128))).astype(np.float32).astype(BF16)
    table = codebook.fit(values, 64)
    index = codebook.nearest(values, table)
    distance = distances.exact(values, table, None)
    chosen = np.take_along_axis(distance, index, axis=-1)[..., 0]
    assert (chosen <= (1 + tolerances.NEAR_TIE) * distance.min(axis=-1)).all()


def test_the_full_metric_of_a_diagonal_is_the_diagonal_metric() -> None:
    unit = strategies.unit(("normal",), 0, 64, 32)
    weights = _metric("diagonal", 1, 32)
    assert weights is not None
    table = codebook.fit(unit, 8, weights)
    full = np.eye(32, dtype=np.float32) * weights[..., None, :]
    np.testing.assert_array_equal(codebook.nearest(unit, table, weights, 8), codebook.nearest(unit, table, full, 8))


def test_ties_go_to_the_lowest_index() -> None:
    table = strategies.fp32([[[1, 0, 0, 0], [0, 1, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0]]])
    assert codebook.nearest(np.zeros((1, 1, 4), np.float32), table, count=4).ravel().tolist() == [0, 1, 2, 3]
    assert codebook.nearest(strategies.fp32([[[0, 1, 0, 0]]]), table, count=4).ravel().tolist() == [1, 3, 0, 2]
    many = np.zeros((1, 256, 4), np.float32)
    many[0, 200:] = 5
    assert codebook.nearest(strategies.fp32([[[4, 4, 4, 4]]]), many, count=256).ravel().tolist() == [
        *range(200, 256),
        *range(200),
    ]


@given(
    st.lists(st.lists(st.integers(-4, 4), min_size=4, max_size=4), min_size=1, max_size=14),
    st.integers(1, 6),
    st.sampled_from([None, [1.0, 2.0, 0.0, 4.0]]),
)
def test_one_round_is_the_scalar_code_ties_included(
    tokens: list[list[int]], size: int, weights: list[float] | None
) -> None:
    # Small integers: every distance and every sum is exact, so nothing may differ.
    values = np.array([tokens], np.float32)
    metric = None if weights is None else np.array([weights], np.float32)
    table = codebook.fit(values, size, metric, iterations=1)
    row_metric = None if metric is None else metric[0]
    assert_bits("centroids", table[0], np.array(scalar.lloyd(values[0], size, 1, None, row_metric), BF16))
    index = codebook.nearest(values, values[:, : table.shape[1]], metric)
    assert index[0, :, 0].tolist() == scalar.nearest(values[0], values[0, : table.shape[1]], row_metric)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("relaxation", [1.0, 1.5])
def test_many_rounds_are_the_scalar_code(name: str, seed: int, relaxation: float) -> None:
    unit = strategies.unit(("clusters",), seed, tokens=30, channels=8)
    metric = _metric(name, 1, 8, seed)
    table = codebook.fit(unit, 5, metric, iterations=5, relaxation=relaxation)
    row_metric = None if metric is None else metric[0, 0]
    want = scalar.lloyd(unit[0, 0].astype(np.float32), 5, 5, None, row_metric, relaxation)
    assert_bits("centroids", table[0, 0], np.array(want, BF16))


def _objective(unit: np.ndarray, table: np.ndarray, metric: Metric) -> float:
    """Sum of the squared distances to the nearest centroid."""
    return float(distances.exact(unit, table, metric).min(axis=-1).sum())


def _cost_of_rounding(unit: np.ndarray, table: np.ndarray, metric: Metric) -> float:
    """Storing a mean m in BF16 moves it by at most 2**-9 |m|, which adds the square of that per member."""
    moved = tolerances.BF16_ROUNDING * np.abs(table.astype(np.float64)).max(axis=-2, keepdims=True)
    if metric is None or metric.ndim == 4:
        norm = 1.0 if metric is None else float(np.linalg.eigvalsh(metric.astype(np.float64)).max())
        return unit.shape[2] * norm * float(np.square(moved).sum())
    return unit.shape[2] * float((metric.astype(np.float64)[..., None, :] * np.square(moved)).sum())


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("kind", ["normal", "clusters", "offset", "channels", "ties", "wide", "huge", "tiny"])
def test_the_objective_does_not_increase(name: str, kind: str) -> None:
    unit = strategies.unit((kind,), 3, tokens=120, channels=32)
    metric = _metric(name, 1, 32)
    tables = [codebook.fit(unit, 8, metric, iterations) for iterations in range(8)]
    objectives = [_objective(unit, table, metric) for table in tables]
    for before, after, table in zip(objectives, objectives[1:], tables[1:], strict=False):
        assert after <= before * (1 + tolerances.OBJECTIVE) + _cost_of_rounding(unit, table, metric)
    for iterations in (2, 4):  # what the last round comes from differs, so each is held against the start
        table = codebook.fit(unit, 8, metric, iterations, relaxation=1.99)
        allowed = objectives[0] * (1 + tolerances.OBJECTIVE) + _cost_of_rounding(unit, table, metric)
        assert _objective(unit, table, metric) <= allowed


@pytest.mark.parametrize("name", METRICS)
def test_four_relaxed_rounds_lead_farther_than_four(name: str) -> None:
    metric = _metric(name, 4, 64)
    unit = strategies.unit(("normal",) * 4, 3, tokens=2000, channels=64)
    lloyd, relaxed = (codebook.fit(unit, 32, metric, 4, relaxation=each) for each in (1.0, 1.5))
    assert _objective(unit, relaxed, metric) < _objective(unit, lloyd, metric)


@pytest.mark.parametrize("relaxation", [0.5, 2.0, -1.0, np.nan, np.inf])
def test_a_relaxation_that_would_not_converge_is_refused(relaxation: float) -> None:
    with pytest.raises(ParameterError, match=r"relaxation .*less than 2"):
        codebook.fit(np.zeros((1, 4, 4), np.float32), 2, relaxation=relaxation)


def test_rounds_reduce_the_objective_of_clusters() -> None:
    unit = strategies.unit(("clusters",), 5, tokens=200, channels=32)
    first, last = (_objective(unit, codebook.fit(unit, 16, iterations=count), None) for count in (0, 10))
    assert last < 0.9 * first


def test_an_empty_cluster_keeps_its_centroid() -> None:
    values = strategies.fp32([[[1, 1], [2, 2], [1, 2], [2, 1]]])
    initial = strategies.fp32([[[1, 1], [100, -100], [2, 2]]])
    table = codebook.fit(values, 3, iterations=5, initial=initial).astype(np.float32)
    assert table[0, 1].tolist() == [100, -100]


@given(strategies.small_units(), st.integers(1, 256))
def test_there_are_never_more_centroids_than_tokens(unit: np.ndarray, size: int) -> None:
    table = codebook.fit(unit, size, iterations=1)
    assert table.shape == (*unit.shape[:2], min(size, unit.shape[2]), unit.shape[3])
    assert table.dtype == BF16
    assert np.isfinite(table.astype(np.float32)).all()


@given(strategies.small_units(kinds=("normal", "clusters", "offset", "channels")))
def test_as_many_centroids_as_tokens_leave_no_residual(unit: np.ndarray) -> None:
    table = codebook.fit(unit, 64)
    index = codebook.nearest(unit, table)
    assert_bits("decoded", np.take_along_axis(table, index, axis=-2), unit)


@given(strategies.small_units(kinds=("constant", "zeros")), st.integers(1, 9))
def test_equal_tokens_have_equal_centroids(unit: np.ndarray, size: int) -> None:
    table = codebook.fit(unit, size)
    np.testing.assert_array_equal(table, np.broadcast_to(unit[:, :, :1], table.shape))


@given(
    strategies.small_units(kinds=("normal", "clusters", "ties", "one", "offset", "channels")),
    st.integers(-40, 40),
    st.sampled_from(METRICS),
)
def test_powers_of_two_scale_through(unit: np.ndarray, power: int, name: str) -> None:
    metric = _metric(name, unit.shape[1], unit.shape[3])
    scaled = np.ldexp(unit.astype(np.float32), power).astype(BF16)
    table, scaled_table = codebook.fit(unit, 8, metric, 3), codebook.fit(scaled, 8, metric, 3)
    assert_bits("centroids", scaled_table, np.ldexp(table.astype(np.float32), power).astype(BF16))
    index = codebook.nearest(unit, table, metric, table.shape[2])
    assert_bits("index", codebook.nearest(scaled, scaled_table, metric, table.shape[2]), index)


@given(strategies.small_units(), st.sampled_from(METRICS), st.integers(0, 2**32 - 1))
def test_given_the_codebook_permuted_tokens_permute_the_index(unit: np.ndarray, name: str, seed: int) -> None:
    metric = _metric(name, unit.shape[1], unit.shape[3])
    table = codebook.fit(unit, 6, metric, 2)
    order = np.random.default_rng(seed).permutation(unit.shape[2])
    index, permuted = codebook.nearest(unit, table, metric), codebook.nearest(unit[:, :, order], table, metric)
    differs = permuted != index[:, :, order]
    if differs.any():  # only where both are nearest
        distances.assert_nearest(permuted, unit[:, :, order], table, metric)


@pytest.mark.parametrize("name", METRICS)
def test_a_stream_does_not_depend_on_the_others(name: str) -> None:
    unit = strategies.unit(("normal", "huge", "clusters", "tiny"), 1, tokens=70, channels=64)
    metric = _metric(name, 4, 64)
    table = codebook.fit(unit, 16, metric)
    index = codebook.nearest(unit, table, metric, 4)
    for head in range(4):
        own = None if metric is None else metric[:, head : head + 1]
        one = unit[:, head : head + 1]
        assert_bits(f"head {head}", codebook.fit(one, 16, own), table[:, head : head + 1])
        assert_bits(f"head {head}", codebook.nearest(one, table[:, head : head + 1], own, 4), index[:, head : head + 1])
    order = [2, 0, 3, 1]
    permuted = None if metric is None else metric[:, order]
    assert_bits("permuted heads", codebook.fit(unit[:, order], 16, permuted), table[:, order])


def test_a_warm_start_is_where_it_begins() -> None:
    unit = strategies.unit(("normal",), 2, tokens=100, channels=32)
    initial = codebook.fit(unit[:, :, ::-1], 8)
    assert_bits("no round", codebook.fit(unit, 8, iterations=0, initial=initial), initial)
    warm = codebook.fit(unit, 8, iterations=2, initial=initial)
    want = scalar.lloyd(unit[0, 0].astype(np.float32), 8, 2, initial[0, 0].astype(np.float32))
    assert_bits("two rounds", warm[0, 0], np.array(want, BF16))


@pytest.mark.parametrize(
    ("kind", "before"), [("tiny", "huge"), ("huge", "tiny"), ("denormal", "huge"), ("zeros", "huge")]
)
@pytest.mark.parametrize("name", METRICS)
def test_a_warm_start_of_another_magnitude_overflows_nowhere(kind: str, before: str, name: str) -> None:
    unit, old = (strategies.unit((each,), 2, tokens=40, channels=32) for each in (kind, before))
    metric = _metric(name, 1, 32)
    table = codebook.fit(unit, 8, metric, iterations=2, initial=codebook.fit(old, 8))
    assert np.isfinite(table.astype(np.float32)).all()
    assert codebook.nearest(unit, table, metric, 4).shape == (1, 1, 40, 4)


def test_a_warm_start_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"initial centroids: got shape \(1, 3, 4\), need \(1, 2, 4\)"):
        codebook.fit(np.ones((1, 8, 4), np.float32), 2, initial=np.ones((1, 3, 4), np.float32))


@pytest.mark.parametrize("centroids", [0, -1, 257])
def test_an_impossible_size_is_refused(centroids: int) -> None:
    with pytest.raises(ParameterError, match=f"{centroids} centroids: need 1 to 256"):
        codebook.fit(np.ones((1, 8, 4), np.float32), centroids)


def test_a_negative_number_of_rounds_is_refused() -> None:
    with pytest.raises(ParameterError, match="-1 iterations"):
        codebook.fit(np.ones((1, 8, 4), np.float32), 2, iterations=-1)


@pytest.mark.parametrize("count", [0, 3])
def test_an_impossible_count_is_refused(count: int) -> None:
    with pytest.raises(ParameterError, match=f"{count} nearest of 2 centroids"):
        codebook.nearest(np.ones((1, 8, 4), np.float32), np.ones((1, 2, 4), np.float32), count=count)


def test_no_stream_axis_is_one_stream() -> None:
    unit = strategies.unit(("normal",), 0, 40, 32)[0]
    table = codebook.fit(unit, 4)
    assert_bits("centroids", codebook.fit(unit[0], 4), table[0])
    assert_bits("index", codebook.nearest(unit[0], table[0], None, 2), codebook.nearest(unit, table, None, 2)[0])


def test_values_are_tokens_of_channels(unchecked: None) -> None:
    with pytest.raises(ShapeError, match=r"^values \(8,\): need \[\.\.\., tokens, channels\]"):
        codebook.fit(np.zeros(8, np.float32), 2)
