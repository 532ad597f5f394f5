"""Letting a host's attention function read from a cache, and learning from the queries that pass it.

A host of the rolling-dict lineage attends in a function that ``forward`` looks up in its module at call time. What is
put in its place understands ranges of a store, and hands everything else on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.handle import Handle, read_pair, whole
from quantwm_models.store import Store


class _Attention:
    """Attention function of a module that understands handles.

    Attributes:
        original: The host's function.
        users: Attachments that rely on it.
        current: Caches of the layers that are running, innermost last, where a host assembles what it attends to; None
            is a layer that was called without one of ours, as in training.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.users = 0
        self.current: list[LayerCache | None] = []

    @uncompiled
    def __call__(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(k, Handle) and isinstance(v, Handle) and not (k.changed or v.changed):
            return self._read(q, k, v, *args, **kwargs)
        result = self.original(q, whole(k), whole(v), *args, **kwargs)
        cache = self.current[-1] if self.current else None
        if cache is not None:
            cache.observe(q.transpose(1, 2))
        return result

    def _read(self, q: Tensor, k: Handle, v: Handle, *args: Any, **kwargs: Any) -> Any:
        keys, values = read_pair(k, v)
        result = self.original(q, keys, values, *args, **kwargs)
        cache = k.store.halves.cache
        queries = q.transpose(1, 2)
        cache.observe(queries)
        cache.tell_attended(queries, keys.transpose(1, 2), values.transpose(1, 2), *k.slots)
        return result


@contextmanager
def attention_replaced(module: ModuleType, name: str) -> Iterator[_Attention]:
    """Replace a module's attention function while at least one attachment needs it."""
    found = getattr(module, name)
    if not isinstance(found, _Attention):
        found = _Attention(found)
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
def running_layer_known(layer: nn.Module, attention: _Attention) -> Iterator[None]:
    """Let the attention function know whose queries it sees, where the host assembles keys and values itself."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = (_cache_in(argument) for argument in (*args, *kwargs.values()))
        attention.current.append(next((cache for cache in found if cache is not None), None))

    def leave(*_: object) -> None:
        attention.current.pop()

    with ExitStack() as stack:
        for handle in (
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave, always_call=True),
        ):
            stack.callback(handle.remove)
        yield


def _cache_in(argument: object) -> LayerCache | None:
    """The cache behind a layer's dict."""
    store = argument.get("k") if isinstance(argument, dict) else None
    return store.halves.cache if isinstance(store, Store) else None
