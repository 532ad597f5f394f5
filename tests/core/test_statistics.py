import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import statistics
from quantwm_core.domain import BF16
from quantwm_core.errors import DomainError, DtypeError, ParameterError, ShapeError
from quantwm_core.method import scheme
from quantwm_core.statistics import QueryMoment, QueryStatistics, merge, second_moment
from tests.core import strategies, tolerances
from tests.core.compare import assert_bits, assert_within


def _queries(seed: int, heads: int, tokens: int, channels: int = 8, batch: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, heads, tokens, channels)).astype(np.float32).astype(BF16)


def _naive(queries: np.ndarray, kv_heads: int) -> np.ndarray:
    """``E[q q^T]`` query by query, FP64."""
    batch, heads, tokens, channels = queries.shape
    total = np.zeros((batch, kv_heads, channels, channels))
    for b, head, token in np.ndindex(batch, heads, tokens):
        query = queries[b, head, token].astype(np.float64)
        total[b, head // (heads // kv_heads)] += np.outer(query, query)
    return total / (heads // kv_heads * tokens)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_queries_of_a_grouped_head_are_pooled(heads: int, kv_heads: int, tokens: int) -> None:
    queries = _queries(heads, heads, tokens, batch=2)
    moment = second_moment(queries, kv_heads)
    assert moment.count == heads // kv_heads * tokens
    assert moment.mean.dtype == np.float32
    want = _naive(queries, kv_heads)
    assert_within("moment", moment.mean, want, tolerances.MOMENT * np.abs(want).max())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 100))
def test_merged_moments_are_the_moment_of_all_queries(lengths: list[int], seed: int) -> None:
    parts = [_queries(seed + i, 4, length) for i, length in enumerate(lengths)]
    merged = second_moment(parts[0], 2)
    for part in parts[1:]:
        merged = merge(merged, second_moment(part, 2))
    whole = second_moment(np.concatenate(parts, axis=2), 2)
    assert merged.count == whole.count
    assert_within("moment", merged.mean, whole.mean, tolerances.MOMENT * np.abs(whole.mean).max())


def test_moments_of_different_caches_do_not_merge() -> None:
    with pytest.raises(ShapeError, match="query moments"):
        merge(second_moment(_queries(0, 2, 3), 2), second_moment(_queries(0, 2, 3), 1))


@pytest.mark.parametrize("wrong", [np.inf, np.nan, -1.0])
def test_units_are_not_sealed_with_moments_that_no_queries_have(wrong: float) -> None:
    keys, moment = _queries(0, 2, 32), second_moment(_queries(1, 2, 3), 2)
    mean = moment.mean.copy()
    mean[0, 1, 2, 2] = wrong
    with pytest.raises(DomainError, match="layer 3, query moment"):
        scheme("quantwm").seal(keys, keys, statistics.QueryMoment(mean, 3), label="layer 3")
    mean[0, 1, 2, 2], mean[0, 1, 0, 2] = 0, -1
    scheme("quantwm").seal(keys, keys, statistics.QueryMoment(mean, 3))


def test_half_precision_and_strides_do_not_matter() -> None:
    queries = _queries(0, 2, 5)
    want = second_moment(queries, 2).mean
    assert_bits("fp32", second_moment(queries.astype(np.float32), 2).mean, want)
    view = np.moveaxis(np.ascontiguousarray(np.moveaxis(queries, 1, 2)), 2, 1)
    assert_bits("view", second_moment(view, 2).mean, want)


@pytest.mark.parametrize("magnitude", [2.0**60, 2.0**-60])
def test_the_edges_of_the_domain(magnitude: float) -> None:
    queries = np.full((1, 1, 3, 256), magnitude, np.float32)
    moment = second_moment(queries, 1)
    np.testing.assert_array_equal(moment.mean, np.float32(magnitude) ** 2)
    np.testing.assert_array_equal(statistics.sensitivity(moment.mean), 1)
    np.testing.assert_array_equal(statistics.normalised(moment.mean), 1)
    basis, energies = statistics.principal_basis(moment.mean, 2)
    np.testing.assert_allclose(np.abs(basis[0, 0, :, 0].astype(float)), 1 / 16, rtol=2.0**-8)
    assert np.isfinite(energies).all()


