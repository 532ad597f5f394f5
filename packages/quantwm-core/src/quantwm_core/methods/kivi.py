"""``kivi``: asymmetric INT2, keys per channel and values per token (arXiv 2402.02750), the tuning-free LLM baseline.

Keys: groups of consecutive tokens of one channel. Values: groups of consecutive channels of one token. Scale and
minimum are BF16. The newest ``residual_length`` completed tokens stay BF16, counted across unit ends: the cache seals
that many tokens later.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import BFloat16

from quantwm_core import minmax, packing
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.domain import BF16
from quantwm_core.errors import ParameterError
from quantwm_core.statistics import QueryMoment


@dataclass(frozen=True)
class Kivi:
    """KIVI.

    Attributes:
        group_size: Tokens (keys) or channels (values) that share scale and minimum; a ragged last group is a smaller one.
        residual_length: Newest completed tokens that stay BF16.
    """

    group_size: int = 32
    residual_length: int = 128
    name = "kivi"

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.residual_length < 0:
            raise ParameterError(
                f"kivi group size {self.group_size}, residual length {self.residual_length}: need at least 1 and 0"
            )

    @property
    def recent_tokens(self) -> int:
        """Newest completed tokens that stay BF16."""
        return self.residual_length

    def uses_queries(self, kind: Kind) -> bool:
        """No."""
        return False

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """Codes, scales and minima, the latter per channel (keys) or per token (values)."""
        return ("codes", "channel_scales", "channel_minima") if kind == "keys" else ("codes", "scales", "minima")

    def seal(
        self,
        kind: Kind,
        values: BFloat16[np.ndarray, "batch heads tokens channels"],
        moment: QueryMoment | None = None,
        previous: SealedTensor | None = None,
    ) -> SealedTensor:
        """Quantize the tensor; statistics are not used.

        Codes are packed four consecutive channels to a byte for keys too, so that a token range is a row range.

        >>> unit = np.full((1, 1, 40, 64), 2.5, "bfloat16")
        >>> sealed = METHOD().seal("keys", unit)
        >>> bool((METHOD().decode(sealed) == unit).all()), sealed.arrays["channel_scales"].shape
        (True, (1, 1, 64, 2))
        """
        wide = values.astype(np.float32)
        rows = np.swapaxes(wide, -1, -2) if kind == "keys" else wide
        codes, scales, minima = minmax.encode_groups(rows, self.group_size)
        by_token = np.swapaxes(codes, -1, -2) if kind == "keys" else codes
        arrays = dict(zip(self.array_names(kind), (packing.pack(by_token), scales, minima), strict=True))
        return SealedTensor(self.name, asdict(self), values.shape, arrays)

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """Reconstruct BF16."""
        first, last = sealed.token_range(start, stop, "codes")
        arrays, size = sealed.arrays, self.group_size
        codes = packing.unpack(arrays["codes"][:, :, first:last], sealed.shape[3])
        if "scales" in arrays:
            rows = np.s_[:, :, first:last]
            return minmax.decode_groups(codes, arrays["scales"][rows], arrays["minima"][rows], size).astype(BF16)
        begin = first // size
        part = np.s_[..., begin : -(-last // size)]
        by_channel = minmax.decode_groups(
            np.swapaxes(codes, -1, -2),
            arrays["channel_scales"][part],
            arrays["channel_minima"][part],
            size,
            first - begin * size,
        )
        return np.swapaxes(by_channel, -1, -2).astype(BF16)

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """Codes, and scale and minimum of every group."""
        batch, heads, tokens, channels = shape
        rows, size = (channels, tokens) if kind == "keys" else (tokens, channels)
        groups = rows * -(-size // self.group_size)
        return batch * heads * (tokens * packing.packed_size(channels) + 4 * groups)


METHOD = Kivi
