import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import packing, symmetric
from quantwm_core.errors import ParameterError
from tests.core import scalar, strategies
from tests.core.compare import assert_bits


@given(st.sampled_from([4, 8]).flatmap(strategies.groups))
def test_it_is_the_scalar_code(values: np.ndarray) -> None:
    group_size = values.shape[-1] // 2
    code = symmetric.encode(values, group_size)
    codes, stored, decoded = scalar.symmetric(values[0].tolist(), group_size)
    assert packing.unpack(code.codes, values.shape[-1])[0].tolist() == codes
    assert code.scales.view(np.uint8)[0].tolist() == stored
    np.testing.assert_array_equal(symmetric.decode(code)[0], np.array(decoded, np.float32))


@given(strategies.groups(largest=448.0, smallest=2.0**-6))
def test_the_error_is_within_half_the_largest_magnitude(values: np.ndarray) -> None:
    error = np.abs(symmetric.decode(symmetric.encode(values, 4)) - values).reshape(*values.shape[:-1], 2, 4)
    largest = np.abs(values).reshape(error.shape).max(axis=-1, keepdims=True)
    assert (error <= largest * (0.5 + 2.0**-4)).all()


@given(strategies.groups())
def test_the_fourth_code_is_never_used_and_zero_is_exact(values: np.ndarray) -> None:
    code = symmetric.encode(values, 4)
    assert packing.unpack(code.codes, values.shape[-1]).max() <= 2
    assert not symmetric.decode(code)[values == 0].any()


def test_there_is_no_super_scale() -> None:
    code = symmetric.encode(strategies.fp32([[[1000, -1000, 0, 0], [2.0**-11, 0, 0, 0]]]), 4)
    np.testing.assert_array_equal(symmetric.decode(code), [[[448, -448, 0, 0], [0, 0, 0, 0]]])


@given(strategies.units(), st.data())
def test_a_range_decodes_as_the_slice_of_the_whole(unit: np.ndarray, data: st.DataObject) -> None:
    code = symmetric.encode(unit.astype(np.float32), 4)
    start = data.draw(st.integers(0, unit.shape[2]))
    stop = data.draw(st.integers(start, unit.shape[2]))
    assert_bits("range", symmetric.decode(code, start, stop), symmetric.decode(code)[:, :, start:stop])


def test_a_group_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ParameterError, match="group size 12"):
        symmetric.encode(np.zeros((1, 1, 64), np.float32), 12)
