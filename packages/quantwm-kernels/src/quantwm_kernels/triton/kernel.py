"""Launching a kernel again without Triton's own preparations, which cost more than small kernels take.

Triton looks at every argument, at every global that a kernel names and at each option before it finds the binary. The
binary depends on little of that: compile-time arguments and options, types, whether a pointer lies at a multiple of 16
bytes and whether an integer is 1, a multiple of 16 or too large for 32 bits. Under these it is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from quantwm_core.errors import DeviceError
from quantwm_kernels.launch import interpreted

_ALIGNMENT = 16
_LARGEST_INT32 = 2**31 - 1
_INTERPRETED = interpreted()
# Triton 3.2 hands a binary its run-time arguments only; all of the kernels take the others last.
_TAKES_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)


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

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Callable[[], object]]:
        return partial(self._launch, tuple(grid))

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Callable[[], object]:
        if _INTERPRETED:
            again = partial(self.function[grid], *arguments, **options)
            again()
            return again
        constants = arguments[len(self._specialized) :]
        key: list[object] = [torch.cuda.current_device(), constants, *map(type, constants), *options.items()]
        passed: list[Any] = []
        for value, specialized in zip(arguments, self._specialized, strict=False):
            if isinstance(value, Tensor):
                if not value.is_cuda:
                    raise DeviceError(
                        f"{self.__name__}: an argument lives on {value.device}; move it with tensor.cuda()"
                    )
                address = value.data_ptr()  # which Triton would ask twice about
                passed.append(address)
                key += (value.dtype, address % _ALIGNMENT == 0)
            elif specialized or not isinstance(value, int):
                passed.append(value)
                key.append(_kind(value))
            else:
                passed.append(value)
                key.append(value > _LARGEST_INT32)
        binary = self._binaries.get(known := tuple(key))
        compiled = binary is not None
        if binary is None:
            binary = self.function[grid](*arguments, **options)
            if binary is None:  # a hook of Triton has stopped it
                return partial(self._launch, grid, *arguments, **options)
            self._binaries[known] = binary
        if _TAKES_CONSTANTS:
            passed += constants
            passed += (options[name] for name in self.function.arg_names[len(arguments) :])
        again = partial(binary[grid + (1,) * (3 - len(grid))], *passed)
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
    return (value > _LARGEST_INT32, value % _ALIGNMENT == 0, value == 1) if isinstance(value, int) else type(value)
