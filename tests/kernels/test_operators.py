"""What holds for every registered operator."""

import itertools

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import DeviceError, StateError
from tests.kernels.operators import CALLS, NAMESPACE, Call, registered, tensors

CASES = [
    pytest.param(name, make, id=f"{name}-{number}")
    for name, makers in CALLS.items()
    for number, make in enumerate(makers)
]
NAMES = registered()
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def operator(name: str) -> torch._ops.OpOverload:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def raw(tensor: Tensor) -> Tensor:
    """Bytes of a tensor, in its order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def test_every_operator_has_a_call() -> None:
    assert set(CALLS) == NAMES


@pytest.mark.parametrize(("name", "make"), CASES)
def test_opcheck(name: str, make: object) -> None:
    call: Call = make()  # type: ignore[operator]  # a factory of the table
    e4m3 = any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors(call.arguments))
    # The schema check compares inputs with allclose, which E4M3 does not have; the tests below look at their bytes.
    torch.library.opcheck(operator(name), call.arguments, test_utils=CHECKS[1:] if e4m3 else CHECKS)


@pytest.mark.parametrize(("name", "make"), CASES)
def test_only_what_is_declared_is_written_and_no_result_shares_memory(name: str, make: object) -> None:
    call: Call = make()  # type: ignore[operator]  # a factory of the table
    before = [
        raw(tensor)
        for position, item in enumerate(call.arguments)
        for tensor in tensors(item)
        if position not in call.written
    ]
    results = tensors(operator(name)(*call.arguments))
    after = [
        raw(tensor)
        for position, item in enumerate(call.arguments)
        for tensor in tensors(item)
        if position not in call.written
    ]
    assert all(torch.equal(first, second) for first, second in zip(before, after, strict=True))
    inputs = [tensor.untyped_storage().data_ptr() for tensor in tensors(call.arguments)]
    outputs = [tensor.untyped_storage().data_ptr() for tensor in results if tensor.numel()]
    assert not set(inputs) & set(outputs)
    assert len(set(outputs)) == len(outputs)
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize for tensor in results)


@pytest.mark.parametrize(("name", "make"), CASES)
def test_the_same_input_gives_the_same_bytes_twice(name: str, make: object) -> None:
    call: Call = make()  # type: ignore[operator]  # a factory of the table
    first, second = (tensors(operator(name)(*call.arguments)) for _ in range(2))
    assert all(torch.equal(raw(one), raw(two)) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize(("name", "make"), CASES)
def test_a_tensor_that_requires_grad_is_refused(name: str, make: object) -> None:
    call: Call = make()  # type: ignore[operator]  # a factory of the table
    floating = [tensor for tensor in tensors(call.arguments) if tensor.dtype in (torch.float32, torch.bfloat16)]
    for tensor in floating:
        tensor.requires_grad_(True)
        with pytest.raises(StateError, match="requires grad"):
            operator(name)(*call.arguments)
        tensor.requires_grad_(False)


def moved(value: object) -> object:
    """Arguments with every tensor on the GPU."""
    if isinstance(value, list):
        return [moved(item) for item in value]
    return value.cuda() if isinstance(value, Tensor) else value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "make"), CASES)
def test_on_a_gpu_an_operator_answers_there_or_is_refused(name: str, make: object) -> None:
    call: Call = make()  # type: ignore[operator]  # a factory of the table
    arguments = [moved(argument) for argument in call.arguments]
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CUDA"):
        assert all(tensor.is_cuda for tensor in tensors(operator(name)(*arguments)))
    else:
        with pytest.raises(DeviceError, match="cuda"):
            operator(name)(*arguments)


def test_operators_work_in_inference_mode_and_on_strided_input() -> None:
    for name, make in itertools.chain.from_iterable(
        ((name, make) for make in makers) for name, makers in CALLS.items()
    ):
        call = make()
        expected = [raw(tensor) for tensor in tensors(operator(name)(*call.arguments))]
        with torch.inference_mode():
            strided = [
                torch.stack([item, item], dim=-1)[..., 0]
                if isinstance(item, Tensor) and number not in call.written
                else item
                for number, item in enumerate(call.arguments)
            ]
            results = [raw(tensor) for tensor in tensors(operator(name)(*strided))]
        assert all(torch.equal(one, two) for one, two in zip(expected, results, strict=True)), name
