import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import integer_table, packing
from quantwm_core.domain import BF16
from quantwm_core.errors import ParameterError
from tests.core import strategies
from tests.core.compare import assert_bits, assert_within

BITS = pytest.mark.parametrize("bits", [4, 8])


@BITS
@given(strategies.units(tokens=(1, 2, 17), head_dimensions=(32, 80)))
def test_decoding_rounds_nothing_and_loses_half_a_step(bits: int, unit: np.ndarray) -> None:
    codes, scales = integer_table.encode(unit, bits)
    whole = packing.unpack_nibbles(codes, unit.shape[-1]) if bits == 4 else codes
    product = whole.astype(np.float64) * scales.astype(np.float64)[..., None, :]
    decoded = integer_table.decode(codes, scales)
    assert decoded.dtype == BF16
    np.testing.assert_array_equal(decoded.astype(np.float64), product)
    allowed = scales.astype(np.float64)[..., None, :] / 2 * (1 + 2.0**-20)
    assert_within("centroids", decoded, unit, np.broadcast_to(allowed, unit.shape))
    assert codes.nbytes + scales.nbytes == unit.shape[1] * integer_table.table_size(unit.shape[2], unit.shape[3], bits)


@BITS
def test_no_code_of_an_ordinary_column_is_wasted(bits: int) -> None:
    unit = strategies.unit(("normal", "channels", "offset"), 0, 64, 32)
    codes, scales = integer_table.encode(unit, bits)
    whole = packing.unpack_nibbles(codes, 32) if bits == 4 else codes
    most = integer_table.largest_code(bits)
    # A scale of few bits is up to one part in 2^(8 - bits) of its range too large, one in two for INT8's powers of two.
    assert (np.abs(whole).max(axis=-2) >= most / (1 + 2.0 ** (bits - 8)) - 1).all()
    assert np.abs(whole).max() == most
    largest = np.abs(unit.astype(np.float32)).max(axis=-2)
    assert (scales.astype(np.float32) * most >= largest * (1 - 2.0**-20)).all()


@BITS
@pytest.mark.parametrize("power", [-30, 30])
def test_powers_of_two_move_the_scales_alone(bits: int, power: int) -> None:
    unit = strategies.unit(strategies.MODERATE, 0, 9, 32)
    codes, scales = integer_table.encode(unit, bits)
    moved = integer_table.encode(np.ldexp(unit.astype(np.float32), power), bits)
    assert_bits("codes", moved[0], codes)
    assert_bits("scales", moved[1], np.ldexp(scales.astype(np.float32), power).astype(BF16))


@given(st.integers(0, 99))
def test_a_decoded_table_decodes_to_itself(seed: int) -> None:
    table = integer_table.decode(*integer_table.encode(strategies.unit(("normal",), seed, 17, 32), 8))
    assert_bits("again", integer_table.decode(*integer_table.encode(table, 8)), table)


def test_widths_that_cannot_be_stored_are_refused() -> None:
    table = np.ones((1, 2, 4), np.float32)
    for bits in (2, 5, 32):
        with pytest.raises(ParameterError, match=f"{bits} bits: need 4, 8 or 16"):
            integer_table.encode(table, bits)
    with pytest.raises(ParameterError, match="stored as they are"):
        integer_table.encode(table, 16)
