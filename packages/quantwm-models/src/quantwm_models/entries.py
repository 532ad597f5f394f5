"""What a host of the rolling-dict lineage allocates for a layer: tensors of the cache, and the numbers that say how far it is filled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantwm_models.counter import Counter


class Entries(dict[str, Any]):
    """A layer's dict, in which a whole number that the host sets anew, as at the begin of a video, is a counter again.

    What makes plain dicts of a host's takes nothing away but that.

    >>> entries = Entries()
    >>> entries["end"] = torch.tensor([4])
    >>> entries
    {'end': Counter(4, device='cpu')}
    """

    def __setitem__(self, name: str, value: object) -> None:
        if type(value) is Tensor and not value.is_meta and Counter.serves(value):
            value = Counter(value, value.device).fill_(value)
        super().__setitem__(name, value)


class Attributes(MutableMapping[str, Any]):
    """Attributes of an object, with or without slots, as a dict has its entries.

    >>> entries = Attributes(torch.nn.Linear(2, 3))
    >>> entries["in_features"], "k" in entries
    (2, False)
    >>> entries["in_features"] = 4
    >>> entries["in_features"]
    4
    """

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        slots = (name for kind in type(self.owner).__mro__ for name in getattr(kind, "__slots__", ()))
        return iter([*getattr(self.owner, "__dict__", ()), *(name for name in slots if hasattr(self.owner, name))])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def on_meta(allocate: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, torch.device]:
    """Call an allocator that takes ``device``, on the meta device.

    Returns:
        What it returned, and the device that it was to allocate on.

    >>> on_meta(lambda size, device: torch.zeros(size, device=device), 3, "cpu")
    (tensor(..., device='meta', size=(3,)), device(type='cpu'))
    """
    bound = inspect.signature(allocate).bind(*args, **kwargs)
    bound.apply_defaults()
    device = torch.device(bound.arguments["device"])
    bound.arguments["device"] = torch.device("meta")
    return allocate(*bound.args, **bound.kwargs), device


def materialise(entries: MutableMapping[str, Any], device: torch.device, *, without: Sequence[str] = ()) -> None:
    """Give a dict's tensors on the meta device their memory, zeros as hosts begin with; whole numbers are counters.

    >>> entries = {"k": torch.empty(2, device="meta"), "end": torch.empty(1, dtype=torch.int64, device="meta")}
    >>> materialise(entries, torch.device("cpu"))
    >>> entries
    {'k': tensor([0., 0.]), 'end': Counter(0, device='cpu')}
    """
    for name, entry in list(entries.items()):
        if isinstance(entry, Tensor) and entry.is_meta and name not in without:
            serves = Counter.serves(entry)
            entries[name] = Counter(entry, device) if serves else torch.zeros_like(entry, device=device)
