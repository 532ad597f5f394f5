"""A history that a host makes as a whole, sealed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core.method import Scheme
from quantwm_core.stream import Span
from quantwm_kernels.chunk import SealedChunk
from quantwm_models.contents import Contents
from quantwm_models.geometry import Geometry, chunk_sizes, chunks_of, exact_chunk
from quantwm_models.learning import Learning
from quantwm_models.settling import Sealing, settle


class Heard(NamedTuple):
    """What observers are to hear of: units that were sealed, and tokens that are not live any more."""

    sealings: Sequence[Sealing]
    gone: Sequence[Span]


class History:
    """Contents that grow by chunks, each sealed before the next is looked at.

    Args:
        contents: To begin with.
        replaced: The history whose place it takes, for a warm start of the first unit.
        scheme: How units are sealed.
        learning: What takes queries.
        told: Whether anybody is to hear of it; what is heard keeps the chunks' BF16 tensors alive.

    Attributes:
        geometry: Of the chunks; None before there are any.
        heard: In order.
    """

    def __init__(
        self, contents: Contents, replaced: Contents, scheme: Scheme, learning: Learning, *, told: bool
    ) -> None:
        self.contents = contents
        self.geometry: Geometry | None = None
        self.heard: list[Heard] = []
        self._replaced = replaced
        self._scheme = scheme
        self._learning = learning
        self._told = told

    def grow(self, keys: Tensor, values: Tensor, queries: Tensor | None, tokens: Sequence[int]) -> None:
        """Seal chunks of so many ``tokens``; see :meth:`quantwm_models.LayerCache.rebuild`."""
        sizes = chunk_sizes(tokens)
        parts = [chunks_of(name, each, sizes) for name, each in (("keys", keys), ("values", values))]
        asked = [None] * len(sizes) if queries is None else chunks_of("queries", queries, sizes)
        for chunk in zip(*parts, asked, strict=True):
            self._add(*chunk)

    def _add(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        exact_keys, exact_values, geometry = exact_chunk(keys, values, self.geometry, copy=False)
        if self.geometry is None:
            self._learning.check_foreseen(self.contents, geometry)
            self._scheme.check_channels(geometry.key_channels, geometry.value_channels)
        self.geometry = geometry
        grown = self.contents.append(exact_keys, exact_values)
        gone = self.contents.gone(grown)
        if queries is not None:
            grown = self._learning.observed(grown, queries, self.geometry)
        whole = grown.complete()
        replaced = self._unit_before(self.geometry.device) if whole.stream.due() else None
        settled = settle(whole, self._scheme, self._learning.frame, replaced=replaced)
        self.contents = settled.contents
        if self._told:
            self.heard += [Heard((), gone), Heard(settled.sealings, ())]

    def _unit_before(self, device: torch.device) -> SealedChunk | None:
        """The newest unit of the history that is replaced, without what units share: that would be kept for this one alone.

        None for any unit but the first.
        """
        unit = self._replaced.newest(device) if self._scheme.warm_starts and not self.contents.stream.units else None
        if unit is None:
            return None
        keys, values = (replace(each, arrays=each.own).to(device) for each in (unit.keys, unit.values))
        return replace(unit, keys=keys, values=values)
