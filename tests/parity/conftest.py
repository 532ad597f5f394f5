"""Where the kernels run: on the GPU, or on the CPU under Triton's interpreter (``TRITON_INTERPRET=1``)."""

import pytest
import torch

from tests.parity.gate import POISON


@pytest.fixture
def device() -> torch.device:
    """Device of the tensors that launchers are given; without one the test is skipped."""
    from quantwm_kernels.launch import interpreted  # not before tests/core/conftest.py

    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A CUDA device; the interpreter does not do."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return device


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a launcher allocates is full of a pattern, so that an element that no kernel writes shows."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(POISON)
        return tensor

    monkeypatch.setattr(torch, "empty", lambda *shape, **options: fill(empty(*shape, **options)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda own, *shape, **options: fill(new_empty(own, *shape, **options))
    )
