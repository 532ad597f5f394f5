"""``kvtc``: principal components with bits by dynamic programming, after KVTC (arXiv 2511.01815).

The nearest relative of ``klt``: the same code with every error of a key counting the same, whatever queries ask. Where
it deviates from its paper: the basis is fitted online to one head instead of offline to all heads and layers, keys
are decorrelated as the cache holds them, which may be after the rotary embedding, and there is no entropy coder behind.
Steps are searched per direction instead of scales stored per token, which is better at these sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, UInt8

from quantwm_core import allocation
from quantwm_core.chunk import Kind
from quantwm_core.transform_method import TransformMethod


@dataclass(frozen=True)
class Kvtc(TransformMethod):
    """Principal components.

    Attributes:
        bits: Code bits an element; steps, means and the basis come on top.
        lifetime: Units that are expected to share a basis, as in ``klt``; 0 keeps the first one for ever.

    >>> unit = np.linspace(-1, 1, 512, dtype=np.float32).reshape(1, 1, 64, 8).astype("bfloat16")
    >>> sealed = METHOD(bits=4.0).seal("keys", unit)
    >>> sealed.arrays["codes"].nbytes, sealed.arrays["blocks"].tolist()
    (256, [[[0, 1, 0]]])
    """

    bits: float = 2.0
    lifetime: float = 2.0
    name = "kvtc"
    damp = 0.0

    def __post_init__(self) -> None:
        self.check_bits(self.bits)
        self.check_lifetime()

    def uses_queries(self, kind: Kind) -> bool:
        """No."""
        return False

    def token_bytes(self, kind: Kind, channels: int) -> int:
        """Most bytes of a token's codes."""
        return allocation.budget(self.bits, channels)

    def allocate(
        self, nbytes: int, energies: Sequence[Float64[np.ndarray, " _blocks"]]
    ) -> UInt8[np.ndarray, "streams 3"]:
        """By dynamic programming."""
        return np.stack([allocation.dynamic(each, nbytes) for each in energies])


METHOD = Kvtc
