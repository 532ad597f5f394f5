"""``rtn``: round to nearest. Affine INT2 straight on the tensor, without clusters: the simplest baseline."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import BFloat16

from quantwm_core import affine, clustered, packing
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.domain import BF16
from quantwm_core.errors import ParameterError
from quantwm_core.statistics import QueryMoment

GRANULARITIES = ("group", "token", "channel")


@dataclass(frozen=True)
class RoundToNearest:
    """Round to nearest.

    Attributes:
        granularity: ``"group"``: ``group_size`` channels of a token share a scale; ``"token"``: all channels of a token do;
            ``"channel"``: ``group_size`` consecutive tokens of a channel do (a ragged last group is a smaller one).
        group_size: None picks the default (channels) or 64 (tokens).
    """

    granularity: str = "group"
    group_size: int | None = None
    name = "rtn"
    recent_tokens = 0

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ParameterError(f"rtn granularity {self.granularity!r}: known: {', '.join(GRANULARITIES)}")
        if self.group_size is not None and (self.group_size < 4 or self.granularity == "token"):
            raise ParameterError(
                f"rtn group size {self.group_size}: need at least 4, and none with granularity 'token'"
            )

    def uses_queries(self, kind: Kind) -> bool:
        """No."""
        return False

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """Affine parts."""
        return clustered.AFFINE_PARTS

    def seal(
        self,
        kind: Kind,
        values: BFloat16[np.ndarray, "batch heads tokens channels"],
        moment: QueryMoment | None = None,
        previous: SealedTensor | None = None,
    ) -> SealedTensor:
        """Quantize the tensor; statistics are not used.

        >>> unit = np.linspace(-1, 1, 256, dtype=np.float32).reshape(1, 1, 4, 64).astype("bfloat16")
        >>> sealed = METHOD().seal("keys", unit)
        >>> sealed.nbytes, METHOD().nbytes("keys", unit.shape, first=True)
        (73, 73)
        """
        wide = values.astype(np.float32)
        if self.granularity == "channel":
            arrays = self._encode_channels(wide)
        else:
            arrays = clustered.affine_arrays(affine.encode(wide, self.group(values.shape[-1])))
        return SealedTensor(self.name, asdict(self), values.shape, arrays)

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """Reconstruct BF16."""
        first, last = sealed.token_range(start, stop, "codes")
        if self.granularity == "channel":
            return self._decode_channels(sealed, first, last).astype(BF16)
        return affine.decode(clustered.affine_code(sealed.arrays), first, last).astype(BF16)

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """Codes, scales, zero-points and the super-scale."""
        batch, heads, tokens, channels = shape
        if self.granularity == "channel":
            groups = channels * -(-tokens // self.group(channels))
        else:
            groups = tokens * affine.check_group_size(channels, self.group(channels))
        codes = tokens * packing.packed_size(channels)
        return batch * heads * (codes + groups + packing.packed_size(groups) + 4)

    def group(self, channels: int) -> int:
        """Elements of a group: channels, or tokens with granularity ``"channel"``."""
        if self.granularity == "token":
            return channels
        if self.group_size is not None:
            return self.group_size
        return affine.MAX_GROUP if self.granularity == "channel" else affine.default_group_size(channels)

    def _encode_channels(self, wide: np.ndarray) -> dict[str, np.ndarray]:
        """Groups of consecutive tokens. Zeros fill the last group up: they change no range that includes zero."""
        batch, heads, tokens, channels = wide.shape
        size = self.group(channels)
        blocks = -(-tokens // size)
        padded = np.zeros((batch, heads, blocks * size, channels), np.float32)
        padded[:, :, :tokens] = wide
        grouped = np.moveaxis(padded.reshape(batch, heads, blocks, size, channels), 3, 4)
        codes, scales, zero_points, super_scale = affine.encode_groups(grouped)
        codes = np.moveaxis(codes, 4, 3).reshape(padded.shape)[:, :, :tokens]
        return {
            "codes": packing.pack(codes),
            "scales": scales,
            "zero_points": packing.pack(zero_points.reshape(batch, heads, -1)),
            "super_scale": super_scale,
        }

    def _decode_channels(self, sealed: SealedTensor, start: int, stop: int) -> np.ndarray:
        """Decode the blocks that the range touches, then cut."""
        batch, heads, tokens, channels = sealed.shape
        size = self.group(channels)
        first, last = start // size, -(-stop // size)
        codes = np.zeros((batch, heads, (last - first) * size, channels), np.uint8)
        end = min(last * size, tokens)
        codes[:, :, : end - first * size] = packing.unpack(sealed.arrays["codes"][:, :, first * size : end], channels)
        grouped = np.moveaxis(codes.reshape(batch, heads, last - first, size, channels), 3, 4)
        zero_points = affine.unpack_rows(sealed.arrays["zero_points"], channels, first, last)
        scales = sealed.arrays["scales"][:, :, first:last]
        wide = affine.decode_groups(np.ascontiguousarray(grouped), scales, zero_points, sealed.arrays["super_scale"])
        return np.moveaxis(wide, 4, 3).reshape(codes.shape)[:, :, start - first * size : stop - first * size]


METHOD = RoundToNearest
