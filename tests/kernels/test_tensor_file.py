"""Tensors survive a file, whatever they are and wherever they lie."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwm_core.errors import DeviceError, DtypeError, FormatError, StateError
from quantwm_kernels import tensor_file
from quantwm_kernels.tensor_file import available_device, opened, write_tensors

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = (
    torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float16,
)  # fmt: skip


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one kind and hold the same bytes, NaN included."""
    kinds = [(each.dtype, each.shape) for each in (one, other)]
    parts = [each.cpu().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return kinds[0] == kinds[1] and torch.equal(*parts)


def read(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    with opened(path) as file:
        return {name: file.read(name, device) for name in file.places}


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5),
    seed=st.integers(0, 99),
)
def test_any_tensors_survive_a_file(
    kinds: list[tuple[torch.dtype, list[int]]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number, (dtype, shape) in enumerate(kinds):
        wide = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        tensors[f"{number}"] = wide.view(dtype).squeeze(-1).reshape(shape)
    path = tmp_path_factory.mktemp("tensors") / "any.safetensors"
    write_tensors(path, tensors)
    got = read(path)
    assert got.keys() == tensors.keys()
    assert all(same(got[name], tensor) for name, tensor in tensors.items())


def test_strided_tensors_are_stored_by_value_and_read_into_memory_of_their_own(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.int32).view(4, 6)
    tensors = {"turned": whole.T, "part": whole[1:3, ::2], "spread": whole[:1].expand(3, 6)}
    write_tensors(tmp_path / "a", tensors)
    got = read(tmp_path / "a")
    assert all(same(got[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in got.values())


def test_what_is_read_in_inference_mode_can_be_written_later(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": torch.zeros(2)})
    with torch.inference_mode():
        got = read(tmp_path / "a")["x"]
    got += 1
    assert not got.is_inference()


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="x: the tensor requires grad"):
        write_tensors(tmp_path / "a", {"x": torch.zeros(2, requires_grad=True)})
    with pytest.raises(DtypeError, match=r"x: got torch\.complex64, files hold torch\.bfloat16"):
        write_tensors(tmp_path / "a", {"x": torch.zeros(2, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": torch.zeros(2**20)})
    with opened(tmp_path / "a") as file:
        os.truncate(tmp_path / "a", 2**21)
        with pytest.raises(FormatError, match="the file ends within array 'x'; it was cut while it was read"):
            file.read("x")
        with pytest.raises(FormatError, match="no array 'absent'; the file is damaged"):
            file.read("absent")


def test_a_device_that_is_not_there_is_named() -> None:
    others: list[Any] = ["cuda:99", "nonsense", 1.5, []]
    for device in others:
        with pytest.raises(DeviceError, match=r"device '.*' is not there \(.*\); name another one"):
            available_device(device)
    with pytest.raises(DeviceError, match="device 'meta': the tensor lives on meta; quantwm serves CPU"):
        available_device("meta")


@gpu
def test_what_lies_on_a_gpu_passes_through_the_stage_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "STAGE_NBYTES", 1000)
    for number, dtype in enumerate(DTYPES):
        tensor = torch.randint(0, 256, (777, dtype.itemsize), dtype=torch.uint8).view(dtype).cuda()
        write_tensors(tmp_path / f"{number}", {"x": tensor})
        for device in ("cpu", "cuda"):
            got = read(tmp_path / f"{number}", device)["x"]
            assert got.device.type == device
            assert same(got, tensor)
    assert available_device("cuda").index is not None
