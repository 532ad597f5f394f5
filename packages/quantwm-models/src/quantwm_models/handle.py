"""A range of a host's cache tensor that is reconstructed when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantwm_core.chunk import KINDS
from quantwm_core.errors import StateError
from quantwm_core.stream import Span
from quantwm_models.compiling import uncompiled
from quantwm_models.errors import HostAttributeError, HostError

if TYPE_CHECKING:
    from quantwm_models.store import Store

SUPPORTED = "supported: .shape, .dtype, .device, store[:, a:b], store[:, a:b] = tensor, and clone() of what is got"
_BINARY = ("add", "sub", "mul", "truediv", "matmul", "pow")
_ATTENDING = ("query", "key", "value")
OPERATORS = tuple(f"__{each}__" for each in (*_BINARY, *(f"r{each}" for each in _BINARY), "lt", "le", "gt", "ge"))


class Sized:
    """Shape, number format and device, as a tensor tells them."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad = False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Shape, or one number of it."""
        return self.shape if dim is None else self.shape[dim]


class Handle(Sized):
    """A range of a store's slots, reconstructed when it is used.

    As a slice of a tensor does, it shows what the slots hold at the time of use; its :meth:`clone` shows what they held
    at the time of cloning, and must be used before the cache changes. A clone may be written: it then is a tensor of
    its own, and no longer a range of the cache. Any torch function applied to either sees a tensor; PyTorch's attention reads
    keys and values together, in the memory that all reads share, and the cache learns from its queries.

    Args:
        store: Where from.
        slots: Window tokens.
        version: Version of the cache that it was cloned at; None for a range that follows the cache.
        turned: Whether heads come before tokens, ``[B, heads, n, head_dim]``.
    """

    def __init__(self, store: Store, slots: Span, version: int | None = None, *, turned: bool = False) -> None:
        self.store = store
        self.slots = slots
        self.version = version
        self.turned = turned
        self._own: Tensor | None = None
        self.dtype = store.dtype
        self.device = store.device

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # of what is not a tensor yet
        """Sizes of the range."""
        batch, _, heads, channels = self.store.shape
        tokens = self.slots.tokens
        return torch.Size((batch, heads, tokens, channels) if self.turned else (batch, tokens, heads, channels))

    def __repr__(self) -> str:
        kind, layer, shape = self.store.kind, self.store.layer, list(self.shape)
        return f"Handle({kind} of layer {layer}, slots {self.slots.start} to {self.slots.stop}, shape {shape})"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def changed(self) -> bool:
        """Whether this is a clone that was written, and holds what the cache does not."""
        return self._own is not None

    @uncompiled
    def clone(self, **_: object) -> Handle:
        """The same range as it is now."""
        copy = Handle(self.store, self.slots, self.store.halves.cache.version, turned=self.turned)
        copy._own = None if self._own is None else self._own.clone()
        return copy

    def detach(self) -> Handle:
        """The same range; it never records gradients."""
        return self

    def check_current(self) -> None:
        """Refuse a clone that the cache has moved on from.

        Raises:
            StateError: The cache changed since.
        """
        if self.version is not None and self.version != self.store.halves.cache.version:
            raise StateError(f"{self}: the cache changed after this was cloned; use a clone before writing the cache")

    @uncompiled
    def tensor(self) -> Tensor:
        """The range as a tensor of its own, of this shape and in the host's number format.

        Raises:
            RangeError: The slots hold no tokens.
            StateError: Only one half was written yet, or the clone is stale.
        """
        if self._own is not None:
            return self._own
        if not self.slots.tokens:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        pair = read_pair(self, self)
        whole_range = pair[KINDS.index(self.store.kind)].clone()
        return whole_range.transpose(1, 2) if self.turned else whole_range

    @uncompiled
    def transpose(self, dim0: int, dim1: int) -> Any:
        """The same range with heads before tokens, or back; of other dimensions, a tensor."""
        turns = {(1, 2), (1, -2), (-3, 2), (-3, -2)}
        if self.changed or not {(dim0, dim1), (dim1, dim0)} & turns:
            return self.tensor().transpose(dim0, dim1)  # which judges its own dimensions
        return Handle(self.store, self.slots, self.version, turned=not self.turned)

    @uncompiled
    def __getitem__(self, key: object) -> Any:
        """A part of the range, nothing read yet, where only tokens are chosen: ``[:, a:b]``; otherwise a tensor."""
        parts: Any = key if isinstance(key, tuple) and len(key) == 2 else (None, None)
        rows, tokens = parts
        part = takes_all(rows) and isinstance(tokens, slice) and tokens.step in (None, 1)
        if not part or self.changed or self.turned:
            return self.tensor()[key]  # type: ignore[index]  # a tensor judges its own index
        start, stop, _ = tokens.indices(self.slots.tokens)
        begin = self.slots.start + start
        return Handle(self.store, Span(begin, begin + max(0, stop - start)), self.version)

    def __setitem__(self, key: object, value: object) -> None:
        """Write a clone.

        Raises:
            HostError: This is no clone but a range of the cache.
        """
        if self.version is None:
            raise HostError(f"{self} cannot be written; write to the store: {SUPPORTED}")
        self._own = self.tensor()
        self._own[key] = whole(value)  # type: ignore[index]  # a tensor judges its own index

    def __getattr__(self, name: str) -> Any:
        # In-place methods would change a copy and be lost; private names are questions about the class, not the data.
        if name.startswith("_") or name.endswith("_") or not hasattr(Tensor, name):
            raise HostAttributeError(f"a host asked {self!r} for {name!r}; {SUPPORTED}")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply a torch function to the tensors that handles stand for."""
        del types
        if func is scaled_dot_product_attention:
            named = dict(kwargs or {}) | dict(zip(_ATTENDING, args, strict=False))
            tensors = [named.pop(each) for each in _ATTENDING]
            if all(isinstance(each, Handle) and each.turned for each in tensors[1:]):
                return attended(func, *tensors, *whole(args[3:]), **whole(named))
        name = name_of(func)
        inplace = name.endswith("_") and not name.endswith("__")
        if (kwargs and "out" in kwargs) or (inplace and args and isinstance(args[0], Handle)):
            raise HostError(f"a host applied {name} to a range of its cache in place; write to the store: {SUPPORTED}")
        return func(*whole(args), **whole(dict(kwargs or {})))


@uncompiled
def attended(function: Callable[..., Any], q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a host's attention function read a range, and its cache learn from the queries.

    Where keys and values are not both ranges as they lie in the cache, the function just gets tensors.

    Raises:
        StateError, RangeError: As :func:`read_pair`.
    """
    ranges = isinstance(k, Handle) and isinstance(v, Handle) and not (k.changed or v.changed) and k.turned == v.turned
    if not ranges:
        return function(whole(q), whole(k), whole(v), *args, **kwargs)
    keys, values = _read_pair(k, v)
    queries = q if k.turned else q.transpose(1, 2)
    given = (keys, values) if k.turned else (keys.transpose(1, 2), values.transpose(1, 2))
    result = function(q, *given, *args, **kwargs)
    cache = k.store.halves.cache
    cache.observe(queries)
    cache.tell_attended(queries, keys, values, *k.slots)
    return result


