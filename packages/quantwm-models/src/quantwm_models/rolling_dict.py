"""Hosts that keep a dict, or an object, per layer with tensors ``k`` and ``v`` ``[B, tokens, heads, head_dim]`` that roll.

CausVid, Self-Forcing and what descends from them allocate the dicts in one method and attend in one function, which
``forward`` looks up in its module at call time. Both are replaced, from outside: the method, so that the dicts hold
stores instead of tensors, and the function, so that it understands their ranges. Adapters say what these are called.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantwm_core.rotary import Turning
from quantwm_models.attention_hook import Attention, Watching, function_replaced, running_layer_known
from quantwm_models.cache import LayerCache
from quantwm_models.entries import Attributes, Entries, materialise, on_meta
from quantwm_models.errors import HostError
from quantwm_models.patching import Setting, attached_already, replaced, restored
from quantwm_models.store import pair
from quantwm_models.workspace import Workspace


class MakeCache(Protocol):
    """Makes the cache of a layer; a later cache of the same branch and layer takes the place of an earlier one."""

    def __call__(
        self,
        layer: int,
        *,
        branch: str = "",
        sink: int = 0,
        workspace: Workspace | None = None,
        rebuilt: bool = False,
        turning: Turning | None = None,
    ) -> LayerCache:
        """Make it.

        Args:
            layer: Number of the layer.
            branch: Which of several caches of a host this is, such as the one for negative prompts.
            sink: First tokens that the host never evicts.
            workspace: Memory for reads, shared by the layers of a host.
            rebuilt: The host builds its cache anew as a whole, so that what is appended at once is a unit.
            turning: How its positions turn queries, where they grow with every frame.
        """


@dataclass(frozen=True)
class RollingDict:
    """What a host of this lineage calls its parts, and what it is told while a cache is attached.

    Attributes:
        pipeline: The live object that allocates.
        modules: Modules whose global function attends to the cache.
        allocator: The pipeline's method that makes the dicts; it takes ``device``.
        attention: Name of the function, ``(q, k, v, ...)`` on ``[B, tokens, heads, head_dim]``.
        attending: Modules that attend when they are called with the same, where that is no global function.
        lists: Attributes of the pipeline that hold the lists of dicts, where the method does not return them.
        branch: Names the list that the method returns.
        sink: Tells the sink's tokens at the time of allocation, given the slots that the host allocates.
        ranks: Tells how many ranks share a layer's heads, given those that are allocated here.
        turning: Tells how positions turn queries, likewise; None where nobody knows.
        slots: Tells the slots that the host sees instead, given those that it allocates; memory is taken by the chunk.
        kept: More attributes of the pipeline that the host sets while it runs, and that are put back.
        settings: What is set while the cache is attached.
        assembling: Self-attention layers that put together themselves what they attend to; they take what is theirs as an
            argument.
    """

    pipeline: Any
    modules: Sequence[ModuleType]
    allocator: str = "_initialize_kv_cache"
    attention: str = "attention"
    attending: Sequence[nn.Module] = ()
    lists: tuple[str, ...] = ()
    branch: Callable[[], str] = lambda: ""
    sink: Callable[[int], int] = lambda _: 0
    ranks: Callable[[int], int] = lambda _: 1
    turning: Callable[[int], Turning | None] = lambda _: None
    slots: Callable[[int], int] = lambda allocated: allocated
    kept: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    assembling: Sequence[nn.Module] = ()


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
        raise attached_already(host.pipeline)
    if not callable(allocate) or "device" not in inspect.signature(allocate).parameters:
        raise HostError(
            f"{type(host.pipeline).__qualname__}: need a method {host.allocator}(..., device), found {allocate!r}"
        )
    for module in host.modules:
        if not callable(getattr(module, host.attention, None)):
            raise HostError(f"module {module.__name__}: need a function {host.attention!r}, which is not there")
    with ExitStack() as stack:
        _enter(stack, host, _Allocator(host, allocate, make_cache))
        return stack.pop_all().close


def _enter(stack: ExitStack, host: RollingDict, allocator: _Allocator) -> None:
    """Change the host; leaving the stack changes it back."""
    for name in host.lists:
        # A list from before would be used again, and the allocator would never be asked.
        stack.enter_context(replaced(host.pipeline, name, None))
    for name in host.kept:
        stack.enter_context(restored(host.pipeline, name))
    for setting in host.settings:
        stack.enter_context(replaced(*setting))
    stack.enter_context(replaced(host.pipeline, host.allocator, allocator))
    watching = Watching()  # one for all modules, of which one runs at a time
    for layer in host.attending:
        stack.enter_context(replaced(layer, "forward", Attention(layer.forward, watching)))
    functions = [stack.enter_context(function_replaced(each, host.attention, Attention)) for each in host.modules]
    for watched in (watching, *(function.watching for function in functions)):
        for layer in host.assembling:
            stack.enter_context(running_layer_known(layer, watched))


class _Allocator:
    """The host's allocator, run where tensors take no memory, and its cache tensors replaced."""

    def __init__(self, host: RollingDict, allocate: Callable[..., Any], make_cache: MakeCache) -> None:
        self.host = host
        self.allocate = allocate
        self.make_cache = make_cache
        self.workspaces: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        host = self.host
        result, device = on_meta(self.allocate, *args, **kwargs)
        lists = (
            {host.branch(): result}
            if result is not None
            else {name: getattr(host.pipeline, name) for name in host.lists}
        )
        for branch, layers in lists.items():
            for layer, entries in enumerate(layers):
                if isinstance(entries, dict):
                    layers[layer] = Entries(entries)
                self._put_stores(layer, branch, layers[layer], device)
        return result

    def _put_stores(self, layer: int, branch: str, held: object, device: torch.device) -> None:
        """Replace the tensors of one layer; they were allocated on the meta device, for their shapes."""
        entries = held if isinstance(held, dict) else Attributes(held)
        for name in ("k", "v"):
            if not isinstance(entries.get(name), Tensor) or entries[name].ndim != 4:
                raise HostError(
                    f"layer {layer}: need a tensor [B, tokens, heads, head_dim] under {name!r}, "
                    f"found {type(entries.get(name)).__name__} among {sorted(entries)}"
                )
        keys, values = entries["k"], entries["v"]
        sink, slots = self.host.sink(keys.shape[1]), self.host.slots(keys.shape[1])
        workspace = self._workspace()
        workspace.reserve(slots)
        materialise(entries, device, without=("k", "v"))
        turning = self.host.turning(keys.shape[1])
        cache = self.make_cache(layer, branch=branch, sink=sink, workspace=workspace, turning=turning)
        cache.ranks = self.host.ranks(keys.shape[2])
        shapes = ((each.shape[0], slots, *each.shape[2:]) for each in (keys, values))
        entries["k"], entries["v"] = pair(cache, next(shapes), keys.dtype, device, next(shapes))

    def _workspace(self) -> Workspace:
        """Memory for reads of the caches that the calling thread asks for; it lives as long as they do."""
        made = self.workspaces.get(threading.get_ident())
        if made is None:
            made = self.workspaces[threading.get_ident()] = Workspace(token_major=True)
        return made
