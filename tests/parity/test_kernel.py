"""Launching again: what decides about the binary, and what is handed to it, with a stand-in for Triton's part.

Releases that are launched past Triton's own function, and others, are told apart by where they keep their hooks.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantwm_core.errors import DeviceError

kernels = pytest.importorskip("quantwm_kernels.triton.kernel", exc_type=ImportError)

DEVICE, STREAM = 1, 17
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
        self.function, self.packed_metadata = "function", "metadata"
        self.past_hooks = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*_: Any, **__: Any) -> Any:
            self.compiled += 1
            return self

        def launch(*passed: Any) -> None:
            self.launched.append((grid, *passed))

        return launch if len(grid) == 3 else compile_and_launch

    def run(self, *arguments: Any) -> None:
        assert arguments[3:9] == (STREAM, "function", "metadata", None, None, None)
        self.past_hooks += 1
        self.launched.append((arguments[:3], *arguments[9:]))


class OnDevice(torch.Tensor):
    """A tensor that says it lives on a GPU."""

    is_cuda = True


def on_device(*shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    flat = torch.zeros(offset + torch.Size(shape).numel(), dtype=dtype)[offset:]
    return flat.view(shape).as_subclass(OnDevice)


class Runtime:
    """Where a release of Triton keeps its hooks."""

    def __init__(self) -> None:
        self.launch_enter_hook: Any = SimpleNamespace(calls=[])
        self.launch_exit_hook: Any = None


@pytest.fixture(params=[None, Runtime], ids=["by Triton", "past Triton"])
def runtime(request: pytest.FixtureRequest) -> Runtime | None:
    return request.param() if request.param else None


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, runtime: Runtime | None) -> Compiler:
    monkeypatch.setattr(kernels, "_INTERPRETED", False)
    monkeypatch.setattr(kernels, "_RUNTIME", runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    streams = {DEVICE: STREAM}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
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


def test_truth_is_another_type_than_one() -> None:
    assert len({kernels._kind(each) for each in (True, 1, 2, 16, 2**31, 0.5)}) == 6


def test_an_argument_elsewhere_is_refused(compiler: Compiler) -> None:
    kernel = kernels.Kernel(compiler)
    with pytest.raises(DeviceError, match="scale_kernel: an argument lives on cpu"):
        kernel[1,](torch.zeros(4), 1, 0.5, 64, TILE=32)
    assert compiler.compiled == 0


def test_launches_go_past_triton_where_its_release_is_known(compiler: Compiler, runtime: Runtime | None) -> None:
    kernel, tensor = kernels.Kernel(compiler), on_device(4)
    _, again = (kernel[2,](tensor, 7, 0.5, 64, TILE=32) for _ in range(2))
    again()
    assert (len(compiler.launched), compiler.past_hooks) == (2, 0 if runtime is None else 2)
    assert compiler.launched[0] == compiler.launched[1]


@pytest.mark.parametrize("runtime", [Runtime], indirect=True, ids=["past Triton"])
@pytest.mark.parametrize("hook", [SimpleNamespace(calls=[print]), print], ids=["in a chain", "alone"])
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_left_to_triton(compiler: Compiler, runtime: Runtime, name: str, hook: Any) -> None:
    kernel, tensor = kernels.Kernel(compiler), on_device(4)
    _, again = (kernel[2,](tensor, 7, 0.5, 64, TILE=32) for _ in range(2))
    assert compiler.past_hooks == 1
    setattr(runtime, name, hook)
    again()
    assert (len(compiler.launched), compiler.past_hooks) == (2, 1)
    assert compiler.launched[0] == compiler.launched[1]


@pytest.mark.skipif(kernels._RUNTIME is None, reason="this Triton launches by itself")
@pytest.mark.parametrize("runtime", [kernels._RUNTIME], ids=["past Triton"])
def test_the_driver_is_given_what_triton_gives_it(
    compiler: Compiler, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = importlib.import_module("triton.compiler.compiler")
    device = SimpleNamespace(get_current_device=lambda: DEVICE, get_current_stream={DEVICE: STREAM}.get)
    monkeypatch.setattr(compilation, "driver", SimpleNamespace(active=device))
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(runtime, name, None)  # without a hook Triton describes no launch
    given: list[tuple[Any, ...]] = []
    compiled = object.__new__(compilation.CompiledKernel)
    vars(compiled).update(module="module", function="function", packed_metadata="metadata", src=None)
    vars(compiled)["_run"] = lambda *arguments: given.append(arguments)
    grid, passed = (2, 3, 1), (4096, 7, 0.5, 64, 32)
    compiled[grid](*passed)
    kernels._Again(compiled, grid, DEVICE, passed)()
    kernels._Again(compiled, grid, DEVICE, (0, *passed[1:]))(4096)
    assert len(given) == 3
    assert given[0] == given[1] == given[2]
    assert compiler.launched == []


def repeated(kernel: Any, tensor: torch.Tensor, scale: float = 0.5, key: int = 7, warps: int = 4) -> list[int]:
    asked: list[int] = []

    def rest() -> Any:
        asked.append(key)
        return (key,), (64,), {"TILE": 32}

    kernel.repeat(key, (tensor, key, scale), {"num_warps": warps}, rest)
    return asked


def test_a_launch_is_repeated_with_other_addresses_and_numbers(compiler: Compiler) -> None:
    kernel, constants = kernels.Kernel(compiler), (64, 32) if kernels._TAKES_CONSTANTS else ()
    tensors = [on_device(4) for _ in range(3)]
    asked = [repeated(kernel, tensor, scale) for tensor, scale in zip(tensors, (0.5, 0.25, 0.125), strict=True)]
    assert (asked, compiler.compiled) == ([[7], [], []], 1)
    expected = [
        ((7, 1, 1), each.data_ptr(), 7, scale, *constants)
        for each, scale in zip(tensors, (0.5, 0.25, 0.125), strict=True)
    ]
    assert compiler.launched == expected[1:]


@pytest.mark.parametrize(
    "other",
    [
        {"tensor": on_device(4, dtype=torch.bfloat16)},
        {"tensor": on_device(4, offset=1)},
        {"key": 2},
        {"warps": 8},
        {"scale": 2},
    ],
    ids=str,
)
def test_what_decides_about_a_launch_is_looked_at_in_each(compiler: Compiler, other: dict[str, Any]) -> None:
    kernel = kernels.Kernel(compiler)
    stock: dict[str, Any] = {"tensor": on_device(4)}
    assert repeated(kernel, **stock) == [7]
    assert repeated(kernel, **(stock | other)) == [other.get("key", 7)]
    assert repeated(kernel, **stock) == []


def test_a_tensor_elsewhere_is_not_launched_again(compiler: Compiler) -> None:
    kernel = kernels.Kernel(compiler)
    repeated(kernel, on_device(4))
    with pytest.raises(DeviceError, match="scale_kernel: an argument lives on cpu"):
        repeated(kernel, torch.zeros(4))
    assert compiler.launched == []


def test_a_repeated_launch_returns_what_launches_it_again(compiler: Compiler) -> None:
    kernel, tensors = kernels.Kernel(compiler), [on_device(4) for _ in range(2)]
    every = [
        kernel.repeat(7, (each, 7, 0.5), {}, lambda: ((7,), (64,), {"TILE": 32})) for each in (*tensors, tensors[0])
    ]
    for again in every:
        again()
    addresses = [launched[1] for launched in compiler.launched]
    first, second = (each.data_ptr() for each in tensors)
    assert addresses == [second, first, first, second, first]


def test_few_launches_are_remembered(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST_REPEATED", 2)
    kernel, tensor = kernels.Kernel(compiler), on_device(4)
    assert [repeated(kernel, tensor, key=key) for key in (1, 2, 2, 3, 3, 1)] == [[1], [2], [], [3], [], [1]]
