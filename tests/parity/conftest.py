"""Where the kernels run: on the GPU, or on the CPU under Triton's interpreter (``TRITON_INTERPRET=1``)."""

import pytest
import torch

from quantwm_kernels.launch import interpreted


@pytest.fixture
def device() -> torch.device:
    """Device of the tensors that launchers are given; without one the test is skipped."""
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
