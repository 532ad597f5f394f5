"""Crossing between torch and NumPy copies nothing, and refuses what must not cross."""

import ml_dtypes
import numpy as np
import pytest
import torch

from quantwm_core.errors import DeviceError, DtypeError, ShapeError, StateError
from quantwm_kernels import bridge

PAIRS = [
    (torch.bfloat16, np.dtype(ml_dtypes.bfloat16)),
    (torch.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)),
    (torch.float32, np.dtype(np.float32)),
    (torch.float16, np.dtype(np.float16)),
    (torch.uint8, np.dtype(np.uint8)),
    (torch.int8, np.dtype(np.int8)),
    (torch.int32, np.dtype(np.int32)),
]


@pytest.mark.parametrize(("dtype", "expected"), PAIRS, ids=[str(pair[0]) for pair in PAIRS])
def test_both_ways_share_memory_and_values(dtype: torch.dtype, expected: np.dtype) -> None:
    tensor = torch.arange(24).view(2, 3, 4).to(dtype)
    array = bridge.to_numpy(tensor)
    assert array.dtype == expected
    assert array.ctypes.data == tensor.data_ptr()
    assert array.astype(np.float32).tolist() == tensor.float().tolist()
    back = bridge.to_torch(array)
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()


def test_strides_and_offsets_survive() -> None:
    tensor = torch.arange(48).view(2, 4, 6).to(torch.bfloat16)[:, 1:3].transpose(1, 2)
    array = bridge.to_numpy(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    assert array.strides == tuple(2 * stride for stride in tensor.stride())
    array[...] = 0
    assert not tensor.any()


def test_empty_and_scalar_tensors_cross() -> None:
    assert bridge.to_numpy(torch.zeros(0, 3, dtype=torch.bfloat16)).shape == (0, 3)
    assert bridge.to_numpy(torch.tensor(2.0, dtype=torch.bfloat16)).astype(np.float32) == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_refused_before_anything_else(dtype: torch.dtype) -> None:
    with pytest.raises(StateError, match=r"layer 3, keys: .*requires grad.*no_grad"):
        bridge.to_numpy(torch.ones(2, dtype=dtype, device="meta", requires_grad=True), "layer 3, keys")


def test_other_devices_are_refused_with_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"keys: .* on meta, .*CPU tensors only; move it with tensor\.cpu\(\)"):
        bridge.to_numpy(torch.ones(2, device="meta"), "keys")


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(StateError, match="to_dense"):
        bridge.to_numpy(torch.eye(3).to_sparse())


def test_read_only_and_foreign_arrays_are_refused() -> None:
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    with pytest.raises(StateError, match="read-only"):
        bridge.to_torch(array)
    with pytest.raises(DtypeError, match="no dtype for"):
        bridge.to_torch(np.zeros(2, np.dtype("datetime64[s]")))


def test_owned_keeps_what_is_whole_and_copies_the_rest() -> None:
    whole = np.zeros((4, 4), np.float32)
    assert bridge.owned(whole).data_ptr() == whole.ctypes.data
    assert bridge.owned(whole.reshape(2, 8)).data_ptr() == whole.ctypes.data
    for view in (whole[:2], whole.T, np.broadcast_to(whole, (2, 4, 4))):
        copy = bridge.owned(view)
        assert copy.data_ptr() != whole.ctypes.data
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == copy.numel() * 4
    lent = torch.zeros(4, dtype=torch.bfloat16)
    assert bridge.owned(bridge.to_numpy(lent)).data_ptr() != lent.data_ptr()
    scalar = bridge.owned(np.array(3.0, np.float32))
    assert scalar.shape == ()


def test_a_broken_promise_of_shape_is_noticed() -> None:
    with pytest.raises(ShapeError, match=r"returned shape \(2,\) where \(3,\) was promised"):
        bridge.owned(np.zeros(2), (3,))
