"""``kvtc``: principal components with bits by dynamic programming, after KVTC (arXiv 2511.01815).

The nearest relative of ``klt``: the same code with every error of a key counting the same, whatever queries ask. Where
it deviates from its paper: the basis is fitted online to one head instead of offline to all heads and layers, keys
are decorrelated as the cache holds them, which may be after the rotary embedding, and there is no entropy coder behind.
Steps are searched per direction instead of scales stored per token, which is better at these sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from jaxtyping import BFloat16, Float64, UInt8

from quantwm_core import allocation, cost, transform
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.errors import ParameterError
from quantwm_core.statistics import QueryMoment


@dataclass(frozen=True)
class Kvtc:
    """Principal components.

    Attributes:
        bits: Code bits an element; steps, means and the basis come on top.
        lifetime: Units that are expected to share a basis, as in ``klt``; 0 keeps the first one for ever.
    """

    bits: float = 2.0
    lifetime: float = 2.0
    name = "kvtc"
    recent_tokens = 0

    def __post_init__(self) -> None:
        transform.check_bits("kvtc", self.bits)
        if not 0 <= self.lifetime < math.inf:
            raise ParameterError(f"kvtc lifetime {self.lifetime}: need at least 0")

    def uses_queries(self, kind: Kind) -> bool:
        """No."""
        return False

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
        """Encode a unit's keys or values; statistics of queries are not used.

        Raises:
            ParameterError: No direction would get bits.
            ShapeError: The head dimension is no multiple of eight.

        >>> unit = np.linspace(-1, 1, 512, dtype=np.float32).reshape(1, 1, 64, 8).astype("bfloat16")
        >>> sealed = METHOD(bits=4.0).seal("keys", unit)
        >>> sealed.arrays["codes"].nbytes, sealed.arrays["blocks"].tolist()
        (256, [[[0, 1, 0]]])
        """
        batch, heads, tokens, channels = values.shape
        kept = transform.kept_basis(previous, self.name, (batch, heads), channels)
        uniform = np.zeros((batch, heads, channels, channels))
        arrays = transform.seal(values, uniform, 0.0, self.allocator(kind, channels), kept, self.lifetime)
        return SealedTensor(self.name, asdict(self), (batch, heads, tokens, channels), arrays)

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """Mean plus codes times matrix, rounded to BF16 once."""
        return transform.decode(sealed.arrays, sealed.shape, *sealed.token_range(start, stop))

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """As if every stream gave two bits to as many directions as it can, in a basis of its own."""
        batch, heads, tokens, channels = shape
        return batch * heads * cost.transform_most_nbytes(tokens, channels, allocation.budget(self.bits, channels))

    def allocator(self, kind: Kind, channels: int) -> transform.Allocate:
        """What gives bits to streams of ``channels``.

        Raises:
            ParameterError: No direction would get any.
        """
        return partial(_allocate, allocation.budget(self.bits, channels))


def _allocate(nbytes: int, energies: Sequence[Float64[np.ndarray, " _blocks"]]) -> UInt8[np.ndarray, "streams 3"]:
    return np.stack([allocation.dynamic(each, nbytes) for each in energies])


METHOD = Kvtc
