"""Waiting for units that a GPU seals while they are read already."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from quantwm_models.errors import located
from quantwm_models.settling import Unconfirmed


class Confirmation:
    """Waits for what one cache seals.

    The cache is not kept alive. Where it is gone, it is still told, by the error, that its last units were not to be believed.

    Args:
        layer: Number of the cache's layer.
        units: What is being sealed.
        believe: The cache's own method, which waits for them and takes what became of them.
    """

    def __init__(self, layer: int, units: Unconfirmed, believe: Callable[[Unconfirmed], None]) -> None:
        self._layer = layer
        self._units = units
        self._believe = weakref.WeakMethod(believe)

    def __call__(self) -> None:
        """Wait.

        Raises:
            DomainError: A unit cannot be sealed; the message names the layer.
        """
        believe = self._believe()
        if believe is not None:
            believe(self._units)
            return
        with located(f"layer {self._layer}"):
            self._units.wait()
