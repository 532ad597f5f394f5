import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import directions
from quantwm_core.domain import BF16
from tests.core.compare import assert_bits, assert_within

WIDTHS = np.array([8, 4, 2])


def _decoded(coefficients: np.ndarray, widths: np.ndarray, steps: np.ndarray) -> np.ndarray:
    codes = directions.quantize(coefficients, widths, steps)
    return np.asarray(directions.levels(codes, widths) * steps.astype(np.float32))


@given(width=st.sampled_from([2, 4, 8]))
def test_every_code_is_a_fixed_point(width: int) -> None:
    codes = np.arange(2**width, dtype=np.uint8)[:, None]
    widths, step = np.array([width]), np.array([0.375], BF16)
    numbers = directions.levels(codes, widths) * np.float32(0.375)
    assert_bits("codes", directions.quantize(numbers, widths, step), codes)


def test_levels_are_exact_in_bf16() -> None:
    for width in (2, 4, 8):
        numbers = directions.levels(np.arange(2**width, dtype=np.uint8)[:, None], np.array([width]))
        assert_bits(f"{width} bits", numbers.astype(BF16).astype(np.float32), numbers)


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 40))
def test_an_error_is_half_a_step_at_most_inside_of_the_levels(seed: int, tokens: int) -> None:
    coefficients = np.random.default_rng(seed).standard_normal((tokens, 3)).astype(np.float32)
    steps = directions.search_steps(coefficients, WIDTHS)
    step = steps.astype(np.float32)
    low = directions.levels(np.zeros((1, 3), np.uint8), WIDTHS)[0] * step
    high = directions.levels((2**WIDTHS - 1).astype(np.uint8)[None], WIDTHS)[0] * step
    inside = np.clip(coefficients, low, high)
    assert_within("coefficients", _decoded(coefficients, WIDTHS, steps), inside, step / 2 * (1 + 1e-5))


@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-60, 60))
def test_powers_of_two_scale_through(seed: int, power: int) -> None:
    coefficients = np.random.default_rng(seed).standard_normal((9, 3)).astype(np.float32)
    scaled = np.ldexp(coefficients, power)
    steps, loud = (directions.search_steps(each, WIDTHS) for each in (coefficients, scaled))
    assert_bits("steps", np.ldexp(steps.astype(np.float32), power), loud.astype(np.float32))
    assert_bits("codes", directions.quantize(scaled, WIDTHS, loud), directions.quantize(coefficients, WIDTHS, steps))


@pytest.mark.parametrize("shape", ["normal", "laplace", "uniform", "outlier"])
def test_the_searched_step_is_nearly_the_best_of_all(shape: str) -> None:
    rng = np.random.default_rng(0)
    drawn = {
        "normal": rng.standard_normal((400, 3)),
        "laplace": rng.laplace(size=(400, 3)),
        "uniform": rng.uniform(-1, 1, (400, 3)),
        "outlier": np.concatenate([rng.standard_normal((399, 3)), np.full((1, 3), 8.0)]),
    }
    coefficients = drawn[shape].astype(np.float32)
    steps = directions.search_steps(coefficients, WIDTHS)
    errors = [
        np.square(coefficients - _decoded(coefficients, WIDTHS, (steps * np.float32(factor)).astype(BF16))).sum(axis=0)
        for factor in np.geomspace(0.25, 4, 161)
    ]
    got = np.square(coefficients - _decoded(coefficients, WIDTHS, steps)).sum(axis=0)
    assert (got <= 1.15 * np.min(errors, axis=0)).all()


def test_a_direction_without_spread_decodes_to_zero() -> None:
    coefficients = np.zeros((5, 3), np.float32)
    steps = directions.search_steps(coefficients, WIDTHS)
    assert not steps.astype(np.float32).any()
    assert not _decoded(coefficients, WIDTHS, steps).any()
