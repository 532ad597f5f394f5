"""Launching a kernel again without Triton's own preparations, which cost more than small kernels take.

Triton looks at every argument, at every global that a kernel names and at each option before it finds the binary. The
binary depends on little of that: compile-time arguments and options, types, whether a pointer lies at a multiple of 16
bytes and whether an integer is 1, a multiple of 16 or too large for 32 bits. Under these it is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from quantwm_core.errors import DeviceError
from quantwm_kernels.launch import interpreted

_ALIGNMENT = 16
_LARGEST_INT32 = 2**31 - 1
_MOST_REPEATED = 256
_INTERPRETED = interpreted()
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Triton 3.2 hands a binary its run-time arguments only; all of the kernels take the others last.
_TAKES_CONSTANTS = _VERSION >= (3, 3)
# Releases of which it is known what they do between a launch and the driver, and where they keep their hooks.
_RUNTIME: Any = triton.knobs.runtime if _VERSION in ((3, 6), (3, 7)) else None


class _Again:
    """Launches a binary as it was launched, on the current stream of its device.

    Args:
        binary: What Triton compiled.
        grid: Programs along three axes.
        device: Number of the device that it was compiled for.
        passed: What it is given, addresses in place of tensors.
    """

    def __init__(self, binary: Any, grid: tuple[int, ...], device: int, passed: Sequence[Any]) -> None:
        self._binary, self._grid, self._device, self._passed = binary, grid, device, tuple(passed)
        self._by_triton = binary[grid] if _RUNTIME is None else None

    def __call__(self, *leading: Any) -> None:
        """Launch, with other ``leading`` arguments if they are given."""
        binary, passed = self._binary, leading + self._passed[len(leading) :]
        if self._by_triton is not None or _watched():
            (self._by_triton or binary[self._grid])(*passed)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # noqa: SLF001 - by which Triton launches, too
        # As Triton does it, but for a description of the launch that it makes for its hooks each time.
        binary.run(*self._grid, stream, binary.function, binary.packed_metadata, None, None, None, *passed)


class Kernel:
    """A kernel of Triton, launched as ``kernel[grid](*arguments, **options)``; made by :func:`kernel`.

    The call returns what launches the same again, with no look at the arguments: as long as the tensors stay where they are.
    Compile-time arguments come behind all others.

    Attributes:
        function: What Triton made of the source.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__, self.__module__ = function.__name__, function.__module__
        # The interpreter keeps no parameters. Of a number that is not specialized, a binary depends on the type alone.
        parameters = [each for each in getattr(function, "params", ()) if not each.is_constexpr]
        self._specialized = [not each.do_not_specialize for each in parameters]
        self._binaries: dict[tuple[object, ...], Any] = {}
        self._repeated: dict[tuple[object, ...], _Again] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Callable[[], object]]:
        return partial(self._launch, tuple(grid))

    def repeat(
        self,
        key: Hashable,
        leading: Sequence[Any],
        options: Mapping[str, Any],
        rest: Callable[[], tuple[Sequence[int], Sequence[Any], Mapping[str, Any]]],
    ) -> Callable[[], object]:
        """Launch where most that decides about a launch is what it was before, and need not be looked at again.

        Args:
            key: What the grid and all arguments behind the leading ones follow from, for a device.
            leading: The first arguments: tensors and numbers.
            options: As for other launches.
            rest: The grid, the arguments behind those, and compile-time arguments by name.

        Returns:
            What launches the same again, as other launches do.
        """
        if _INTERPRETED:
            grid, others, constants = rest()
            return self._launch(tuple(grid), *leading, *others, **constants, **options)
        known: list[object] = [torch.cuda.current_device(), key, *options.items()]
        passed = list(leading)
        for place, value in enumerate(leading):
            if isinstance(value, Tensor):
                passed[place] = address = value.data_ptr()
                known += value.is_cuda, value.dtype, address % _ALIGNMENT == 0
            else:
                known.append(_kind(value))
        again = self._repeated.get(found := tuple(known))
        if again is not None:
            repeated = partial(again, *passed)
            repeated()
            return repeated
        grid, others, constants = rest()
        made = self._launch(tuple(grid), *leading, *others, **constants, **options)
        if isinstance(made, _Again):  # a launch that a hook has stopped is none, and would keep the tensors
            if len(self._repeated) >= _MOST_REPEATED:
                self._repeated.clear()
            self._repeated[found] = made
        return made

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Callable[[], object]:
        if _INTERPRETED:
            interpreter = partial(self.function[grid], *arguments, **options)
            interpreter()
            return interpreter
        constants, device = arguments[len(self._specialized) :], torch.cuda.current_device()
        key: list[object] = [device, constants, *map(type, constants), *options.items()]
        passed = list(arguments)
        for place, (value, specialized) in enumerate(zip(arguments, self._specialized, strict=False)):
            if isinstance(value, Tensor):
                if not value.is_cuda:
                    raise DeviceError(
                        f"{self.__name__}: an argument lives on {value.device}; move it with tensor.cuda()"
                    )
                passed[place] = address = value.data_ptr()  # which Triton would ask twice about
                key += value.dtype, address % _ALIGNMENT == 0
            elif specialized or not isinstance(value, int):
                key.append(_kind(value))
            else:
                key.append(value > _LARGEST_INT32)
        binary = self._binaries.get(known := tuple(key))
        compiled = binary is not None
        if binary is None:
            binary = self.function[grid](*arguments, **options)
            if binary is None:  # a hook of Triton has stopped it
                return partial(self._launch, grid, *arguments, **options)
            self._binaries[known] = binary
        if not _TAKES_CONSTANTS:
            del passed[len(self._specialized) :]
        else:
            passed += (options[name] for name in self.function.arg_names[len(arguments) :])
        again = _Again(binary, grid + (1,) * (3 - len(grid)), device, passed)
        if compiled:
            again()
        return again


def kernel(**settings: Any) -> Callable[[Callable[..., None]], Kernel]:
    """:func:`triton.jit` with ``settings``, as a :class:`Kernel`."""

    def made(source: Callable[..., None]) -> Kernel:
        return Kernel(triton.jit(**settings)(source))

    return made


def _kind(value: Any) -> object:
    """What a binary depends on in a number that is known when it is launched, specialized if it is whole."""
    if not isinstance(value, int) or isinstance(value, bool):
        return type(value)
    return value > _LARGEST_INT32, value % _ALIGNMENT == 0, value == 1


def _watched() -> bool:
    """Whether a hook of Triton is to be told of a launch; a chain may have none."""
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
