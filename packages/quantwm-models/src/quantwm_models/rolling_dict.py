"""Hosts that keep a dict per layer with tensors ``k`` and ``v`` ``[B, tokens, heads, head_dim]`` that roll.

CausVid, Self-Forcing and what descends from them allocate the dicts in one method and attend in one function, which
``forward`` looks up in its module at call time. Both are replaced, from outside: the method, so that the dicts hold
stores instead of tensors, and the function, so that it understands their ranges. Adapters say what these are called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_models.cache import LayerCache
from quantwm_models.errors import HostError
from quantwm_models.handle import Handle, read_pair
from quantwm_models.store import pair
from quantwm_models.workspace import Workspace

_ABSENT = object()


class MakeCache(Protocol):
    """Makes the cache of a layer; a later cache of the same branch and layer takes the place of an earlier one."""

    def __call__(
        self, layer: int, *, branch: str = "", sink: int = 0, workspace: Workspace | None = None
    ) -> LayerCache:
        """Make it.

        Args:
            layer: Number of the layer.
            branch: Which of several caches of a host this is, such as the one for negative prompts.
            sink: First tokens that the host never evicts.
            workspace: Memory for reads, shared by the layers of a host.
        """


@dataclass(frozen=True)
class RollingDict:
    """What a host of this lineage calls its parts.

    Attributes:
        pipeline: The live object that allocates.
        modules: Modules whose global function attends to the cache.
        allocator: The pipeline's method that makes the dicts; it takes ``device``.
        attention: Name of the function, ``(q, k, v, ...)`` on ``[B, tokens, heads, head_dim]``.
        lists: Attributes of the pipeline that hold the lists of dicts, where the method does not return them.
        sink: Tells the sink's tokens at the time of allocation.
    """

    pipeline: Any
    modules: Sequence[ModuleType]
    allocator: str = "_initialize_kv_cache"
    attention: str = "attention"
    lists: tuple[str, ...] = ()
    sink: Callable[[], int] = lambda: 0


def module_of(instance: object) -> ModuleType:
    """Module that defines a live object's class; hosts share top-level names, so it is never imported by name.

    >>> module_of(Workspace()).__name__
    'quantwm_models.workspace'
    """
    return sys.modules[type(instance).__module__]


def hook(host: RollingDict, make_cache: MakeCache) -> Callable[[], None]:
    """Put caches under a host.

    Returns:
        What undoes it; calling it twice does no harm.

    Raises:
        HostError: The host lacks a part; nothing is changed then.
        StateError: It has a cache under it already.
    """
    allocate = getattr(host.pipeline, host.allocator, None)
    if isinstance(allocate, _Allocator):
        raise StateError(f"{type(host.pipeline).__qualname__}: a cache is attached already; detach it first")
    if not callable(allocate) or "device" not in inspect.signature(allocate).parameters:
        raise HostError(
            f"{type(host.pipeline).__qualname__}: need a method {host.allocator}(..., device), found {allocate!r}"
        )
    for module in host.modules:
        if not callable(getattr(module, host.attention, None)):
            raise HostError(f"module {module.__name__}: need a function {host.attention!r}, which is not there")
    workspace, stack = Workspace(token_major=True), ExitStack()
    try:
        for name in host.lists:
            # A list from before would be used again, and the allocator would never be asked.
            stack.enter_context(_attribute(host.pipeline, name, None))
        stack.enter_context(
            _attribute(host.pipeline, host.allocator, _Allocator(host, allocate, make_cache, workspace))
        )
        for module in host.modules:
            stack.enter_context(_attention(module, host.attention))
    except BaseException:
        stack.close()
        raise
    return stack.close


class _Allocator:
    """The host's allocator, run where tensors take no memory, and its cache tensors replaced."""

    def __init__(
        self, host: RollingDict, allocate: Callable[..., Any], make_cache: MakeCache, workspace: Workspace
    ) -> None:
        self.host = host
        self.allocate = allocate
        self.make_cache = make_cache
        self.workspace = workspace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        host = self.host
        bound = inspect.signature(self.allocate).bind(*args, **kwargs)
        bound.apply_defaults()
        device = torch.device(bound.arguments["device"])
        bound.arguments["device"] = torch.device("meta")
        result = self.allocate(*bound.args, **bound.kwargs)
        lists = {"": result} if result is not None else {name: getattr(host.pipeline, name) for name in host.lists}
        sink = host.sink()
        for branch, layers in lists.items():
            for layer, entries in enumerate(layers):
                cache = self.make_cache(layer, branch=branch, sink=sink, workspace=self.workspace)
                _put_stores(entries, device, cache, self.workspace)
        return result


def _put_stores(entries: dict[str, Any], device: torch.device, cache: LayerCache, workspace: Workspace) -> None:
    """Replace the tensors of one layer's dict; they were allocated on the meta device, for their shapes."""
    for name in ("k", "v"):
        if not isinstance(entries.get(name), Tensor) or entries[name].ndim != 4:
            raise HostError(
                f"layer {cache.layer}: need a tensor [B, tokens, heads, head_dim] under {name!r}, "
                f"found {type(entries.get(name)).__name__} among {sorted(entries)}"
            )
    keys, values = entries["k"], entries["v"]
    workspace.reserve(keys.shape[1])
    for name, entry in entries.items():
        if isinstance(entry, Tensor) and entry.is_meta:
            # Hosts start their indices at zero.
            entries[name] = torch.zeros_like(entry, device=device)  # overwritten below for k and v
    entries["k"], entries["v"] = pair(cache, keys.shape, keys.dtype, device, values.shape)


class _Attention:
    """Attention function of a module that understands handles; anything else it passes on.

    Attributes:
        original: The host's function.
        users: Attachments that rely on it.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.users = 0

    def __call__(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(k, Handle) and isinstance(v, Handle)):
            return self.original(q, k, v, *args, **kwargs)
        keys, values = read_pair(k, v)
        result = self.original(q, keys, values, *args, **kwargs)
        cache = k.store.halves.cache
        queries = q.transpose(1, 2)
        cache.observe(queries)
        cache.tell_attended(queries, keys.transpose(1, 2), values.transpose(1, 2), *k.slots)
        return result


@contextmanager
def _attention(module: ModuleType, name: str) -> Iterator[None]:
    """Replace a module's attention function while at least one attachment needs it."""
    found = getattr(module, name)
    if not isinstance(found, _Attention):
        found = _Attention(found)
        setattr(module, name, found)
    found.users += 1
    try:
        yield
    finally:
        found.users -= 1
        # A function that someone else put in place since is theirs to take away; ours below it passes tensors on.
        if not found.users and getattr(module, name) is found:
            setattr(module, name, found.original)


@contextmanager
def _attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an instance's attribute and give it back what it had, or lacked."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