def test_bad_queries_are_refused() -> None:
    with pytest.raises(ShapeError, match="3 heads do not divide among 2 KV heads"):
        second_moment(_queries(0, 3, 4), 2)
    with pytest.raises(ShapeError, match="0 KV heads"):
        second_moment(_queries(0, 3, 4), 0)
    with pytest.raises(DomainError, match="queries"):
        second_moment(np.full((1, 1, 1, 4), np.nan, np.float32), 1)
    with pytest.raises(ShapeError, match="queries"):
        second_moment(np.ones((1, 1, 0, 4), np.float32), 1)


def test_other_number_formats_are_refused(unchecked: None) -> None:
    with pytest.raises(DtypeError, match="queries: got float64"):
        second_moment(np.ones((1, 1, 1, 4), np.float64), 1)


def test_a_unit_sees_only_queries_from_before_it_began() -> None:
    first, second, third = (second_moment(_queries(i, 1, 4), 1) for i in range(3))
    state = QueryStatistics()
    assert state.past is None
    state = state.observe(first).observe(second)
    assert state.past is None
    state = state.sealed()
    assert state.past is not None
    assert_bits("past", state.past.mean, merge(first, second).mean)
    assert_bits("unchanged", state.observe(third).past.mean, state.past.mean)  # type: ignore[union-attr]
    after = state.observe(third).sealed()
    assert after.pending is None
    assert after.past is not None
    assert_bits("all", after.past.mean, merge(merge(first, second), third).mean)
    assert after.past.count == 12


def test_a_seal_without_new_queries_keeps_the_past() -> None:
    assert QueryStatistics().sealed() == QueryStatistics()
    moment = second_moment(_queries(0, 1, 4), 1)
    state = QueryStatistics().observe(moment).sealed()
    assert state.sealed().past is state.past
    assert state.sealed(0.5).past is state.past


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.9])
def test_decay_mixes_past_and_unit(decay: float) -> None:
    moments = [second_moment(_queries(i, 2, 3 + i), 2) for i in range(3)]
    state, want = QueryStatistics(), moments[0].mean.astype(np.float64)
    for moment in moments:
        state = state.observe(moment).sealed(decay)
    for moment in moments[1:]:
        want = decay * want + (1 - decay) * moment.mean
    assert state.past is not None
    assert_within("past", state.past.mean, want, tolerances.MOMENT * np.abs(want).max())
    assert state.past.count == sum(moment.count for moment in moments)


@pytest.mark.parametrize("decay", [1, 1.0, -0.1, float("nan"), "0.5"])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(ParameterError, match="decay"):
        statistics.check_decay(decay)


def test_the_state_is_counted() -> None:
    moment = second_moment(_queries(0, 2, 3, batch=2), 2)
    assert moment.nbytes == 4 * 8 * 8 * 2 * 2
    assert QueryStatistics(moment, moment).nbytes == 2 * moment.nbytes
    assert QueryStatistics().nbytes == 0


