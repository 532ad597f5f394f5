"""A VGG16 of random weights: LPIPS reads a file of that shape, and the real one is the user's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
TAPPED = (1, 3, 6, 9, 12)


@pytest.fixture(scope="session")
def vgg_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from quantwm_eval.lpips import FORMAT  # not before tests/core/conftest.py

    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    before = 3
    for index, width in enumerate(WIDTHS):
        weight = torch.randn(width, before, 3, 3, generator=generator) * (2 / (9 * before)) ** 0.5
        tensors |= {
            f"convolution.{index}.weight": weight.half(),
            f"convolution.{index}.bias": torch.zeros(width).half(),
        }
        before = width
    for tap, index in enumerate(TAPPED):
        tensors[f"linear.{tap}"] = torch.rand(WIDTHS[index], generator=generator).half()
    path = tmp_path_factory.mktemp("lpips") / "vgg16.safetensors"
    save_file(tensors, path, metadata={"format": FORMAT, "network": "vgg16"})
    return path
