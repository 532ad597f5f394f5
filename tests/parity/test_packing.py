"""pack_codes and unpack_codes, against the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import packing as core
from quantwm_core.errors import DtypeError, ShapeError
from quantwm_kernels import packing as operators
from tests.core import strategies
from tests.parity.gate import assert_equal
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.packing", exc_type=ImportError)

OPERATORS = ("pack_codes", "unpack_codes")


@settings(EXAMPLES)
@given(codes=strategies.codes())
def test_pack_codes(device: torch.device, codes: np.ndarray) -> None:
    packed = kernels.pack(torch.from_numpy(codes).to(device))
    assert_equal("packed", packed, torch.from_numpy(core.pack(codes)))
    assert_equal("codes", kernels.unpack(packed, codes.shape[-1]), torch.from_numpy(codes))


@settings(EXAMPLES)
@given(row=st.lists(st.integers(0, 255), min_size=1, max_size=9), rows=st.integers(1, 4), short=st.integers(0, 3))
def test_unpack_codes(device: torch.device, row: list[int], rows: int, short: int) -> None:
    packed = torch.tensor([row] * rows, dtype=torch.uint8)
    count = core.CODES_PER_BYTE * len(row) - short
    expected = torch.from_numpy(core.unpack(packed.numpy(), count))
    assert_equal("codes", kernels.unpack(packed.to(device), count), expected)


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097])
def test_rows_across_programs(device: torch.device, count: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(count).integers(0, 4, (2, count), np.uint8))
    packed = kernels.pack(codes.to(device))
    assert_equal("packed", packed, torch.from_numpy(core.pack(codes.numpy())))
    assert_equal("codes", kernels.unpack(packed, count), codes)


def test_strided_input(device: torch.device) -> None:
    codes = torch.arange(3 * 10 * 2, dtype=torch.uint8).view(3, 10, 2).to(device)[..., 1] % 4
    wide = codes.repeat_interleave(3, dim=1)[:, ::3]
    assert not wide.is_contiguous()
    assert_equal("packed", kernels.pack(wide), kernels.pack(wide.clone(memory_format=torch.contiguous_format)))
    packed = kernels.pack(codes).T.contiguous().T
    assert_equal("codes", kernels.unpack(packed, 10), codes)


def test_high_bits_do_not_reach_a_neighbour(device: torch.device) -> None:
    codes = torch.tensor([255, 4, 6, 9], dtype=torch.uint8, device=device)
    assert kernels.pack(codes).tolist() == [3 | 0 << 2 | 2 << 4 | 1 << 6]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_nothing_is_no_launch(device: torch.device, shape: tuple[int, ...]) -> None:
    codes = torch.zeros(shape, dtype=torch.uint8, device=device)
    packed = kernels.pack(codes)
    assert packed.shape == operators.packed_shape(shape)
    assert kernels.unpack(packed, shape[-1]).shape == shape


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    packed = torch.zeros(2, 3, dtype=torch.uint8, device=device)
    for count in (8, 13):
        with pytest.raises(ShapeError, match=f"bytes for {count} codes"):
            kernels.unpack(packed, count)
    with pytest.raises(ShapeError, match="without an axis"):
        kernels.pack(packed[0, 0])
    with pytest.raises(DtypeError, match="int32"):
        kernels.pack(packed.int())
    with pytest.raises(DtypeError, match="int8"):
        kernels.unpack(packed.view(torch.int8), 12)
