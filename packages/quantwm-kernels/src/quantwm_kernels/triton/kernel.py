"""Launching a kernel again without Triton's own preparations, which cost more than small kernels take.

Triton looks at every argument, at every global that a kernel names and at each option before it finds the binary. The
binary depends on little of that: compile-time arguments and options, types, whether a pointer lies at a multiple of 16
bytes and whether an integer is 1, a multiple of 16 or too large for 32 bits. Under these it is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
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


class Role(IntEnum):
    """What of an argument a binary depends on."""

    CONSTANT = 0
    """Its value: a compile-time argument."""
    WIDTH = 1
    """Its type alone, where the kernel says so."""
    FULL = 2
    """Its type, and what the compiler makes of some values."""


class Kernel:
    """A kernel of Triton, launched as ``kernel[grid](*arguments, **options)``; made by :func:`kernel`.

    Attributes:
        function: What Triton made of the source.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__, self.__module__ = function.__name__, function.__module__
        # The interpreter keeps no parameters.
        self._roles = [_role(each) for each in getattr(function, "params", ())]
        self._binaries: dict[tuple[object, ...], Any] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, tuple(grid))

    def prepared(self, grid: Sequence[int], *arguments: Any, **options: Any) -> Callable[[], None]:
        """A launch that is made again and again: what it depends on is looked at once, the tensors stay where they are."""
        if _INTERPRETED:
            return partial(self.function[tuple(grid)], *arguments, **options)
        known, passed = self._looked_at(arguments, options)
        runs: list[Callable[..., None]] = []

        def launch() -> None:
            if runs:
                runs[0](*passed)
            else:
                self._launch(tuple(grid), *arguments, **options)
                runs.append(self._binaries[known][_whole(grid)])

        return launch

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if _INTERPRETED:
            self.function[grid](*arguments, **options)
            return
        known, passed = self._looked_at(arguments, options)
        binary = self._binaries.get(known)
        if binary is None:
            self._binaries[known] = self.function[grid](*arguments, **options)
            return
        binary[_whole(grid)](*passed)

    def _looked_at(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[tuple[object, ...], list[Any]]:
        """What the binary of a launch is kept under, and what it is called with."""
        key: list[object] = [torch.cuda.current_device(), *options.items()]
        passed, constants = [], []
        for value, role in zip(arguments, self._roles, strict=False):
            if isinstance(value, Tensor):
                passed.append(self._address(value))
                key += (value.dtype, passed[-1] % _ALIGNMENT == 0)
            elif role is Role.CONSTANT:
                constants.append(value)
                key += (type(value), value)
            else:
                passed.append(value)
                key.append(_kind(value, role))
        if _TAKES_CONSTANTS:
            passed += constants
            passed += (options[name] for name in self.function.arg_names[len(arguments) :])
        return tuple(key), passed

    def _address(self, tensor: Tensor) -> int:
        """Where a tensor begins, which Triton would not ask twice about."""
        if not tensor.is_cuda:
            raise DeviceError(f"{self.__name__}: an argument lives on {tensor.device}; move it with tensor.cuda()")
        return tensor.data_ptr()


def kernel(**settings: Any) -> Callable[[Callable[..., None]], Kernel]:
    """:func:`triton.jit` with ``settings``, as a :class:`Kernel`."""

    def made(source: Callable[..., None]) -> Kernel:
        return Kernel(triton.jit(**settings)(source))

    return made


def _whole(grid: Sequence[int]) -> tuple[int, ...]:
    """A grid of three axes."""
    return (*grid, *(1,) * (3 - len(grid)))


def _role(parameter: Any) -> Role:
    if parameter.is_constexpr:
        return Role.CONSTANT
    return Role.WIDTH if parameter.do_not_specialize else Role.FULL


def _kind(value: Any, role: Role) -> object:
    """What a binary depends on in a number that is known when it is launched."""
    if not isinstance(value, int):
        return type(value)
    wide = value > _LARGEST_INT32
    return wide if role is Role.WIDTH else (wide, value % _ALIGNMENT == 0, value == 1)
