import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import domain
from quantwm_core.errors import DomainError, DtypeError, ShapeError
from tests.core import strategies
from tests.core.compare import assert_bits


def _nearest_bf16(value: np.float32) -> int:
    """Bits of the nearest BF16 number by integer arithmetic, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=20))
def test_fp32_is_rounded_to_nearest_even(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    assert domain.to_bf16(values).view(np.uint16).tolist() == [_nearest_bf16(value) for value in values]


def test_fp16_is_rounded_like_fp32() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)]
    assert_bits("fp16", domain.to_bf16(every), domain.to_bf16(every.astype(np.float32)))


def test_bf16_passes_unchanged() -> None:
    every = strategies.all_bf16()
    assert domain.to_bf16(every) is every


def test_strides_do_not_matter() -> None:
    values = np.random.default_rng(0).standard_normal((4, 6, 8), np.float32)
    for view in (values.T, values[::2, ::-1], np.broadcast_to(values[0], values.shape)):
        assert_bits("view", domain.to_bf16(view), domain.to_bf16(view.copy()))


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_name_and_place(dtype: str, bad: float) -> None:
    values = np.zeros((2, 3), dtype)
    values[1, 2] = bad
    with pytest.raises(DomainError, match=rf"layer 3, keys: 1 of 6 values .* first {bad} at index \(1, 2\)"):
        domain.to_bf16(values, "layer 3, keys")


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_domain_ends_at_two_to_sixty(sign: int) -> None:
    edge = np.float32(sign * 2.0**60)
    assert float(domain.to_bf16(np.array([edge]))[0]) == edge
    with pytest.raises(DomainError, match=r"beyond 2\*\*60"):
        domain.to_bf16(np.array([np.nextafter(edge, np.float32(sign * np.inf))]))


@pytest.mark.parametrize("dtype", ["float64", "int32", "int8", "bool", "float8_e4m3fn", "complex64", "O", "U1"])
def test_other_number_formats_are_refused(dtype: str) -> None:
    with pytest.raises(DtypeError, match=r"values: got .* need bfloat16, float16 or float32"):
        domain.to_bf16(np.zeros(3, dtype), "values")


@pytest.mark.parametrize("shape", [(0,), (2, 0, 4), (0, 0)])
def test_an_array_without_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="holds no element"):
        domain.to_bf16(np.zeros(shape, np.float32))


def test_a_wrong_rank_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"keys: got shape \(3, 4\), need 4 dimensions"):
        domain.to_bf16(np.zeros((3, 4), np.float32), "keys", rank=4)


@given(strategies.units())
def test_the_exponent_is_the_smallest_power_of_two_above(values: np.ndarray) -> None:
    exponents = domain.binary_exponent(values)
    assert exponents.shape == (*values.shape[:2], 1, 1)
    for stream, exponent in zip(np.abs(values[0].astype(np.float64)), exponents[0, :, 0, 0], strict=True):
        largest = stream.max()
        assert (largest == 0 and exponent == 0) or 2.0 ** (int(exponent) - 1) <= largest < 2.0 ** int(exponent)


@given(strategies.units(), strategies.units())
def test_an_exponent_of_two_arrays_covers_both(first: np.ndarray, second: np.ndarray) -> None:
    one, two = first[:, :1], second[:, :1, :, :1].repeat(first.shape[3], axis=3)
    larger = one if np.abs(one.astype(np.float64)).max() >= np.abs(two.astype(np.float64)).max() else two
    assert domain.binary_exponent(one, two) == domain.binary_exponent(larger)
