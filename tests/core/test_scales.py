import numpy as np
import pytest
from hypothesis import given

from quantwm_core import scales
from quantwm_core.domain import E4M3
from quantwm_core.errors import DomainError
from tests.core import scalar, strategies
from tests.core.compare import assert_bits

FINITE = np.array([scalar.e4m3_value(code) for code in range(127)], np.float32)


def _encode_under_one(numbers: np.ndarray) -> np.ndarray:
    """E4M3 bytes of scales up to 448, with a super-scale of exactly 1."""
    steps = np.concatenate([numbers.astype(np.float32), [np.float32(448)]])
    stored, super_scale = scales.encode(steps[None, None])
    assert super_scale == 1
    return stored.view(np.uint8)[0, 0, :-1]


def test_the_scalar_table_is_e4m3fn() -> None:
    assert_bits("table", np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32), FINITE)


def test_every_finite_code_encodes_to_itself() -> None:
    np.testing.assert_array_equal(_encode_under_one(FINITE), np.arange(127))


def test_ties_go_to_the_even_code_and_neighbours_of_ties_to_the_nearer_one() -> None:
    low = np.arange(126)
    middle = (FINITE[:-1] + FINITE[1:]) / 2
    tie = np.where(low % 2 == 0, low, low + 1)
    tie[0] = 1  # half the smallest number would be zero, and a scale that is not zero never becomes zero
    np.testing.assert_array_equal(_encode_under_one(middle), tie)
    below = np.maximum(low, 1)
    np.testing.assert_array_equal(_encode_under_one(np.nextafter(middle, np.float32(0))), below)
    np.testing.assert_array_equal(_encode_under_one(np.nextafter(middle, np.float32(448))), low + 1)


def test_numbers_of_every_magnitude_round_to_nearest() -> None:
    rng = np.random.default_rng(0)
    numbers = np.concatenate([rng.uniform(0, 448, 500), np.exp2(rng.uniform(-20, 8.8, 1000))]).astype(np.float32)
    want = [max(scalar.e4m3_code(float(number)), 1) for number in numbers]
    np.testing.assert_array_equal(_encode_under_one(numbers), want)


@given(strategies.steps())
def test_scales_and_super_scale_are_those_of_the_scalar_code(steps: np.ndarray) -> None:
    stored, super_scale = scales.encode(steps)
    decoded = scales.decode(stored, super_scale)
    for stream in range(len(steps)):
        codes, largest, values = scalar.store_scales(steps[stream].ravel().tolist())
        assert stored.view(np.uint8)[stream].ravel().tolist() == codes
        assert super_scale[stream] == largest
        assert decoded[stream].ravel().tolist() == values


@given(strategies.steps())
def test_zero_stays_zero_and_nothing_else_becomes_zero(steps: np.ndarray) -> None:
    decoded = scales.decode(*scales.encode(steps))
    np.testing.assert_array_equal(decoded == 0, steps == 0)
    assert np.isfinite(decoded).all()


@given(strategies.steps())
def test_scales_in_the_normal_range_keep_four_bits(steps: np.ndarray) -> None:
    stored, super_scale = scales.encode(steps)
    decoded = scales.decode(stored, super_scale).astype(np.float64)
    normal = steps >= 2.0**-6 * super_scale[:, None, None].astype(np.float64)
    assert (np.abs(decoded - steps)[normal] <= steps[normal] * (2.0**-4 + 2.0**-20)).all()


def test_a_stream_of_zeros_has_the_smallest_normal_super_scale() -> None:
    stored, super_scale = scales.encode(np.zeros((1, 2, 3), np.float32))
    assert super_scale == np.finfo(np.float32).tiny
    assert not stored.astype(np.float32).any()


@pytest.mark.parametrize("power", [-60, -17, 1, 40])
def test_a_power_of_two_moves_the_super_scale_alone(power: int) -> None:
    steps = np.random.default_rng(1).exponential(size=(2, 30, 3)).astype(np.float32)
    stored, super_scale = scales.encode(steps)
    scaled, scaled_super = scales.encode(np.ldexp(steps, power))
    assert_bits("scales", scaled.view(np.uint8), stored.view(np.uint8))
    assert_bits("super-scale", scaled_super, np.ldexp(super_scale, power))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_no_byte_holds_are_refused(bad: float) -> None:
    steps = np.ones((2, 3, 4), np.float32)
    steps[1, 2, 0] = bad
    for call in (scales.encode, scales.super_scale_of):
        with pytest.raises(DomainError, match=r"^group scales: NaN or infinite"):
            call(steps)


def test_a_negative_scale_is_refused() -> None:
    with pytest.raises(DomainError, match=r"^group scale -0\.5: need 0 or more"):
        scales.encode(strategies.fp32([[[1.0, -0.5]]]))
