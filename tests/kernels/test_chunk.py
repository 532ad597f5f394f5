"""Sealed chunks of tensors: the same arrays as in core, over the same memory, counted from storage."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quantwm_core import chunk as core
from quantwm_core.errors import DeviceError, DtypeError, FormatError, ParameterError, ShapeError, StateError
from quantwm_core.method import scheme
from quantwm_kernels.chunk import SealedChunk, SealedTensor, storage_nbytes
from tests.kernels.operators import normal


def core_chunk() -> core.SealedChunk:
    keys, values = (normal(1, 2, 32, 64, seed=seed).numpy() for seed in (0, 1))
    return scheme("quantwm").seal(keys, values, start=40)


def test_both_ways_share_memory_and_fields() -> None:
    theirs = core_chunk()
    ours = SealedChunk.from_core(theirs)
    assert (ours.start, ours.stop, ours.tokens, ours.version) == (40, 72, 32, theirs.version)
    assert ours.nbytes == theirs.nbytes
    assert ours.bf16_nbytes == theirs.bf16_nbytes
    for kind in core.KINDS:
        here, there = getattr(ours, kind), getattr(theirs, kind)
        back = here.to_core()
        assert (back.method, back.parameters, back.shape) == (there.method, there.parameters, there.shape)
        assert list(back.arrays) == list(there.arrays)
        for name, array in there.arrays.items():
            assert here.arrays[name].data_ptr() == array.ctypes.data == back.arrays[name].ctypes.data
            assert back.arrays[name].dtype == array.dtype
    assert ours.to_core().start == 40


def test_read_only_arrays_are_copied() -> None:
    array = np.zeros((1, 1, 2, 4), "bfloat16")
    array.flags.writeable = False
    sealed = SealedTensor.from_core(core.SealedTensor("bf16", {}, array.shape, {"exact": array}))
    sealed.arrays["exact"].fill_(1)
    assert not array.any()


def test_bytes_are_counted_from_storage() -> None:
    block = torch.zeros(100, dtype=torch.bfloat16)
    assert storage_nbytes([block[:3]]) == 200
    assert storage_nbytes([block[:3], block[50:]]) == 200
    assert storage_nbytes([block[:3].clone(), torch.zeros(5)]) == 26
    assert storage_nbytes([]) == 0
    assert SealedTensor("bf16", {}, (1, 1, 1, 4), {"exact": block[:4].view(1, 1, 1, 4)}).nbytes == 200


def test_moving_keeps_fields_and_other_devices_do_not_reach_core() -> None:
    moved = SealedChunk.from_core(core_chunk()).to("meta")
    assert moved.start == 40
    assert moved.keys.arrays["codes"].is_meta
    with pytest.raises(DeviceError, match="codes"):
        moved.to_core()


def test_halves_of_different_tokens_are_refused() -> None:
    tensors = [SealedTensor("bf16", {}, (1, 1, n, 4), {"exact": torch.zeros(1, 1, n, 4)}) for n in (2, 3)]
    with pytest.raises(ShapeError, match="different tokens"):
        SealedChunk(tensors[0], tensors[1])


def test_rows_of_tensors_alike_differ_in_addresses_alone() -> None:
    first, second = (SealedChunk.from_core(core_chunk()).keys for _ in range(2))
    assert first.row.recipe == second.row.recipe
    for sealed in (first, second):
        addresses = {array.data_ptr() for array in sealed.arrays.values()}
        assert {word for word in sealed.row.words if word in addresses} == addresses
    differing = sum(one != other for one, other in zip(first.row.words, second.row.words, strict=True))
    assert differing == len(first.arrays)


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (FormatError, {"arrays": {"codes": torch.zeros(1, 2, 31, 16, dtype=torch.uint8)}}),
        (DtypeError, {"arrays": {"codes": torch.zeros(1, 2, 32, 16, dtype=torch.int8)}}),
        (StateError, {"arrays": {"codes": torch.zeros(1, 2, 16, 32, dtype=torch.uint8).transpose(2, 3)}}),
        (DeviceError, {"arrays": {"codes": torch.zeros(1, 2, 32, 16, dtype=torch.uint8, device="meta")}}),
        (FormatError, {"shape": (1, 2, 33, 64)}),
        (ParameterError, {"parameters": {"warm_start": 0}}),
        (ParameterError, {"parameters": {"warm_start": [False]}}),
    ],
    ids=["shape", "dtype", "strides", "device", "tokens", "type", "unhashable"],
)
def test_a_row_is_refused_after_one_that_is_whole(error: type[Exception], changes: dict[str, Any]) -> None:
    whole = SealedChunk.from_core(core_chunk()).keys
    assert whole.parameters["warm_start"] is False
    assert whole.row.words
    joined: dict[str, Any] = {}
    for name, each in changes.items():
        joined[name] = {**getattr(whole, name), **each} if isinstance(each, dict) else each
    for _ in range(2):
        with pytest.raises(error):
            _ = replace(whole, **joined).row
