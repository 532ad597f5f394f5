"""What a host sees in place of its cache tensors: ranges that are read when they are used, writes that are noticed.

A host of the rolling-dict lineage does four things with a ``[B, tokens, heads, head_dim]`` cache tensor: it asks for
``.shape``, sets ``tensor[:, a:b]``, gets ``tensor[:, a:b]``, and clones what it got. :class:`Store` does these,
:class:`Handle` is what it gets: a range that nothing was reconstructed for yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantwm_core.chunk import Kind
from quantwm_core.errors import QuantWMError, ShapeError
from quantwm_core.stream import Span
from quantwm_kernels.bridge import check_detached
from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.errors import HostAttributeError, HostError, located
from quantwm_models.geometry import Geometry
from quantwm_models.halves import Halves, Roll, Write
from quantwm_models.handle import OPERATORS, SUPPORTED, Handle, Sized, name_of, takes_all


class Store(Sized):
    """One half of a layer's cache, keys or values, in place of a host's tensor.

    Args:
        halves: The layer; its other half has a store of its own.
        kind: Which half this is.
        shape: ``[B, tokens, heads, head_dim]`` of the host's tensor. The second bounds the slots; memory is taken by the
            chunk.
        dtype: Number format that the host expects to get; stored is BF16.
        device: Where the host expects it.

    >>> keys, values = pair(LayerCache("bf16"), (1, 512, 2, 64))
    >>> chunk = torch.ones(1, 256, 2, 64, dtype=torch.bfloat16)
    >>> keys[:, 0:256] = chunk
    >>> values[:, 0:256] = chunk
    >>> keys[:, 16:48]
    Handle(keys of layer 0, slots 16 to 48, shape [1, 32, 2, 64])
    >>> bool((torch.cat([keys[:, :256], chunk], dim=1) == 1).all())
    True
    """

    def __init__(
        self, halves: Halves, kind: Kind, shape: Iterable[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.halves = halves
        self.kind = kind
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = device
        if len(self.shape) != 4:
            raise ShapeError(f"a host's cache tensor of shape {list(self.shape)}: need [B, tokens, heads, head_dim]")

    @property
    def layer(self) -> int:
        """Number of the layer."""
        return self.halves.cache.layer

    def __repr__(self) -> str:
        return f"Store({self.kind} of layer {self.layer}, shape {list(self.shape)})"

    def __len__(self) -> int:
        return self.shape[0]

    @uncompiled
    def __getitem__(self, key: object) -> Handle:
        """Range of slots; nothing is read yet."""
        return Handle(self, self._slots(key))

    @uncompiled
    def __setitem__(self, key: object, value: object) -> None:
        """Write a chunk, or roll the window.

        Raises:
            HostError: The index or the value is of a kind that the store does not support.
            ShapeError: The value does not fit the slots.
            QuantWMError: The cache refuses it.
        """
        try:
            operation = self._operation(self._slots(key), value)
        except QuantWMError:
            self.halves.drop()  # a host that tries again begins with its keys: the old ones must not wait for the new values
            raise
        self.halves.put(self.kind, operation)

    def _operation(self, slots: Span, value: object) -> Roll | Write:
        """What an assignment to ``slots`` means."""
        if isinstance(value, Handle) and value.store is self and not (value.changed or value.turned):
            if value.slots.tokens != slots.tokens:
                raise ShapeError(f"{self}: {value} does not fit slots {slots.start} to {slots.stop}")
            value.check_current()
            return Roll(slots, value.slots)
        tensor = value.tensor() if isinstance(value, Handle) else value
        if not isinstance(tensor, Tensor):
            raise HostError(
                f"{self}: slots {slots.start} to {slots.stop} were set to a {type(value).__name__}; {SUPPORTED}"
            )
        check_detached(tensor, f"layer {self.layer}, {self.kind}")
        batch, _, heads, channels = self.shape
        if tuple(tensor.shape) != (batch, slots.tokens, heads, channels):
            raise ShapeError(
                f"{self}: slots {slots.start} to {slots.stop} were set to a tensor of shape {list(tensor.shape)}, "
                f"need {[batch, slots.tokens, heads, channels]}"
            )
        # The host may reuse its memory before the other half comes. Keys and values laid out alike are sealed together as they lie.
        return Write(slots, tensor.clone(memory_format=torch.contiguous_format).transpose(1, 2))

    def detach(self) -> Store:
        """Itself; it never records gradients."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise HostAttributeError(f"a host asked {self.__class__.__name__} for {name!r}; {SUPPORTED}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """No torch function takes a whole cache."""
        del types, args, kwargs
        raise HostError(f"a host applied {name_of(func)} to a whole cache store; index it first: {SUPPORTED}")

    def _slots(self, key: object) -> Span:
        """Slots that an index names."""
        parts = key if isinstance(key, tuple) and len(key) > 1 else (key, None)
        if len(parts) > 2 or parts[0] is Ellipsis:
            parts = _spelled_out(parts)
        first, wanted, *others = parts
        if len(others) > 2 or not (isinstance(wanted, slice) and takes_all(first) and all(map(takes_all, others))):
            raise HostError(f"{self}: index {key!r}; {SUPPORTED}")
        try:
            start, stop, step = wanted.indices(self.shape[1])  # which takes whatever has an index, tensors of one too
        except (TypeError, ValueError) as error:
            raise HostError(f"{self}: index {key!r}; bounds must be integers or tensors of one; {SUPPORTED}") from error
        if step != 1:
            raise HostError(f"{self}: index {key!r}; {SUPPORTED}")
        return Span(start, max(start, stop))


def _spelled_out(parts: tuple[object, ...]) -> tuple[object, ...]:
    """An index of four dimensions, its Ellipsis written as the slices that it stands for."""
    place = next((place for place, part in enumerate(parts) if part is Ellipsis), None)
    if place is None:
        return parts
    return (*parts[:place], *(slice(None),) * (5 - len(parts)), *parts[place + 1 :])


def pair(
    cache: LayerCache,
    shape: Iterable[int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    value_shape: Iterable[int] | None = None,
) -> tuple[Store, Store]:
    """Stores for the keys and the values of one layer.

    Args:
        cache: What holds both.
        shape: ``[B, tokens, heads, head_dim]`` of the host's key tensor.
        dtype: Number format that the host expects to read.
        device: Where.
        value_shape: Shape of the value tensor, if it differs.

    Raises:
        ShapeError: A shape is of another rank, or of heads that the cache's method is not for.
        ParameterError: A setting of the cache's scheme does not fit the heads.
    """
    halves, sizes, where = Halves(cache), torch.Size(shape), torch.device(device)
    keys = Store(halves, "keys", sizes, dtype, where)
    values = Store(halves, "values", sizes if value_shape is None else value_shape, dtype, where)
    with located(f"layer {cache.layer}"):
        cache.scheme.check_channels(keys.shape[3], values.shape[3])
    cache.expected = Geometry(sizes[0], sizes[2], sizes[3], values.shape[3], where)
    return keys, values


def _no_arithmetic(store: Store, *_: object) -> Any:
    raise HostError(f"{store}: a host calculated with a whole cache store; index it first: {SUPPORTED}")


for _each in (*OPERATORS, "__neg__", "__abs__"):
    setattr(Store, _each, _no_arithmetic)
