"""Letting a host's attention function read from a cache, and learning from the queries that pass it.

A host of the rolling-dict lineage attends in a function that ``forward`` looks up in its module at call time. What is
put in its place understands ranges of a store, and hands everything else on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.handle import Handle, attended, whole
from quantwm_models.store import Store

Kept = TypeVar("Kept", bound="Replacement")


class Watching:
    """Who is told of what passes a function while a layer runs, where the arguments do not say whose it is.

    Several attachments share it. Each takes away what is its own and nothing else, also when it is detached while one of
    its layers runs, or when a layer failed before it could enter. A thread is told of what passes in itself.

    >>> watching, (mine, other) = Watching(), ("mine", "other")
    >>> for owner in (mine, other, mine):
    ...     watching.enter(owner, f"of {owner}")
    >>> watching.leave(mine)
    >>> watching.innermost
    'of other'
    >>> watching.forget(other)
    >>> watching.innermost
    'of mine'
    """

    def __init__(self) -> None:
        # Owners and watchers of each thread in which a layer runs, innermost last.
        self._threads: dict[int, list[tuple[object, Any]]] = {}

    @property
    def innermost(self) -> Any:
        """Who entered last; None where nobody did, or for a layer without a cache of ours, as in training."""
        entered = self._threads.get(get_ident())
        return entered[-1][1] if entered else None

    def enter(self, owner: object, watcher: Any) -> None:
        """A layer of the owner begins to run."""
        self._threads.setdefault(get_ident(), []).append((owner, watcher))

    def note(self, watcher: Any) -> None:
        """Put another in the place of the innermost, if there is one."""
        entered = self._threads.get(get_ident())
        if entered:
            entered[-1] = (entered[-1][0], watcher)

    def leave(self, owner: object) -> None:
        """The layer that the owner entered last is done; nothing happens if it entered none."""
        entered = self._threads.get(get_ident(), [])
        for place in reversed(range(len(entered))):
            if entered[place][0] is owner:
                del entered[place]
                break
        if not entered:
            self._threads.pop(get_ident(), None)

    def forget(self, owner: object) -> None:
        """The owner does not watch any more, though a layer of its may still run, in whichever thread."""
        for entered in list(self._threads.values()):
            entered[:] = [each for each in entered if each[0] is not owner]


class Replacement:
    """A host's function with something of ours around it.

    Attributes:
        original: The host's function.
        users: Attachments that rely on it.
        watching: Who is told of the queries that pass.
    """

    def __init__(self, original: Callable[..., Any], watching: Watching | None = None) -> None:
        self.original = original
        self.users = 0
        self.watching = Watching() if watching is None else watching


class Attention(Replacement):
    """Attention function of a module that understands handles."""

    @uncompiled
    def __call__(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        """Attend, ranges of a store reconstructed."""
        if isinstance(k, Handle) and isinstance(v, Handle) and not (k.changed or v.changed or k.turned or v.turned):
            return attended(self.original, q, k, v, *args, **kwargs)
        result = self.original(q, whole(k), whole(v), *args, **kwargs)
        watcher = self.watching.innermost
        if watcher is not None:
            watcher(q)
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
def running_layer_known(layer: nn.Module, watching: Watching) -> Iterator[None]:
    """Let attention know whose queries it sees, where the host assembles keys and values itself."""
    owner = object()

    @uncompiled
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = (_cache_in(argument) for argument in (*args, *kwargs.values()))
        cache = next((cache for cache in found if cache is not None), None)
        watching.enter(owner, None if cache is None else lambda q: cache.observe(q.transpose(1, 2)))

    @uncompiled
    def leave(*_: object) -> None:
        watching.leave(owner)

    with ExitStack() as stack:
        stack.callback(watching.forget, owner)
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
