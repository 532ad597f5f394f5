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

from quantwm_kernels.launch import interpreted

_ALIGNMENT = 16
_LARGEST_INT32 = 2**31 - 1


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
        self._looked_at = [_kept if each.is_constexpr else _look(each) for each in getattr(function, "params", ())]
        self._binaries: dict[tuple[object, ...], Any] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, tuple(grid))

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if interpreted():
            self.function[grid](*arguments, **options)
            return
        looks = map(_applied, self._looked_at, arguments)
        key = (torch.cuda.current_device(), *options.items(), *looks)
        binary = self._binaries.get(key)
        if binary is None:
            self._binaries[key] = self.function[grid](*arguments, **options)
            return
        names = self.function.arg_names[len(arguments) :]
        addresses = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        binary[grid + (1,) * (3 - len(grid))](*addresses, *(options[name] for name in names))


def kernel(**settings: Any) -> Callable[[Callable[..., None]], Kernel]:
    """:func:`triton.jit` with ``settings``, as a :class:`Kernel`."""

    def made(source: Callable[..., None]) -> Kernel:
        return Kernel(triton.jit(**settings)(source))

    return made


def _applied(look: Callable[[Any], object], value: Any) -> object:
    return look(value)


def _kept(value: Any) -> object:
    """A compile-time argument is itself what a binary depends on."""
    return value


def _look(parameter: Any) -> Callable[[Any], object]:
    """What a binary depends on in a run-time argument."""
    return _width if parameter.do_not_specialize else _look_at


def _look_at(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % _ALIGNMENT == 0
    if isinstance(value, int):
        return value % _ALIGNMENT == 0, value == 1, value > _LARGEST_INT32
    return type(value)


def _width(value: Any) -> object:
    return value > _LARGEST_INT32 if isinstance(value, int) else type(value)
