"""Keeping the cache's bookkeeping out of graphs that a host compiles.

The compiler would trace it into the host's graph, and anew for each chunk.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch


class _Inside(threading.local):
    """Whether this thread is in a function that is not compiled."""

    now = False


_inside = _Inside()
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def uncompiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``torch.compiler.disable``, without importing the compiler, which takes a second, where nothing is compiled.

    >>> uncompiled(abs)(-3)
    3
    """
    disabled: list[Callable[_Arguments, _Result]] = []

    def inside(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        before, _inside.now = _inside.now, True
        try:
            return function(*args, **kwargs)
        finally:
            _inside.now = before

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if _inside.now:  # what is uncompiled calls no compiled code
            return function(*args, **kwargs)
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(cast("Callable[_Arguments, _Result]", torch.compiler.disable(inside)))
        return disabled[0](*args, **kwargs)

    return run
