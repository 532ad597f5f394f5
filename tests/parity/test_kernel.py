"""Launching again: what decides about the binary, and what is handed to it, with a stand-in for Triton's part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantwm_core.errors import DeviceError

kernels = pytest.importorskip("quantwm_kernels.triton.kernel", exc_type=ImportError)

NAMES = ("source", "count", "scale", "SIZE", "TILE")


class Compiler:
    """What Triton makes of a source: every first launch compiles, every later one of a binary is recorded."""

    __name__, __doc__ = "scale_kernel", None

    def __init__(self) -> None:
        self.arg_names = list(NAMES)
        self.params = [
            SimpleNamespace(is_constexpr=name.isupper(), do_not_specialize=name == "count") for name in NAMES
        ]
        self.compiled = 0
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*_: Any, **__: Any) -> Any:
            self.compiled += 1
            return self

        def launch(*passed: Any) -> None:
            self.launched.append((grid, *passed))

        return launch if len(grid) == 3 else compile_and_launch


class OnDevice(torch.Tensor):
    """A tensor that says it lives on a GPU."""

    is_cuda = True


def on_device(*shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    flat = torch.zeros(offset + torch.Size(shape).numel(), dtype=dtype)[offset:]
    return flat.view(shape).as_subclass(OnDevice)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr(kernels, "_INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Compiler()


@pytest.mark.parametrize("takes_constants", [True, False])
def test_the_second_launch_hands_addresses_and_constants_in_order(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, *, takes_constants: bool
) -> None:
    monkeypatch.setattr(kernels, "_TAKES_CONSTANTS", takes_constants)
    kernel, tensor = kernels.Kernel(compiler), on_device(4)
    for count in (7, 9):
        kernel[2,](tensor, count, 0.5, 64, TILE=32, num_warps=4)
    assert compiler.compiled == 1
    constants = (64, 32) if takes_constants else ()
    assert compiler.launched == [((2, 1, 1), tensor.data_ptr(), 9, 0.5, *constants)]


@pytest.mark.parametrize(
    "other",
    [
        {"tensor": on_device(4, dtype=torch.bfloat16)},
        {"tensor": on_device(4, offset=1)},
        {"count": 2**31},
        {"size": 65},
        {"size": True},
        {"tile": 16},
        {"warps": 8},
    ],
    ids=str,
)
def test_what_a_binary_depends_on_finds_another(compiler: Compiler, other: dict[str, Any]) -> None:
    kernel = kernels.Kernel(compiler)
    stock: dict[str, Any] = {"tensor": on_device(4), "count": 1, "size": 1, "tile": 32, "warps": 4}
    for given in (stock, stock | other):
        kernel[2, 3](given["tensor"], given["count"], 0.5, given["size"], TILE=given["tile"], num_warps=given["warps"])
    assert (compiler.compiled, compiler.launched) == (2, [])


def test_what_a_launch_returns_launches_the_same_again(compiler: Compiler) -> None:
    kernel, tensor = kernels.Kernel(compiler), on_device(4)
    constants = (64, 32) if kernels._TAKES_CONSTANTS else ()
    first, second = (((2, 3, 1), tensor.data_ptr(), count, 0.5, *constants) for count in (7, 9))
    compiled, known = (kernel[2, 3](tensor, count, 0.5, 64, TILE=32, num_warps=4) for count in (7, 9))
    assert compiler.launched == [second]
    for again in (compiled, known, compiled):
        again()
    assert compiler.launched == [second, first, second, first]
    assert compiler.compiled == 1


def test_a_launch_that_a_hook_stops_is_no_binary(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tensor = kernels.Kernel(compiler), on_device(4)
    constants = (64, 32) if kernels._TAKES_CONSTANTS else ()
    with monkeypatch.context() as patch:
        patch.setattr(Compiler, "__getitem__", lambda *_: lambda *_, **__: None)
        again = kernel[2,](tensor, 7, 0.5, 64, TILE=32)
        again()
    assert (compiler.compiled, compiler.launched) == (0, [])
    again()
    assert (compiler.compiled, compiler.launched) == (1, [])
    again()
    assert compiler.launched == [((2, 1, 1), tensor.data_ptr(), 7, 0.5, *constants)]


def test_an_argument_elsewhere_is_refused(compiler: Compiler) -> None:
    kernel = kernels.Kernel(compiler)
    with pytest.raises(DeviceError, match="scale_kernel: an argument lives on cpu"):
        kernel[1,](torch.zeros(4), 1, 0.5, 64, TILE=32)
    assert compiler.compiled == 0
