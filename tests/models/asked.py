"""Who looks on while a host attends, and holds what is read against what was sealed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantwm_core.stream import Span
from quantwm_models.cache import LayerCache
from quantwm_models.observer import CacheObserver


class Asked(CacheObserver):
    """Compares every read of a history with its exact tokens.

    Attributes:
        same: Of every call, whether keys and values were read as they had been shown when they were sealed.
        logits: Of every call, the scaled logits ``[B, H, T, N]``.
    """

    def __init__(self) -> None:
        self.exact: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        self.same: list[bool] = []
        self.logits: list[Tensor] = []

    def sealed(self, cache: LayerCache, chunk: Any, keys: Tensor, values: Tensor) -> None:
        """Keep a unit."""
        self.exact.setdefault(cache, []).append((keys.clone(), values.clone()))

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        """Forget all units: such hosts make their history anew."""
        self.exact.pop(cache, None)

    def attended(self, cache: LayerCache, queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> None:
        """Compare."""
        exact = [torch.cat(half, 2) for half in zip(*self.exact[cache], strict=True)]
        self.same.append(all(map(torch.equal, (keys, values), exact)))
        self.logits.append(queries.float() @ keys.float().mT * keys.shape[-1] ** -0.5)
        assert keys.shape[2] == sum(span.tokens for span in spans)
