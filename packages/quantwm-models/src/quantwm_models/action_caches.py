"""Caches of Matrix-Game's action modules, which hosts allocate for layers that have no use for them, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quantwm_models.entries import materialise, on_meta


class ActionCaches:
    """The host's allocator, sparing layers without an action module, or without the half of it that a cache is for.

    Args:
        allocate: The allocator; it takes ``device``.
        actions: Each layer's action module, or None.
        lists: Of what the allocator returned, which attribute enables a cache, and the list of it, a dict for each layer.

    >>> import torch
    >>> def allocate(device):
    ...     return [{half: torch.empty(2, 3, device=device) for half in "kv"} for _ in range(2)]
    >>> spared = ActionCaches(allocate, [torch.nn.Identity(), None], lambda made: [("enable_mouse", made)])
    >>> [entries["k"].shape for entries in spared(device="cpu")]
    [torch.Size([2, 3]), torch.Size([0, 3])]
    """

    def __init__(
        self,
        allocate: Callable[..., Any],
        actions: Sequence[Any],
        lists: Callable[[Any], Iterable[tuple[str, Iterable[Any]]]],
    ) -> None:
        self.allocate = allocate
        self.actions = actions
        self.lists = lists

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Allocate."""
        result, device = on_meta(self.allocate, *args, **kwargs)
        for enabled, layers in self.lists(result):
            # The host allocates for as many layers as the released models have.
            for action, entries in itertools.zip_longest(self.actions, layers):
                if action is None or not getattr(action, enabled, True):
                    entries.update((half, entries[half][:0]) for half in ("k", "v"))
                materialise(entries, device)
        return result
