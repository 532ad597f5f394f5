"""Settings that a launch borrows from the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quantwm_kernels.launch import full_precision

MATMUL: Any = torch.backends.cuda.matmul
newer = pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="this torch has the older setting alone")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The settings that torch starts with, before and after."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_older_setting_comes_back(setting: str) -> None:
    torch.set_float32_matmul_precision(setting)
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert torch.get_float32_matmul_precision() == setting


@newer
def test_the_newer_setting_comes_back() -> None:
    MATMUL.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()  # which is why the newer one must be asked
    with full_precision():
        assert MATMUL.fp32_precision == "ieee"
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert MATMUL.fp32_precision == "tf32"


@newer
def test_full_precision_is_left_as_the_host_states_it() -> None:
    MATMUL.fp32_precision = "none"
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
    assert MATMUL.fp32_precision == "none"
