"""Letting a host's attention function read from a cache, and learning from the queries that pass it.

A host of the rolling-dict lineage attends in a function that ``forward`` looks up in its module at call time. What is
put in its place understands ranges of a store, and hands everything else on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.handle import Handle, attended, whole
from quantwm_models.store import Store

Kept = TypeVar("Kept", bound="Replacement")


class Replacement:
    """A host's function with something of ours around it.

    Attributes:
        original: The host's function.
        users: Attachments that rely on it.
        watching: Who is told of the queries that pass while a layer runs, innermost last, where the arguments do not say
            whose they are; None is a layer without a cache of ours, as in training.
    """

    def __init__(self, original: Callable[..., Any], watching: list[Any] | None = None) -> None:
        self.original = original
        self.users = 0
        self.watching: list[Any] = [] if watching is None else watching

    @property
    def watcher(self) -> Any:
        """The innermost, or None."""
        return self.watching[-1] if self.watching else None


class Attention(Replacement):
    """Attention function of a module that understands handles."""

    @uncompiled
    def __call__(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        """Attend, ranges of a store reconstructed."""
        if isinstance(k, Handle) and isinstance(v, Handle) and not (k.changed or v.changed or k.turned or v.turned):
            return attended(self.original, q, k, v, *args, **kwargs)
        result = self.original(q, whole(k), whole(v), *args, **kwargs)
        if self.watcher is not None:
            self.watcher(q)
        return result


@contextmanager
def function_replaced(module: ModuleType, name: str, kind: type[Kept]) -> Iterator[Kept]:
    """Replace a module's function while at least one attachment needs it."""
    found = getattr(module, name)
    if not isinstance(found, kind):
        found = kind(found)
        setattr(module, name, found)
    found.users += 1
    try:
        yield found
    finally:
        found.users -= 1
        # A function that someone else put in place since is theirs to take away; ours below it passes tensors on.
        if not found.users and getattr(module, name) is found:
            setattr(module, name, found.original)


@contextmanager
def running_layer_known(layer: nn.Module, watching: list[Any]) -> Iterator[None]:
    """Let attention know whose queries it sees, by its list of watchers, where the host assembles keys and values itself."""

    @uncompiled
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = (_cache_in(argument) for argument in (*args, *kwargs.values()))
        cache = next((cache for cache in found if cache is not None), None)
        watching.append(None if cache is None else lambda q: cache.observe(q.transpose(1, 2)))

    @uncompiled
    def leave(*_: object) -> None:
        watching.pop()

    with ExitStack() as stack:
        for handle in (
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave, always_call=True),
        ):
            stack.callback(handle.remove)
        yield


def _cache_in(argument: object) -> LayerCache | None:
    """The cache behind what a layer is given: a dict, or an object with attributes."""
    store = argument.get("k") if isinstance(argument, dict) else getattr(argument, "k", None)
    return store.halves.cache if isinstance(store, Store) else None