def _operator(name: str) -> Callable[[Handle, Any], Any]:
    def apply(handle: Handle, other: Any) -> Any:
        return getattr(handle.tensor(), name)(whole(other))

    return apply


# Set from outside, so that a handle still hashes by what it is.
for _each in (*OPERATORS, "__eq__", "__ne__"):
    setattr(Handle, _each, _operator(_each))


def read_pair(keys: Handle, values: Handle) -> tuple[Tensor, Tensor]:
    """Keys and values of one range of one layer, ``[B, n, heads, head_dim]``, in the memory that all reads share.

    Whether the handles are turned does not matter.

    Raises:
        StateError: The handles are of different layers or ranges, stale, or only one half was written yet.
        RangeError: The slots hold no tokens.
    """
    heads_first = _read_pair(keys, values)
    return heads_first[0].transpose(1, 2), heads_first[1].transpose(1, 2)


def _read_pair(keys: Handle, values: Handle) -> tuple[Tensor, Tensor]:
    """The same as ``[B, heads, n, head_dim]``."""
    if keys.store.halves is not values.store.halves or keys.slots != values.slots:
        raise StateError(f"{keys!r} and {values!r} are not the two halves of one range")
    keys.store.halves.check_whole()
    keys.check_current()
    values.check_current()
    read = keys.store.halves.cache.read(*keys.slots)
    return read if keys.dtype is values.dtype is torch.bfloat16 else (read[0].to(keys.dtype), read[1].to(values.dtype))


def whole(value: Any) -> Any:
    """``value`` with every handle in it, lists and dicts included, replaced by its tensor."""
    if isinstance(value, Handle):
        return value.tensor()
    if isinstance(value, list | tuple):
        return type(value)(whole(item) for item in value)
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def takes_all(part: object) -> bool:
    """Whether a part of an index is ``:``; arrays and tensors would answer ``==`` for each of their numbers.

    >>> takes_all(slice(None)), takes_all(slice(0, None)), takes_all(torch.arange(2))
    (True, False, False)
    """
    return isinstance(part, slice) and part.start is part.stop is part.step is None


def name_of(func: Callable[..., Any]) -> str:
    """What a torch function is called."""
    return getattr(func, "__name__", repr(func))