@pytest.mark.parametrize("channels", [32, 96])
def test_sensitivity_is_the_diagonal_over_its_mean(channels: int) -> None:
    mean = strategies.moment(0, 3, channels, batch=2).mean
    weights = statistics.sensitivity(mean)
    diagonal = np.einsum("bhii->bhi", mean.astype(np.float64))
    assert_within("weights", weights, diagonal / diagonal.mean(axis=-1, keepdims=True), 1e-6 * channels)
    np.testing.assert_allclose(weights.mean(axis=-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(np.einsum("bhii->bhi", statistics.normalised(mean)), weights)


def test_no_query_energy_means_uniform() -> None:
    mean = np.zeros((1, 2, 8, 8), np.float32)
    mean[0, 1] = np.diag(np.arange(8))
    np.testing.assert_array_equal(statistics.sensitivity(mean)[0, 0], 1)
    np.testing.assert_array_equal(statistics.normalised(mean)[0, 0], np.eye(8))
    basis, energies = statistics.principal_basis(mean, 2)
    assert not basis[0, 0].astype(np.float32).any()
    assert not energies[0, 0].any()
    assert basis[0, 1, :, 0].astype(float).tolist() == [0] * 7 + [1]
    assert energies[0, 1].tolist() == [7, 6]


@pytest.mark.parametrize("power", [-40, 7, 40])
def test_the_strength_of_queries_does_not_matter(power: int) -> None:
    mean = strategies.moment(0, 2, 32).mean
    scaled = np.ldexp(mean, power)
    assert_bits("sensitivity", statistics.sensitivity(scaled), statistics.sensitivity(mean))
    assert_bits("normalised", statistics.normalised(scaled), statistics.normalised(mean))


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_the_basis_holds_the_leading_eigenvectors(rank: int) -> None:
    mean = strategies.moment(1, 2, 32).mean
    basis, energies = statistics.principal_basis(mean, rank)
    assert basis.shape == (1, 2, 32, rank)
    assert basis.dtype == BF16
    wide = basis.astype(np.float64)
    assert (np.diff(energies, axis=-1) <= 0).all()
    all_energies = np.linalg.eigvalsh(mean.astype(np.float64))[..., ::-1]
    assert_within("energies", energies, all_energies[..., :rank], 1e-6 * all_energies.max())
    gram = np.swapaxes(wide, -1, -2) @ wide
    assert_within("orthonormal", gram, np.broadcast_to(np.eye(rank), gram.shape), 2 * tolerances.BF16_ROUNDING)
    image = mean.astype(np.float64) @ wide
    allowed = 2 * tolerances.BF16_ROUNDING * all_energies.max()
    assert_within("M U = U diag(energies)", image, wide * energies[..., None, :], allowed)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_directions_beyond_the_rank_of_m_carry_no_energy(rank: int) -> None:
    mean = strategies.moment(2, 1, 32, rank=2).mean
    basis, energies = statistics.principal_basis(mean, rank)
    assert (energies[..., 2:] <= 1e-5 * energies[..., :1]).all()
    assert (energies >= 0).all()
    wide = basis.astype(np.float64)
    np.testing.assert_allclose(np.linalg.norm(wide, axis=-2), 1, atol=2 * tolerances.BF16_ROUNDING)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 8]))
def test_the_largest_component_of_a_direction_is_positive(seed: int, rank: int) -> None:
    basis, _ = statistics.principal_basis(strategies.moment(seed, 2, 32).mean, rank)
    wide = basis.astype(np.float64)
    largest = np.take_along_axis(wide, np.abs(wide).argmax(axis=-2)[..., None, :], axis=-2)
    assert (largest > 0).all()


@pytest.mark.parametrize("rank", [0, -1, 9])
def test_an_impossible_rank_is_refused(rank: int) -> None:
    with pytest.raises(ParameterError, match=f"rank {rank}: need 1 to 8, the head dimension"):
        statistics.principal_basis(np.eye(8, dtype=np.float32)[None], rank)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_what_is_no_moment_has_no_directions(bad: float) -> None:
    mean = np.eye(8, dtype=np.float32)[None]
    mean[0, 3, 3] = bad
    with pytest.raises(DomainError, match=r"^query moment: "):
        statistics.principal_basis(mean, 2)


def test_a_moment_is_a_value() -> None:
    moment = QueryMoment(np.zeros((1, 1, 4, 4), np.float32), 1)
    with pytest.raises(AttributeError):
        moment.count = 2  # type: ignore[misc]
