import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import minmax
from quantwm_core.domain import BF16
from tests.core import scalar, strategies, tolerances
from tests.core.compare import assert_bits, assert_within

ROWS = st.lists(strategies.bf16_numbers(), min_size=1, max_size=17)


@given(ROWS, st.integers(1, 9))
def test_it_is_the_scalar_code_with_a_ragged_last_group(row: list[float], group_size: int) -> None:
    values = np.array([row], np.float32)
    codes, step, low = minmax.encode_groups(values, group_size)
    want_codes, want_step, want_low, want_decoded = scalar.minmax(row, group_size)
    assert codes[0].tolist() == want_codes
    assert step.dtype == low.dtype == BF16
    assert step[0].astype(float).tolist() == want_step
    assert low[0].astype(float).tolist() == want_low
    decoded = minmax.decode_groups(codes, step, low, group_size)
    np.testing.assert_array_equal(decoded[0], np.array(want_decoded, np.float32))


@given(ROWS, st.integers(1, 9))
def test_the_minimum_is_exact_and_a_constant_group_is_its_constant(row: list[float], group_size: int) -> None:
    values = np.array([row, [row[0]] * len(row)], np.float32)
    decoded = minmax.decode_groups(*minmax.encode_groups(values, group_size), group_size)
    np.testing.assert_array_equal(decoded[1], values[1])
    for begin in range(0, len(row), group_size):
        group = slice(begin, begin + group_size)
        assert decoded[0, group].min() == values[0, group].min()


@given(ROWS, st.integers(1, 9))
def test_the_error_is_within_half_a_step_and_what_the_scale_lost(row: list[float], group_size: int) -> None:
    values = np.array([row], np.float32)
    codes, step, low = minmax.encode_groups(values, group_size)
    wide = np.repeat(step.astype(np.float64), group_size, axis=-1)[:, : len(row)]
    decoded = minmax.decode_groups(codes, step, low, group_size)
    slack = tolerances.FP32_ROUNDING * np.abs(values) + 3 * 2.0**-133  # the scale's last subnormal bit
    assert_within("error", decoded, values, wide * (0.5 + 3 * tolerances.BF16_ROUNDING) + slack)


@given(ROWS, st.integers(1, 9), st.data())
def test_a_range_may_begin_inside_a_group(row: list[float], group_size: int, data: st.DataObject) -> None:
    codes, step, low = minmax.encode_groups(np.array([row], np.float32), group_size)
    start = data.draw(st.integers(0, len(row) - 1))
    group, offset = divmod(start, group_size)
    part = minmax.decode_groups(codes[:, start:], step[:, group:], low[:, group:], group_size, offset)
    assert_bits("range", part, minmax.decode_groups(codes, step, low, group_size)[:, start:])
