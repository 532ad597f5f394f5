"""Numbers in place of a host's tensors of one: the same to the host, and nobody waits for them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors, _recursive_to

from quantwm_models import attach
from quantwm_models.counter import Counter
from quantwm_models.errors import HostError
from tests.models.causal_forcing_host import CausalInferencePipeline
from tests.models.wan_host import noise

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def counter(number: int = 0, device: str = "cpu", dtype: torch.dtype = torch.long) -> Counter:
    return Counter(torch.empty(1, dtype=dtype, device="meta"), torch.device(device)).fill_(number)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_is_the_tensor_that_it_stands_for(device: str, dtype: torch.dtype) -> None:
    one, other = counter(5, device, dtype), torch.tensor([5], dtype=dtype, device=device)
    assert isinstance(one, Tensor)
    assert (one.shape, one.dtype, one.device.type, one.ndim) == (other.shape, other.dtype, other.device.type, 1)
    assert (one.item(), int(one), range(9)[one], bool(one)) == (5, 5, 5, True)
    for apply in OPERATORS:
        assert torch.equal(apply(one), apply(other))
        assert type(apply(one)) is Tensor
    assert int(one) == 5


OPERATORS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + 2,
    lambda x: 9 - x,
    lambda x: x > 4,
    lambda x: torch.cat([x, x]),
    lambda x: x.clone(),
    lambda x: x.float(),
    lambda x: x.cpu() + 0,
    lambda x: x[0] * 1,
]


def _set_first(tensor: Tensor) -> None:
    tensor[(0,) * tensor.ndim] = 3


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(-1),
    lambda x: x[0],
    lambda x: x[:],
    lambda x: x.squeeze(),
    lambda x: x.reshape(1, 1),
    lambda x: x[None].mT,
    lambda x: x.unbind()[0],
    lambda x: x.split(1)[0],
    lambda x: next(iter(x)),
    lambda x: x.detach(),
    lambda x: x.data,
    lambda x: x.expand(1),
    lambda x: x[0].view(1),
]
REFUSED: list[Callable[[Tensor], object]] = [
    lambda x: x.expand(3),
    lambda x: x.view(torch.int32),
    lambda x: x.view(torch.float64),
    lambda x: x.resize_(2),
    lambda x: x.unsqueeze_(0),
    lambda x: torch.mul(torch.ones(2, dtype=torch.long), 2, out=x),
    lambda x: x.numpy().fill(3),
    lambda x: setattr(x, "data", torch.tensor([1, 2])),
    lambda x: setattr(x, "data", torch.tensor([1], dtype=torch.int32)),
    lambda x: x.__dlpack__(),
    lambda x: x.share_memory_(),
    lambda x: x.storage(),
    lambda x: x.apply_(lambda _: 3),
]


@pytest.mark.parametrize("device", DEVICES)
def test_what_changes_it_is_seen(device: str) -> None:
    number = counter(5, device)
    for change, expected in (
        (lambda x: x.fill_(7), 7),
        (lambda x: x.fill_(torch.tensor([8], device=device)), 8),
        (lambda x: x.add_(2), 10),
        (lambda x: x.copy_(torch.tensor([4], device=device)), 4),
        (lambda x: x.zero_(), 0),
        (lambda x: torch.add(torch.tensor([1], device=device), 2, out=x), 3),
        (lambda x: x.add_(x.view(1)), 6),
    ):
        assert change(number) is number
        assert number.item() == expected
    assert repr(number) == f"Counter(6, device='{number.device}')"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_through_a_view_is_seen_in_all(device: str, view: Callable[[Tensor], Tensor]) -> None:
    number, tensor = counter(5, device), torch.tensor([5], device=device)
    seen = view(number)
    for change in (lambda x: x.fill_(7), lambda x: x.add_(2), lambda x: x.copy_(torch.tensor(4)), _set_first):
        change(view(number))
        change(view(tensor))
        assert number.item() == tensor.item() == seen.item() == view(number)
        assert view(number).shape == view(tensor).shape == seen.shape
    number.fill_(11)
    assert seen.item() == 11


def test_data_can_be_replaced() -> None:
    number = counter(5)
    seen, number.data = number[0], torch.tensor([8])
    assert (number.item(), number.data.item(), seen.item()) == (8, 8, 8)
    number.data.fill_(9)
    assert number.item() == 9


@pytest.mark.parametrize("write", REFUSED)
def test_what_would_be_lost_is_refused(write: Callable[[Tensor], object]) -> None:
    number = counter(5)
    with pytest.raises((HostError, ValueError), match=r"clone|need a tensor like it|read-only"):
        write(number)
    assert (number.item(), tuple(number.shape), number[0].item()) == (5, (1,), 5)


def test_what_moves_arguments_to_devices_leaves_it_alone() -> None:
    number, cpu = counter(3), torch.device("cpu")
    assert number.to(cpu) is number
    assert number.detach() is number
    moved: Any = _recursive_to([{"global_end_index": number}], cpu, False)
    assert moved[0][0]["global_end_index"] is number
    cast: Any = _apply_to_tensors(lambda x: x.half() if x.is_floating_point() else x, [{"end": number}])
    assert cast[0]["end"] is number


def test_it_can_be_copied_and_shown() -> None:
    number = counter(3)
    twin = copy.deepcopy([number])[0]
    number.fill_(4)
    assert copy.copy(number).fill_(6) is not number
    assert number.item() == 6, "a shallow copy of a tensor shares its memory"
    number.fill_(4)
    assert (int(twin), number.tolist(), number.numpy().tolist(), f"{number}") == (3, [4], [4], repr(number))


def test_tensors_of_more_or_of_fractions_are_left_as_they_are() -> None:
    assert not Counter.serves(torch.empty(2, dtype=torch.long))
    assert not Counter.serves(torch.empty(1))


def test_a_host_is_given_counters_also_where_it_begins_anew_with_numbers_of_its_own() -> None:
    host = CausalInferencePipeline()
    with attach(host, "bf16"):
        host.inference(noise(0, 6))
        assert host.kv_cache1 is not None
        ends = {name: host.kv_cache1[0][name] for name in ("global_end_index", "local_end_index")}
        assert all(isinstance(each, Counter) for each in ends.values())
        assert {name: int(each) for name, each in ends.items()} == dict.fromkeys(ends, 48)
        host.inference(noise(0, 3))  # in the same dicts, whose indices this host replaces
        again = host.kv_cache1[0]["global_end_index"]
        assert isinstance(again, Counter)
        assert again is not ends["global_end_index"]
        assert int(again) == 24


@gpu
@pytest.mark.gpu
def test_nobody_waits_for_it() -> None:
    number = counter(5, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert number.fill_(number.item() + 1).item() == 6
        with pytest.raises(RuntimeError, match="synchroniz"):
            number.add_(1)  # an operator changes a tensor, which is read back
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(number) == 6
