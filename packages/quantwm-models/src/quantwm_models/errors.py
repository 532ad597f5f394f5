"""What can go wrong between a host and the cache under it, as types, and where it did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quantwm_core.errors import QuantWMError


class HostError(QuantWMError, TypeError):
    """A host is not what its adapter expects, or uses its cache tensor in a way that the store does not support."""


class HostAttributeError(HostError, AttributeError):
    """A host asked its cache tensor for an attribute that the store does not have."""


class UnknownHostError(QuantWMError, LookupError):
    """No adapter recognises the object that was to be attached to."""


class CacheMemoryError(QuantWMError, torch.OutOfMemoryError, MemoryError):
    """There is no memory for what a cache was asked to do; it is as it was before."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say where an error arose, keeping its type.

    >>> with located("layer 3"):
    ...     raise QuantWMError("no room")
    Traceback (most recent call last):
    ...
    quantwm_core.errors.QuantWMError: layer 3: no room
    """
    try:
        yield
    except QuantWMError as error:
        raise type(error)(f"{where}: {error}") from error
