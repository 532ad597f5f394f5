"""``bf16``: no compression, the control that every comparison is held against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import BFloat16

from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.statistics import QueryMoment


@dataclass(frozen=True)
class BF16Method:
    """Keeps every bit."""

    name = "bf16"
    recent_tokens = 0

    def uses_queries(self, kind: Kind) -> bool:
        """No."""
        return False

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """The tensor itself."""
        return ("exact",)

    def seal(
        self,
        kind: Kind,
        values: BFloat16[np.ndarray, "batch heads tokens channels"],
        moment: QueryMoment | None = None,
        previous: SealedTensor | None = None,
    ) -> SealedTensor:
        """Copy the tensor.

        >>> unit = np.zeros((1, 1, 3, 4), "bfloat16")
        >>> METHOD().seal("keys", unit).nbytes
        24
        """
        return SealedTensor(self.name, {}, values.shape, {"exact": values.copy()})

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """Copy the range out.

        Raises:
            RangeError: The range does not lie inside the unit.
        """
        first, last = sealed.token_range(start, stop, "exact")
        return sealed.arrays["exact"][:, :, first:last].copy()

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """Two bytes an element."""
        return 2 * int(np.prod(shape))


METHOD = BF16Method
