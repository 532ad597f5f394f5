import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import affine, packing, rounding, scales, statistics
from quantwm_core.domain import BF16
from tests.core import strategies
from tests.core.compare import assert_bits, assert_within


def _metric(mean: np.ndarray, basis: np.ndarray | None = None) -> np.ndarray:
    """``H`` of the module, written out."""
    channels = mean.shape[-1]
    metric = mean.astype(np.float64) / np.trace(mean, axis1=-2, axis2=-1)[..., None, None] * channels
    if basis is not None:
        wide = basis.astype(np.float64)
        complement = np.eye(channels) - wide @ np.linalg.pinv(wide)
        metric = complement @ metric @ np.swapaxes(complement, -1, -2)
    return metric + rounding.DAMP * np.eye(channels)


def _cost(error: np.ndarray, metric: np.ndarray) -> np.ndarray:
    """``e^T H e`` of every token."""
    wide = error.astype(np.float64)
    return np.einsum("...ni,...ij,...nj->...n", wide, metric, wide)


def _one_by_one(values: np.ndarray, code: affine.AffineCode, matrix: np.ndarray) -> np.ndarray:
    """Codes of the first stream, a number at a time."""
    step = scales.decode(code.scales, code.super_scale)[0]
    zero = affine.unpack_rows(code.zero_points, step.shape[-1], 0, len(step))[0]
    size = values.shape[-1] // step.shape[-1]
    codes = np.zeros(values.shape[1:], np.uint8)
    for token, row in enumerate(values[0]):
        wanted = list(row)
        for i in range(len(row)):
            s, z = step[token, i // size], int(zero[token, i // size])
            level = round(float(wanted[i] / s)) if s > 0 else 0
            codes[token, i] = min(max(level + z, 0), 3)
            lost = wanted[i] - np.float32(int(codes[token, i]) - z) * s
            for j in range(i + 1, len(row)):
                wanted[j] = wanted[j] - matrix[0, i, j] * lost
    return codes


@given(st.sampled_from(strategies.KINDS), st.integers(0, 99), st.sampled_from([1, 3, 9]))
def test_it_is_the_recursion_one_number_at_a_time(kind: str, seed: int, tokens: int) -> None:
    values = strategies.unit((kind,), seed, tokens, 16)[0].astype(np.float32)
    matrix = rounding.feedback(strategies.moment(seed, 1, 16).mean)[0]
    code = affine.encode(values, 8)
    got = packing.unpack(rounding.refine(values, code, matrix).codes, 16)[0]
    np.testing.assert_array_equal(got, _one_by_one(values, code, matrix))


@given(st.integers(0, 99), st.sampled_from([None, 1, 4]))
def test_the_matrix_factors_the_metric(seed: int, rank: int | None) -> None:
    # With v = U_1^T e, e^T H e is a sum of squares of v only if U_1^-1 H U_1^-T is diagonal.
    moment = strategies.moment(seed, 2, 32).mean
    basis = None if rank is None else statistics.principal_basis(moment, rank)[0]
    matrix, metric = rounding.feedback(moment, basis), _metric(moment, basis)
    unit = np.eye(32) + matrix.astype(np.float64)  # the inverse of U_1
    diagonal = unit @ metric @ np.swapaxes(unit, -1, -2)
    weights = np.diagonal(diagonal, axis1=-2, axis2=-1)
    assert_within("diagonal", diagonal, weights[..., None] * np.eye(32), 1e-4 * np.abs(diagonal).max())
    assert (weights > 0).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rank", [0, 4])
def test_feedback_costs_the_logits_less_than_nearest_codes(seed: int, rank: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((1, 1, 200, 64)).astype(np.float32)
    moment = strategies.moment(seed, 1, 64, rank=12).mean  # queries that fill a part of the space
    basis = statistics.principal_basis(moment, rank)[0] if rank else None
    metric = _metric(moment, basis)
    code = affine.encode(values, 32, 3)
    refined = rounding.refine(values, code, rounding.feedback(moment, basis))
    nearest, fed = (_cost(values - affine.decode(each), metric).sum() for each in (code, refined))
    assert fed < 0.85 * nearest
    plain, shaped = (np.square(values - affine.decode(each)).sum() for each in (code, refined))
    assert plain < shaped  # it is no better code for nothing in particular
    for name in ("scales", "zero_points", "super_scale"):
        assert_bits(name, getattr(refined, name), getattr(code, name))


def test_what_the_queries_see_channel_by_channel_is_rounded_so() -> None:
    values = strategies.unit(strategies.MODERATE, 0, 33, 32).astype(np.float32)[0]
    weights = np.random.default_rng(0).uniform(0.1, 9, (len(values), 32)).astype(np.float32)
    matrix = rounding.feedback(weights[:, :, None] * np.eye(32, dtype=np.float32))
    assert not matrix.any()
    code = affine.encode(values, 16)
    assert_bits("codes", rounding.refine(values, code, matrix).codes, code.codes)


def test_queries_that_are_zero_feed_nothing_back() -> None:
    assert not rounding.feedback(np.zeros((1, 2, 8, 8), np.float32)).any()
    moment = strategies.moment(0, 2, 16).mean
    without = np.zeros((1, 2, 16, 3), BF16)
    assert_bits("a basis of zeros", rounding.feedback(moment, without), rounding.feedback(moment))


def test_a_direction_that_psac_compensates_takes_no_part() -> None:
    moment = strategies.moment(0, 1, 16).mean
    basis = np.zeros((1, 1, 16, 1), BF16)
    basis[..., 3, 0] = 1
    matrix = rounding.feedback(moment, basis)[0, 0]
    assert not matrix[3].any()
    assert not matrix[:, 3].any()
    full = rounding.feedback(moment)[0, 0]
    assert full[3, 4:].all()
    assert full[:3, 3].all()


@pytest.mark.parametrize("power", [-40, 40])
def test_the_strength_of_queries_changes_nothing(power: int) -> None:
    moment = strategies.moment(3, 2, 32).mean
    assert_bits("feedback", rounding.feedback(np.ldexp(moment, power)), rounding.feedback(moment))
