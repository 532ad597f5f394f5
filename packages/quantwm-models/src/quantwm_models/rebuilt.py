"""A layer's cache for hosts that build it anew as a whole, and then read it unchanged many times.

Such a host makes keys and values of its whole history in one pass, passes them around as two tensors
``[B, H, N, D]``, and moves them to where they are needed before each read. :class:`Sealed` takes a tensor's place: moving
it reconstructs it, for that one read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantwm_core.chunk import KINDS, Kind
from quantwm_core.errors import StateError
from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.errors import HostAttributeError
from quantwm_models.offload import Offload


class Sealed:
    """Keys or values of a layer's history, in place of a tensor ``[B, H, N, D]``.

    Args:
        cache: What holds both.
        kind: Which half this is.
        dtype: Number format that the host expects.
        offload: Host memory that the history moves to when the host moves it away.
    """

    def __init__(self, cache: LayerCache, kind: Kind, dtype: torch.dtype, offload: Offload | None = None) -> None:
        self.cache = cache
        self.offload = offload
        self.kind = kind
        self.dtype = dtype
        self.version = cache.version

    def __repr__(self) -> str:
        return f"Sealed({self.kind} of layer {self.cache.layer}, {self.cache.tokens} tokens)"

    def contiguous(self) -> Sealed:
        """Itself; the host tidies what it is about to keep."""
        return self

    @uncompiled
    def cpu(self) -> Sealed:
        """Itself, its history moved to host memory, packed, if there is an ``offload`` for it."""
        if self.offload is not None and self.version == self.cache.version:
            self.cache.store_in(self.offload)
        return self

    def to(self, device: torch.device | str) -> Tensor:
        """As :meth:`tensor`, where it is needed."""
        return self.tensor().to(device)

    @uncompiled
    def tensor(self) -> Tensor:
        """The tensor, ``[B, H, N, D]``, in memory that all reads share, valid until the next read of any layer.

        Raises:
            StateError: The history was built anew since.
        """
        if self.version != self.cache.version:
            raise StateError(f"{self}: the history was built anew since this one was handed out")
        read = self.cache.read()[KINDS.index(self.kind)]
        return read.to(self.dtype)

    def __getattr__(self, name: str) -> Any:
        raise HostAttributeError(
            f"a host asked {self.__class__.__name__} for {name!r}; supported: contiguous(), cpu(), to(device)"
        )


def rebuild(
    cache: LayerCache,
    keys: Tensor,
    values: Tensor,
    queries: Tensor | None,
    tokens: Sequence[int],
    offload: Offload | None = None,
) -> tuple[Sealed, Sealed]:
    """Seal a history, one unit after the other, each with the queries of those before it and of earlier histories.

    Args:
        cache: What takes it; what it held is forgotten, but not the statistics.
        keys, values: ``[B, H, N, D]``.
        queries: What the history asked while it was built, ``[B, H, N, D]``, if anybody wants to know.
        tokens: Tokens of each unit, ``N`` in all.
        offload: Host memory for a history that the host moves away.

    Returns:
        What takes the place of the two tensors.

    Raises:
        QuantWMError: As :meth:`quantwm_models.cache.LayerCache.rebuild`; the cache is still what it was then.

    >>> history = torch.randn(3, 1, 2, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    >>> cache = LayerCache("quantwm")
    >>> rebuild(cache, *history, tokens=[32, 32])
    (Sealed(keys of layer 0, 64 tokens), Sealed(values of layer 0, 64 tokens))
    >>> ["basis" in chunk.keys.arrays for chunk in cache.chunks]
    [False, True]
    >>> sealed = rebuild(cache, *history, tokens=[64])
    >>> ["basis" in chunk.keys.arrays for chunk in cache.chunks]
    [True]
    """
    cache.rebuild(keys, values, queries, tokens)
    return Sealed(cache, "keys", keys.dtype, offload), Sealed(cache, "values", values.dtype, offload)
