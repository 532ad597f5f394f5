"""Changing a live host from outside, for a while: attributes that come back, functions found where they are looked up."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from quantwm_core.errors import StateError
from quantwm_models.errors import HostError

_ABSENT = object()
# Attributes that are replaced at the moment, by owner's identity; a replacement keeps its owner alive.
_replaced: set[tuple[int, str]] = set()


class Setting(NamedTuple):
    """An attribute that a host's object has while a cache is attached."""

    owner: Any
    name: str
    value: object


@contextmanager
def restored(owner: object, name: str) -> Iterator[None]:
    """Give an instance's attribute back what it had, or lacked, whatever happens to it inside.

    >>> setting = Setting(type("Host", (), {})(), "window", 3)
    >>> with restored(setting.owner, "window"):
    ...     setting.owner.window = 4
    >>> vars(setting.owner)
    {}
    """
    before = vars(owner).get(name, _ABSENT)
    try:
        yield
    finally:
        if before is not _ABSENT:
            setattr(owner, name, before)
        elif name in vars(owner):
            delattr(owner, name)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an instance's attribute for a while.

    Raises:
        StateError: It is set already: whoever left first would bring back what the other had set.
    """
    place = (id(owner), name)
    if place in _replaced:
        raise StateError(
            f"{type(owner).__qualname__}.{name} is set by another attachment, under a host that shares the object; "
            "detach that first"
        )
    _replaced.add(place)
    try:
        with restored(owner, name):
            setattr(owner, name, value)
            yield
    finally:
        _replaced.remove(place)


def named(instance: object, *names: str) -> bool:
    """Whether an object's class, or one that it derives from, bears one of the names.

    >>> named(3, "int", "float"), named(True, "int"), named("3", "int")
    (True, True, False)
    """
    return any(kind.__name__ in names for kind in type(instance).__mro__)


def hooked(module: nn.Module, kind: type) -> bool:
    """Whether methods of an object of ``kind`` are among a module's forward hooks.

    >>> class Watch:
    ...     def enter(self, *_): ...
    >>> layer = nn.Identity()
    >>> handle = layer.register_forward_pre_hook(Watch().enter)
    >>> hooked(layer, Watch), hooked(layer, int)
    (True, False)
    """
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())  # noqa: SLF001  # torch shows its hooks nowhere else
    return any(isinstance(getattr(hook, "__self__", None), kind) for hook in hooks)


def attached_already(pipeline: object) -> StateError:
    """What an adapter raises under a host that has a cache under it.

    >>> print(attached_already(3))
    int: a cache is attached already; detach() what attach() returned, or quantwm_models.attached() of the object that it was given
    """
    return StateError(
        f"{type(pipeline).__qualname__}: a cache is attached already; detach() what attach() returned, or quantwm_models.attached() "
        "of the object that it was given"
    )


def module_of(instance: object) -> ModuleType:
    """Module that defines a live object's class; hosts share top-level names, so it is never imported by name.

    >>> module_of(HostError("none")).__name__
    'quantwm_models.errors'
    """
    return sys.modules[type(instance).__module__]


def forward_of(layer: Any) -> FunctionType:
    """The function that runs when a layer is called, below what offloading or sequence parallelism put around it.

    Raises:
        HostError: The layer has none that was written in Python.
    """
    function = inspect.unwrap(getattr(layer, "forward", None) or _lacks(layer, "forward"))
    function = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(function, FunctionType):
        raise HostError(f"{type(layer).__qualname__}: forward is a {type(function).__name__}; need a Python function")
    return function


def called_by(layer: Any, *names: str) -> tuple[ModuleType, str]:
    """Which of several functions a layer's ``forward`` calls by its global name, and the module where it looks it up.

    Raises:
        HostError: It names none of them.
    """
    function = forward_of(layer)
    module = sys.modules[function.__module__]
    for name in names:
        if name in function.__code__.co_names and callable(getattr(module, name, None)):
            return module, name
    raise HostError(
        f"{type(layer).__qualname__}: forward, of module {module.__name__}, calls no function {' or '.join(names)}"
    )


def _lacks(instance: object, name: str) -> Any:
    raise HostError(f"{type(instance).__qualname__}: need .{name}, which is not there")
