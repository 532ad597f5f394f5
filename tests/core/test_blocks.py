import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import allocation, blocks
from quantwm_core.errors import ShapeError
from tests.core.compare import assert_bits

COUNTS = st.tuples(*[st.integers(0, 3)] * 3)


@given(counts=COUNTS, tokens=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_packing_and_unpacking_are_inverse(counts: tuple[int, int, int], tokens: int, seed: int) -> None:
    widths = allocation.widths(counts)
    codes = np.random.default_rng(seed).integers(0, 2**widths, (tokens, len(widths))).astype(np.uint8)
    packed = blocks.pack(codes, counts)
    assert packed.shape == (tokens, allocation.token_bytes(counts))
    assert_bits("codes", blocks.unpack(packed, counts), codes)


@given(counts=COUNTS, seed=st.integers(0, 2**32 - 1))
def test_every_byte_means_something(counts: tuple[int, int, int], seed: int) -> None:
    packed = np.random.default_rng(seed).integers(0, 256, (3, allocation.token_bytes(counts))).astype(np.uint8)
    assert_bits("bytes", blocks.pack(blocks.unpack(packed, counts), counts), packed)


def test_where_a_code_lies_bit_by_bit() -> None:
    codes = np.zeros((1, 24), np.uint8)
    codes[0, [0, 8, 9, 16, 19]] = 200, 5, 9, 1, 3
    expected = [200, *[0] * 7, 5 | 9 << 4, 0, 0, 0, 1 | 3 << 6, 0]
    assert blocks.pack(codes, (1, 1, 1))[0].tolist() == expected


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"codes \(2, 8\): need 16 directions"):
        blocks.pack(np.zeros((2, 8), np.uint8), (1, 0, 1))
    with pytest.raises(ShapeError, match="need 10 bytes a token"):
        blocks.unpack(np.zeros((2, 8), np.uint8), (1, 0, 1))
