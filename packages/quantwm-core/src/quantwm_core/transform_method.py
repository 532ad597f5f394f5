"""What methods have in common whose units :mod:`quantwm_core.transform` codes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np
from jaxtyping import BFloat16, Float64, UInt8

from quantwm_core import cost, transform
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.errors import ParameterError
from quantwm_core.methods import settings
from quantwm_core.statistics import QueryMoment
from quantwm_core.transform_plan import Allocate

FEWEST_BITS = 0.5
"""Bits an element below which a small head could have no code at all: 32 channels, one block of two bits."""


class TransformMethod(ABC):
    """A transform code; a method is a frozen dataclass of this kind that says how its bits are given.

    Attributes:
        name: Public name.
        damp: How much of a uniform metric is mixed into that of past queries.
        lifetime: Units that are expected to share a basis: it is renewed where that saves more bits than it takes. 0 keeps
            the first one for ever.
    """

    name: str
    damp: float
    lifetime: float
    recent_tokens = 0

    @abstractmethod
    def uses_queries(self, kind: Kind) -> bool:
        """Whether the metric of past queries is that of the code."""

    @abstractmethod
    def token_bytes(self, kind: Kind, channels: int) -> int:
        """Most bytes of a token's codes in a head of ``channels``.

        Raises:
            ParameterError: No direction would get bits.
        """

    @abstractmethod
    def allocate(
        self, nbytes: int, energies: Sequence[Float64[np.ndarray, " _blocks"]]
    ) -> UInt8[np.ndarray, "streams 3"]:
        """Blocks of 8, 4 and 2 bits for streams of ``nbytes`` a token each, given the energies of their blocks."""

    def allocator(self, kind: Kind, channels: int) -> Allocate:
        """What gives bits to streams of ``channels``.

        Raises:
            ParameterError: No direction would get any.
        """
        return partial(self.allocate, self.token_bytes(kind, channels))

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """Parts of a transform code."""
        return transform.PARTS

    def seal(
        self,
        kind: Kind,
        values: BFloat16[np.ndarray, "batch heads tokens channels"],
        moment: QueryMoment | None = None,
        previous: SealedTensor | None = None,
    ) -> SealedTensor:
        """Encode a unit's keys or values, in the basis of the unit before unless a new one is worth its bytes.

        Raises:
            ParameterError: No direction would get bits.
            ShapeError: The head dimension is no multiple of eight.
        """
        batch, heads, tokens, channels = values.shape
        metrics = np.zeros((batch, heads, channels, channels))
        if moment is not None and self.uses_queries(kind):
            metrics = moment.mean.astype(np.float64)
        kept = transform.kept_basis(previous, self.name, (batch, heads), channels)
        arrays = transform.seal(values, metrics, self.damp, self.allocator(kind, channels), kept, self.lifetime)
        return SealedTensor(self.name, settings(self), (batch, heads, tokens, channels), arrays)

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """Mean plus codes times matrix, rounded to BF16 once."""
        return transform.decode(sealed.arrays, sealed.shape, *sealed.token_range(start, stop))

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """As if every stream gave two bits to as many directions as it can, in a basis of its own."""
        batch, heads, tokens, channels = shape
        return batch * heads * cost.transform_most_nbytes(tokens, channels, self.token_bytes(kind, channels))

    def check_bits(self, bits: float) -> None:
        """Raise :class:`ParameterError` unless a code of so many bits an element exists."""
        if not FEWEST_BITS <= bits <= 8:
            raise ParameterError(f"{self.name} bits {bits}: need {FEWEST_BITS} to 8 an element")

    def check_lifetime(self) -> None:
        """Raise :class:`ParameterError` unless the lifetime is a number of units."""
        if not 0 <= self.lifetime < math.inf:
            raise ParameterError(f"{self.name} lifetime {self.lifetime}: need at least 0")
