from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from quantwm_core import packing
from quantwm_core.errors import DtypeError, ShapeError
from tests.core import scalar, strategies


@given(strategies.codes())
def test_unpack_is_the_inverse_of_pack(codes: np.ndarray) -> None:
    packed = packing.pack(codes)
    assert packed.shape == (*codes.shape[:-1], packing.packed_size(codes.shape[-1]))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packing.unpack(packed, codes.shape[-1]), codes)


@given(strategies.codes())
def test_pack_is_the_layout_that_is_drawn(codes: np.ndarray) -> None:
    packed = packing.pack(codes)
    for row in np.ndindex(codes.shape[:-1]):
        assert packed[row].tolist() == scalar.pack(codes[row].tolist())


def test_every_byte_survives_unpack_and_pack() -> None:
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(packing.pack(packing.unpack(every, 1024)), every)


def test_all_quadruples_of_codes_give_different_bytes() -> None:
    quads = np.array(list(product(range(4), repeat=4)), np.uint8)
    assert len(np.unique(packing.pack(quads))) == 256


def test_a_last_byte_that_is_not_full_is_padded_with_zeros() -> None:
    assert packing.pack(np.full(5, 3, np.uint8)).tolist() == [255, 3]


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (0, 3)])
def test_empty_axes_stay_empty(lead: tuple[int, ...]) -> None:
    packed = packing.pack(np.zeros((*lead, 6), np.uint8))
    assert packed.shape == (*lead, 2)
    assert packing.unpack(packed, 6).shape == (*lead, 6)


def test_input_that_is_not_contiguous_is_packed_by_value() -> None:
    codes = np.random.default_rng(0).integers(0, 4, (6, 8, 5)).astype(np.uint8)
    for view in (codes.T, codes[::-2, ::-1], np.moveaxis(codes, 0, -1)):
        np.testing.assert_array_equal(packing.pack(view), packing.pack(view.copy()))


def test_a_code_above_three_is_refused() -> None:
    with pytest.raises(ShapeError, match="code above 3"):
        packing.pack(np.array([0, 4], np.uint8))


def test_a_scalar_is_refused(unchecked: None) -> None:
    with pytest.raises(ShapeError, match="no axis"):
        packing.pack(np.array(1, np.uint8))


@pytest.mark.parametrize("codes", [7, 9, 12])
def test_a_wrong_number_of_bytes_is_refused(codes: int) -> None:
    with pytest.raises(ShapeError, match=f"for {codes} codes"):
        packing.unpack(np.zeros((2, packing.packed_size(codes) + 1), np.uint8), codes)


def test_other_integers_are_refused(unchecked: None) -> None:
    with pytest.raises(DtypeError, match="int32"):
        packing.pack(np.zeros(4, np.int32))
    with pytest.raises(DtypeError, match="int8"):
        packing.unpack(np.zeros(1, np.int8), 4)


@given(stn.arrays(np.int8, stn.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=st.integers(-8, 7)))
def test_nibbles_are_inverted_and_laid_out_as_drawn(numbers: np.ndarray) -> None:
    packed = packing.pack_nibbles(numbers)
    count = numbers.shape[-1]
    assert packed.shape == (*numbers.shape[:-1], packing.nibble_size(count))
    unpacked = packing.unpack_nibbles(packed, count)
    assert unpacked.dtype == np.int8
    np.testing.assert_array_equal(unpacked, numbers)
    for row in np.ndindex(numbers.shape[:-1]):
        for place, number in enumerate(numbers[row].tolist()):
            assert int(packed[row][place // 2]) >> place % 2 * 4 & 15 == number % 16
        if count % 2:
            assert packed[row][-1] < 16


def test_what_are_no_nibbles_is_refused() -> None:
    for wrong in (8, -9):
        with pytest.raises(ShapeError, match="beyond -8 to 7 or no axis"):
            packing.pack_nibbles(np.array([wrong], np.int8))
    with pytest.raises(ShapeError, match="need 2 bytes"):
        packing.unpack_nibbles(np.zeros(3, np.uint8), 3)
