from collections.abc import Callable
from itertools import product
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import attention
from quantwm_core.errors import ParameterError, ShapeError
from tests.core import strategies, tolerances
from tests.core.compare import assert_within


def _tensors(heads: int, kv_heads: int, seed: int = 0, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((2, heads, 3, 8), (2, kv_heads, 11, 8), (2, kv_heads, 11, 8))
    queries, keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return scale * queries, scale * keys, values


def _naive(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and attention of every query by itself, FP64."""
    batch, heads, count, channels = queries.shape
    group = heads // keys.shape[1]
    scores = np.zeros((batch, heads, count, keys.shape[2]))
    out = np.zeros((batch, heads, count, values.shape[3]))
    for b, head, query in product(range(batch), range(heads), range(count)):
        row = [float(queries[b, head, query].astype(float) @ key.astype(float)) for key in keys[b, head // group]]
        scores[b, head, query] = [score / sqrt(channels) for score in row]
        weights = [exp(score - max(scores[b, head, query])) for score in scores[b, head, query]]
        for weight, value in zip(weights, values[b, head // group], strict=True):
            out[b, head, query] += weight / sum(weights) * value
    return scores, out


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_it_is_attention(heads: int, kv_heads: int, scale: float) -> None:
    queries, keys, values = _tensors(heads, kv_heads, scale=scale)
    scores, out = _naive(queries, keys, values)
    got = attention.logits(queries, keys)
    assert_within("logits", got, scores, tolerances.ATTENTION * np.abs(scores).max())
    allowed = tolerances.ATTENTION * (1 + np.abs(scores).max()) * np.abs(values).max()
    assert_within("attention", attention.attend(queries, keys, values), out, allowed)


def test_bf16_tensors_are_taken_as_they_are() -> None:
    queries, keys, values = (tensor.astype("bfloat16") for tensor in _tensors(4, 2))
    wide = [tensor.astype(np.float32) for tensor in (queries, keys, values)]
    np.testing.assert_array_equal(attention.attend(queries, keys, values), attention.attend(*wide))


def test_values_may_have_their_own_number_of_channels() -> None:
    queries, keys, values = _tensors(4, 2)
    out = attention.attend(queries, keys, values[..., :5])
    assert_within("attention", out, attention.attend(queries, keys, values)[..., :5], tolerances.ATTENTION)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_the_logarithms_of_two_parts_merge_into_that_of_the_whole(scale: float) -> None:
    scores, _ = _naive(*_tensors(4, 2, scale=scale))
    expected = np.array([log(sum(map(exp, row))) for row in scores.reshape(-1, 11)]).reshape(scores.shape[:3])
    single = scores.astype(np.float32)
    allowed = tolerances.ATTENTION * (1 + np.abs(scores).max())
    assert_within("log_sum_exp", attention.log_sum_exp(single), expected, allowed)
    parts = np.stack([attention.log_sum_exp(single[..., :4]), attention.log_sum_exp(single[..., 4:])], axis=-1)
    assert_within("merged", attention.log_sum_exp(parts), expected, allowed)
    assert attention.log_sum_exp(strategies.fp32([2e30, 2e30])) == np.float32(2e30)


def test_softmax_takes_large_scores() -> None:
    weights = attention.softmax(strategies.fp32([1e30, 1e30, -1e30]))
    np.testing.assert_array_equal(weights, [0.5, 0.5, 0])


def test_shapes_that_do_not_fit_are_refused(unchecked: None) -> None:
    queries, keys, values = _tensors(4, 2)
    for bad in (keys[:1], keys[..., :4], keys[0], np.concatenate([keys, keys[:, :1]], axis=1)):
        with pytest.raises(ShapeError, match="Hq a multiple of H"):
            attention.logits(queries, bad)
    with pytest.raises(ShapeError, match="the same B, H and N"):
        attention.attend(queries, keys, values[:, :, :5])


def test_logit_error_is_relative_and_centred() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((2, 3, 5, 9)).astype(np.float32)
    noise = rng.standard_normal(exact.shape).astype(np.float32)
    got = attention.logit_error(exact, exact + noise)
    assert got.shape == (2, 3)
    for b, head in np.ndindex(2, 3):
        error = power = 0.0
        for query in range(5):
            row, other = exact[b, head, query].astype(float), noise[b, head, query].astype(float)
            error += float(np.square(other - other.mean()).sum())
            power += float(np.square(row - row.mean()).sum())
        assert got[b, head] == pytest.approx(error / power, rel=1e-5)


@given(st.floats(-100, 100, width=32))
def test_a_shift_of_a_query_is_no_error(shift: float) -> None:
    exact = np.random.default_rng(0).integers(-8, 8, (1, 2, 4, 8)).astype(np.float32)
    assert (attention.logit_error(exact, exact + np.float32(shift)) <= 1e-9).all()
    assert (attention.selection_shift(exact, exact + np.float32(shift)) == 0).all()


def test_known_logit_errors() -> None:
    exact = np.random.default_rng(0).standard_normal((1, 2, 4, 8)).astype(np.float32)
    assert (attention.logit_error(exact, exact) == 0).all()
    np.testing.assert_allclose(attention.logit_error(exact, np.zeros_like(exact)), 1, rtol=1e-6)
    np.testing.assert_array_equal(attention.logit_error(np.ones_like(exact), exact), 0)


@pytest.mark.parametrize("top", [1, 2, 5, 9])
def test_selection_shift_counts_what_is_no_longer_selected(top: int) -> None:
    rng = np.random.default_rng(top)
    exact = rng.standard_normal((2, 3, 6, 9)).astype(np.float32)
    other = exact + 0.7 * rng.standard_normal(exact.shape).astype(np.float32)
    got = attention.selection_shift(exact, other, top)
    for b, head in np.ndindex(2, 3):
        lost = 0
        for query in range(6):
            chosen = [
                set(sorted(range(9), key=row.__getitem__, reverse=True)[:top])
                for row in (exact[b, head, query].tolist(), other[b, head, query].tolist())
            ]
            lost += top - len(chosen[0] & chosen[1])
        assert got[b, head] == pytest.approx(lost / (6 * top))


def test_selection_ties_go_to_the_first_token() -> None:
    tied = strategies.fp32([[[1, 1, 0]]])
    assert attention.selection_shift(tied, strategies.fp32([[[1, 0, 0]]])) == 0
    assert attention.selection_shift(tied, strategies.fp32([[[0, 1, 0]]])) == 1
    assert attention.selection_shift(tied, strategies.fp32([[[1, 0, 0]]]), top=2) == 0


@pytest.mark.parametrize("top", [0, 10])
def test_an_impossible_top_is_refused(top: int) -> None:
    exact = np.zeros((1, 2, 9), np.float32)
    with pytest.raises(ParameterError, match=f"top {top} of 9 tokens"):
        attention.selection_shift(exact, exact, top)


def test_attention_kl_is_the_divergence_of_the_softmax() -> None:
    rng = np.random.default_rng(0)
    exact, other = (3 * rng.standard_normal((2, 4, 7)).astype(np.float32) for _ in range(2))
    got = attention.attention_kl(exact, other)
    for head in range(2):
        total = 0.0
        for query in range(4):
            weights = [
                [exp(score) / sum(map(exp, row)) for score in row]
                for row in (exact[head, query].tolist(), other[head, query].tolist())
            ]
            total += sum(p * log(p / q) for p, q in zip(*weights, strict=True))
        assert got[head] == pytest.approx(total / 4, rel=1e-4)
    np.testing.assert_allclose(attention.attention_kl(exact, exact), 0, atol=1e-6)


@pytest.mark.parametrize("measure", [attention.selection_shift, attention.logit_error, attention.attention_kl])
@pytest.mark.parametrize("shape", [(2, 4, 9), (2, 3, 8), (1, 4, 8), (4, 8)])
def test_logits_of_other_tokens_are_not_compared(
    measure: Callable[[np.ndarray, np.ndarray], np.ndarray], shape: tuple[int, ...], unchecked: None
) -> None:
    exact, other = np.zeros((2, 4, 8), np.float32), np.zeros(shape, np.float32)
    with pytest.raises(ShapeError, match=r"exact logits \(2, 4, 8\) and approximate ones .*: need the same shape"):
        measure(exact, other)
