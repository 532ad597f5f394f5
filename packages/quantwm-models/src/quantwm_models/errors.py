"""What can go wrong between a host and the cache under it, as types."""

from __future__ import annotations

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
