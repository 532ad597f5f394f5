from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import psac, statistics
from quantwm_core.domain import BF16, round_up
from quantwm_core.errors import ParameterError
from tests.core import scalar, strategies, tolerances
from tests.core.compare import assert_bits, assert_within

KINDS = ("normal", "channels", "ties", "one", "huge", "wide", "zeros")


def _basis(heads: int, channels: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return statistics.principal_basis(strategies.moment(seed, heads, channels).mean, rank)


def _exact_projection(error: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """``E U (U^T U)^-1`` in FP64."""
    wide = basis.astype(np.float64)
    gram = np.swapaxes(wide, -1, -2) @ wide
    return np.asarray(np.swapaxes(np.linalg.solve(gram, np.swapaxes(error.astype(np.float64) @ wide, -1, -2)), -1, -2))


def _coded(tokens: int, rank: int, heads: int, keep: float, seed: int = 0) -> tuple[psac.PsacCode, np.ndarray]:
    """A code whose coefficients survive with a probability, and its INT8 values ``[1, heads, tokens, rank]``."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-127, 128, (1, heads, tokens, rank)).astype(np.int8)
    steps[rng.random(steps.shape) >= keep] = 0
    scales = rng.uniform(0.5, 2, (1, heads, rank)).astype(BF16)
    return psac._choose_layout(steps, scales), steps


@given(strategies.small_units(KINDS), st.sampled_from([1, 2, 8, 32]))
def test_what_is_left_along_a_direction_is_at_most_half_a_step(unit: np.ndarray, rank: int) -> None:
    error = unit.astype(np.float32)
    tokens = error.shape[2]
    basis, energies = _basis(error.shape[1], error.shape[3], rank)
    code = psac.encode(error, basis, energies)
    left = error - psac.correction(code, basis, tokens, 0, tokens)
    scales = code.scales.astype(np.float64)[..., None, :]
    # The error of one FP32 product is relative to its terms, which may be larger than their sum.
    size = np.abs(error).max(axis=(-2, -1), keepdims=True).astype(np.float64) * error.shape[3]
    allowed = scales / 2 * (1 + tolerances.PSAC_PROJECTION) + tolerances.FP32_ROUNDING * size
    remaining = _exact_projection(left, basis)
    assert_within("left", remaining, np.zeros_like(remaining), allowed)


def test_the_bound_of_half_a_step_is_met_to_a_thousandth_on_ordinary_errors() -> None:
    error = strategies.unit(("normal", "channels"), 0, 300, 128).astype(np.float32)
    basis, energies = _basis(2, 128, 8)
    code = psac.encode(error, basis, energies)
    remaining = _exact_projection(error - psac.correction(code, basis, 300, 0, 300), basis)
    allowed = code.scales.astype(np.float64)[..., None, :] / 2 * (1 + tolerances.PSAC_PROJECTION)
    assert_within("left", remaining, np.zeros_like(remaining), allowed)
    assert np.abs(remaining).max() > 0.4 * allowed.min()  # and it is a bound that is nearly reached


def test_a_basis_that_is_not_orthonormal_is_projected_by_least_squares() -> None:
    rng = np.random.default_rng(0)
    basis = (rng.standard_normal((1, 16, 3)) + 0.5).astype(BF16)
    error = rng.standard_normal((1, 40, 16)).astype(np.float32)
    want, *_ = np.linalg.lstsq(basis[0].astype(np.float64), error[0].T.astype(np.float64), rcond=None)
    assert_within("coefficients", psac.project(error, basis)[0], want.T, 1e-5)


def test_a_basis_of_zeros_compensates_nothing() -> None:
    error = np.ones((2, 5, 8), np.float32)
    basis = np.zeros((2, 8, 3), BF16)
    basis[1, :3] = np.eye(3)
    code = psac.encode(error, basis, np.ones((2, 3), np.float32))
    correction = psac.correction(code, basis, 5, 0, 5)
    assert not correction[0].any()
    np.testing.assert_allclose(correction[1, :, :3], 1, rtol=0.01)


def test_no_error_gives_scales_of_zero_and_decodes_to_zero() -> None:
    basis, energies = _basis(1, 32, 4)
    code = psac.encode(np.zeros((1, 1, 9, 32), np.float32), basis, energies)
    assert not code.scales.astype(np.float32).any()
    assert not psac.decode(code, 9).any()


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=20))
def test_scales_are_rounded_up_to_the_next_bf16_number(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    up = round_up(values, 8).astype(BF16)
    assert (up.astype(np.float32) == round_up(values, 8)).all()
    assert (up.astype(np.float32) >= values).all()
    below = np.where(up.view(np.uint16) > 0, up.view(np.uint16) - 1, 0).astype(np.uint16).view(BF16)
    assert ((below.astype(np.float32) < values) | (values == 0)).all()


@given(strategies.small_units(KINDS), st.sampled_from([1, 8]))
def test_no_coefficient_clips(unit: np.ndarray, rank: int) -> None:
    error = unit.astype(np.float32)
    basis, energies = _basis(error.shape[1], error.shape[3], rank)
    code = psac.encode(error, basis, energies)
    coefficients = psac.project(error, basis)
    assert (np.abs(coefficients) <= 127.5 * code.scales.astype(np.float32)[..., None, :]).all()


@pytest.mark.parametrize(
    ("tokens", "rank", "keep"), list(product([1, 7, 63, 64, 65, 130, 200], [1, 3, 8, 16], [0.0, 0.1, 0.5, 0.9, 1.0]))
)
def test_every_layout_decodes_to_the_same_coefficients(
    tokens: int, rank: int, keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, steps = _coded(tokens, rank, 3, keep)
    want = steps.astype(np.float32) * chosen.scales.astype(np.float32)[..., None, :]
    assert_bits("chosen", psac.decode(chosen, tokens), want)
    for layout, size in (("dense", 1 << 30), ("sparse", -1)):
        monkeypatch.setattr(psac, "sparse_size", lambda *_, size=size: size)
        forced = psac._choose_layout(steps, chosen.scales)
        assert len(forced.dense) == (3 if layout == "dense" else 0)
        assert_bits(layout, psac.decode(forced, tokens), want)
        for start, stop in ((0, 0), (0, 1), (tokens // 2, tokens), (tokens, tokens)):
            assert_bits(f"{layout} range", psac.decode(forced, tokens, start, stop), want[:, :, start:stop])


@pytest.mark.parametrize(("tokens", "rank", "keep"), list(product([1, 64, 65, 130, 200], [3, 8], [0.0, 0.05, 0.3])))
def test_counts_find_any_coefficient_of_a_sparse_stream(tokens: int, rank: int, keep: float) -> None:
    code, steps = _coded(tokens, rank, 4, keep)
    rng = np.random.default_rng(1)
    flat = steps.reshape(4, tokens, rank)
    assert code.layout.size in (0, 4)
    rows = {int(stream): row for row, stream in enumerate(np.flatnonzero(code.layout.ravel()))}
    dense = {stream: row for row, stream in enumerate(sorted(set(range(4)) - rows.keys()))}
    for stream, row in rows.items():
        for _ in range(60):
            token, direction = int(rng.integers(tokens)), int(rng.integers(rank))
            got = scalar.sparse_coefficient(code.bitmap[row], code.values, code.counts[row], rank, token, direction)
            assert got == flat[stream, token, direction]
    for stream, row in dense.items():
        np.testing.assert_array_equal(code.dense[row], flat[stream])


@pytest.mark.parametrize(("tokens", "rank"), list(product([1, 7, 64, 65, 200], [1, 8])))
def test_the_smaller_layout_wins_and_a_tie_goes_to_dense(tokens: int, rank: int) -> None:
    overhead = -(-tokens * rank // 8) + 4 * -(-tokens // 64)
    for non_zero in range(tokens * rank + 1):
        assert psac.sparse_size(tokens, rank, non_zero) == overhead + non_zero
    assert psac.dense_size(tokens, rank) == tokens * rank
    limit = tokens * rank - overhead  # with that many values both layouts have the same size
    scales = np.ones((1, rank), BF16)
    for non_zero in {limit - 1, limit, limit + 1} & set(range(tokens * rank + 1)):
        steps = np.zeros(tokens * rank, np.int8)
        steps[:non_zero] = 1
        code = psac._choose_layout(steps.reshape(1, tokens, rank), scales)
        sparse = code.layout.size > 0
        assert sparse == (non_zero < limit)
        stored = code.bitmap.nbytes + code.values.nbytes + code.counts.nbytes + code.dense.nbytes
        assert stored == min(tokens * rank, overhead + non_zero)


def test_streams_of_one_unit_may_differ_in_layout() -> None:
    rng = np.random.default_rng(0)
    steps = rng.integers(1, 100, (2, 2, 130, 8)).astype(np.int8)
    steps[0, 1, 1:] = 0
    steps[1, 0] = 0
    code = psac._choose_layout(steps, np.ones((2, 2, 8), BF16))
    assert code.layout.tolist() == [[0, 1], [1, 0]]
    assert code.dense.shape == (2, 130, 8)
    np.testing.assert_array_equal(psac.decode(code, 130), steps)
    # Counts run through the sparse streams: eight values of the first lie before all but its first block.
    assert code.counts.tolist() == [[0, 8, 8], [8, 8, 8]]
    assert code.counts.dtype == np.int32


@pytest.mark.parametrize("threshold", [0.05, 0.3, 2.0, 1e6])
def test_the_threshold_drops_exactly_what_moves_a_logit_by_less(threshold: float) -> None:
    error = strategies.unit(("normal", "channels"), 3, 90, 32).astype(np.float32)
    basis, energies = _basis(2, 32, 8)
    full, cut = psac.encode(error, basis, energies), psac.encode(error, basis, energies, threshold)
    before, after = psac.decode(full, 90), psac.decode(cut, 90)
    effect = np.abs(before.astype(np.float64)) * np.sqrt(energies.astype(np.float64) / 32)[..., None, :]
    clear = np.abs(effect - threshold) > 1e-5 * threshold
    np.testing.assert_array_equal(after[clear], np.where(effect < threshold, 0, before)[clear])
    assert_bits("scales", cut.scales, full.scales)


@pytest.mark.parametrize("power", [-40, 3, 50])
def test_powers_of_two_move_the_scales_alone(power: int) -> None:
    error = strategies.unit(("normal", "channels"), 5, 70, 64).astype(np.float32)
    basis, energies = _basis(2, 64, 8)
    code, scaled = psac.encode(error, basis, energies), psac.encode(np.ldexp(error, power), basis, energies)
    assert_bits("coefficients", scaled.dense, code.dense)
    assert_bits("scales", scaled.scales, np.ldexp(code.scales.astype(np.float32), power).astype(BF16))


@given(strategies.small_units(KINDS, heads=3))
def test_permuted_tokens_permute_coefficients_and_streams_stand_alone(unit: np.ndarray) -> None:
    error = unit.astype(np.float32)
    heads, tokens, channels = error.shape[1:]
    basis, energies = _basis(heads, channels, 4)
    whole = psac.decode(psac.encode(error, basis, energies), tokens)
    step = psac.encode(error, basis, energies).scales.astype(np.float64)[..., None, :]
    order = np.random.default_rng(tokens).permutation(tokens)
    permuted = psac.decode(psac.encode(error[:, :, order], basis, energies), tokens)
    # A coefficient half-way between two steps may fall on either side when products are added in another order.
    assert_within("tokens", permuted, whole[:, :, order], np.broadcast_to(step * 1.001, whole.shape))
    for head in range(heads):
        one = np.s_[:, head : head + 1]
        alone = psac.decode(psac.encode(error[one], basis[one], energies[one]), tokens)
        assert_within(f"head {head}", alone, whole[one], np.broadcast_to(step[one] * 1.001, alone.shape))


@given(strategies.small_units(KINDS), st.sampled_from([1, 2, 5, 8]))
def test_int4_clips_beyond_three_rms_and_rounds_the_rest(unit: np.ndarray, rank: int) -> None:
    error = unit.astype(np.float32)
    tokens = error.shape[2]
    basis, energies = _basis(error.shape[1], error.shape[3], rank)
    code = psac.encode(error, basis, energies, bits=4)
    assert code.dense.nbytes == error.shape[1] * psac.dense_size(tokens, rank, 4)
    exact = psac.project(error, basis).astype(np.float64)
    rms = np.sqrt(np.square(exact).mean(axis=-2, keepdims=True))
    limit = np.minimum(np.abs(exact).max(axis=-2, keepdims=True), 3 * rms)
    scales = code.scales.astype(np.float64)[..., None, :]
    normal = limit > 2.0**-120
    assert (scales >= limit / 7 * (1 - 1e-5))[normal].all()
    assert (scales <= limit / 7 * (1 + 2.0**-6))[normal].all()
    clipped = np.clip(exact, -7 * scales, 7 * scales)
    assert_within("coefficients", psac.decode(code, tokens), clipped, scales / 2 * (1 + 1e-5))


def test_int4_ranges_decode_to_parts_of_the_whole() -> None:
    error = strategies.unit(("normal", "channels"), 0, 70, 32).astype(np.float32)
    code = psac.encode(error, *_basis(2, 32, 5), bits=4)
    whole = psac.decode(code, 70)
    for start, stop in ((0, 70), (3, 3), (1, 66)):
        assert_bits("range", psac.decode(code, 70, start, stop), whole[:, :, start:stop])


@pytest.mark.parametrize(("bits", "threshold"), [(2, 0.0), (16, 0.0), (4, 0.1)])
def test_coefficients_that_cannot_be_stored_are_refused(bits: int, threshold: float) -> None:
    with pytest.raises(ParameterError, match=f"of {bits} bits with threshold {threshold}"):
        psac.encode(np.ones((1, 1, 2, 32), np.float32), *_basis(1, 32, 2), threshold, bits)
