"""``klt``: a transform code in the directions of keys and queries together; beyond the paper.

Keys are whitened by the second moment of past queries and decorrelated, each direction gets the bits that its energy
deserves, and its quantizer is uniform with a searched step: the classical answer to "which code has the smallest
expected logit error". Values are coded alike with every error counting the same. The basis is stored once and shared
by the units that follow, until a new one is worth its bytes. See docs/course for the derivation.

Nearest relatives: ``kvtc`` (principal components, bits by dynamic programming) and ``oscar`` (a rotation by the
queries' moment). Ours: the metric of the queries and the covariance of the keys at once, online, without calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jaxtyping import Float64, UInt8

from quantwm_core import allocation, basis
from quantwm_core.chunk import KINDS, Kind
from quantwm_core.errors import ParameterError
from quantwm_core.methods import ADDED
from quantwm_core.transform_method import TransformMethod
from quantwm_core.transform_plan import Allocate

ALLOCATIONS = ("head", "layer")
MOST_DAMP = 1 / basis.RIDGE
"""Beyond, nothing of the queries' metric would be left."""


@dataclass(frozen=True)
class Klt(TransformMethod):
    """The transform code.

    Attributes:
        bits: Code bits an element; steps, means and the basis come on top.
        value_bits: Those of values, where they are to have others than keys.
        tolerance: Expected error relative to the energy at which a stream has bits enough: a target instead of a rate, up
            to 8 bits. 0 spends ``bits``.
        level: A target that heads and layers have in common, for keys: what a byte of each token must take off the expected
            squared error of a logit, ``q . k / sqrt(D)``. Bits go to the heads and layers where they are worth most, up to 8, and
            nobody has to know of another one's. While no queries are known they count as of unit mean square. 0 spends ``bits``.
        allocation: Whether the bits of a ``"head"`` are its own or the heads of a ``"layer"`` share theirs.
        damp: How much of a uniform metric is mixed into that of past queries, against their drift; up to
            :data:`MOST_DAMP`.
        lifetime: Units that are expected to share a basis: it is renewed where that saves more bits than it takes. 0 keeps
            the first one for ever.

    >>> rng = np.random.default_rng(0)
    >>> unit = (rng.normal(size=(1, 2, 256, 64)) * np.exp2(-np.arange(64) / 8)).astype("bfloat16")
    >>> first = METHOD(lifetime=0.0).seal("values", unit)
    >>> second = METHOD(lifetime=0.0).seal("values", unit, previous=first)
    >>> second.arrays["shared_basis"] is first.arrays["shared_basis"]
    True
    >>> error = METHOD().decode(second).astype(np.float32) - unit.astype(np.float32)
    >>> bool(np.square(error).mean() < 0.02 * np.square(unit.astype(np.float32)).mean())
    True
    """

    bits: float = 2.0
    value_bits: float | None = None
    tolerance: float = 0.0
    level: float = field(default=0.0, metadata=ADDED)
    allocation: str = "head"
    damp: float = 0.5
    lifetime: float = 2.0
    name = "klt"

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise ParameterError(f"klt allocation {self.allocation!r}: known: {', '.join(ALLOCATIONS)}")
        for kind in KINDS:
            self.check_bits(self.rate(kind))
        if not 0 <= self.level < math.inf or (self.level and self.tolerance):
            raise ParameterError(
                f"klt level {self.level}, tolerance {self.tolerance}: need one of them, at least 0, the other 0"
            )
        if not 0 <= self.tolerance < 1 or not 0 < self.damp <= MOST_DAMP:
            raise ParameterError(
                f"klt tolerance {self.tolerance}, damp {self.damp}: need 0 to 1 and more than 0 up to {MOST_DAMP:g}"
            )
        self.check_lifetime()

    def uses_queries(self, kind: Kind) -> bool:
        """For keys."""
        return kind == "keys"

    def rate(self, kind: Kind) -> float:
        """Code bits an element."""
        return self.bits if kind == "keys" or self.value_bits is None else self.value_bits

    def token_bytes(self, kind: Kind, channels: int) -> int:
        """Most bytes of a token's codes: up to eight bits an element where a target says when to stop."""
        open_ended = self.tolerance or (self.level and kind == "keys")
        return channels if open_ended else allocation.budget(self.rate(kind), channels)

    def allocator(self, kind: Kind, channels: int) -> Allocate:
        """What gives bits to streams of ``channels``."""
        least = self.level * channels if kind == "keys" else 0.0
        return partial(self.allocate, self.token_bytes(kind, channels), least=least)

    def allocate(
        self, nbytes: int, energies: Sequence[Float64[np.ndarray, " _blocks"]], least: float = 0.0
    ) -> UInt8[np.ndarray, "streams 3"]:
        """By reverse water-filling."""
        if self.allocation == "layer":
            return allocation.water_fill(energies, nbytes * len(energies), self.tolerance, least)
        return np.concatenate([allocation.water_fill([each], nbytes, self.tolerance, least) for each in energies])


METHOD = Klt
