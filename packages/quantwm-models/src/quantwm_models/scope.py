"""Where a layer's cache works: errors say which layer, and what would fit where memory ran out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from quantwm_kernels.launch import one_of
from quantwm_models.errors import located
from quantwm_models.memory import explained


class LayerScope:
    """A context that names the layer in errors, advises where memory runs out, and launches as one of the layer's ranks.

    It costs next to nothing without an error: hosts that wait for every layer wait for its cache, too. A layer has one for all
    that it does, also inside of what it does.

    Args:
        layer: Number for messages.
        advise: What would fit; asked only where memory ran out.

    Attributes:
        ranks: See :attr:`quantwm_models.LayerCache.ranks`.

    >>> import torch
    >>> with LayerScope(3, lambda: "a window of 64 tokens would fit"):
    ...     raise torch.OutOfMemoryError("CUDA out of memory")
    Traceback (most recent call last):
    ...
    quantwm_models.errors.CacheMemoryError: layer 3: out of memory, and the cache is as it was: a window of 64 tokens would fit
    """

    def __init__(self, layer: int, advise: Callable[[], str]) -> None:
        self.ranks = 1
        self._layer = layer
        self._advise = advise
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        if self.ranks != 1:
            self._entered.append(one_of(self.ranks))
            self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            self._entered.pop().__exit__(kind, error, trace)
        if error is not None:
            with located(f"layer {self._layer}"), explained(self._advise):
                raise error
