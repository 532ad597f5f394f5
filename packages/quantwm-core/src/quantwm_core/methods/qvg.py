"""``qvg``: Quant-VideoGen (arXiv 2602.02958), the baseline for video caches.

Keys and values alike: plain k-means, the nearest centroid, the residual in 2 bits. With several stages, stage ``t``
clusters the residual of stage ``t - 1`` and the last residual is quantized.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import BFloat16

from quantwm_core import affine, clustered, codebook, cost, packing, symmetric
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.domain import BF16
from quantwm_core.errors import ParameterError
from quantwm_core.statistics import QueryMoment

QUANTIZERS = ("symmetric", "affine")


@dataclass(frozen=True)
class QVG:
    """Quant-VideoGen.

    Attributes:
        quantizer: ``"symmetric"`` as released (levels -1, 0, 1), or ``"affine"`` (four levels).
        centroids: Codebook size of every stage; None picks by the unit's tokens.
        group_size: Channels per scale; None picks by head dimension.
        iterations: Rounds of k-means.
        stages: How often the residual is clustered, at least once.
    """

    quantizer: str = "symmetric"
    centroids: int | None = None
    group_size: int | None = None
    iterations: int = 10
    stages: int = 1
    name = "qvg"
    recent_tokens = 0

    def __post_init__(self) -> None:
        if self.quantizer not in QUANTIZERS:
            raise ParameterError(f"qvg quantizer {self.quantizer!r}: known: {', '.join(QUANTIZERS)}")
        codebook.check_size(self.centroids)
        affine.check_group_multiple(self.group_size)
        codebook.check_rounds(self.iterations)
        if self.stages < 1:
            raise ParameterError(f"qvg stages {self.stages}: need at least 1")

    def uses_queries(self, kind: Kind) -> bool:
        """No."""
        return False

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """Residual parts, then index and centroids of every stage."""
        residual = clustered.AFFINE_PARTS if self.quantizer == "affine" else ("codes", "scales")
        return (*residual, *(f"{part}{suffix}" for suffix in self._suffixes() for part in ("index", "centroids")))

    def seal(
        self,
        kind: Kind,
        values: BFloat16[np.ndarray, "batch heads tokens channels"],
        moment: QueryMoment | None = None,
        previous: SealedTensor | None = None,
    ) -> SealedTensor:
        """Cluster and quantize; statistics are not used.

        >>> unit = np.ones((1, 1, 16, 64), "bfloat16")
        >>> METHOD().seal("keys", unit).nbytes, METHOD().nbytes("keys", unit.shape, first=True)
        (416, 416)
        """
        residual = values.astype(np.float32)
        size = self.centroids or codebook.default_size(values.shape[2])
        arrays: dict[str, np.ndarray] = {}
        for suffix in self._suffixes():
            centroids = codebook.fit(residual, size, iterations=self.iterations)
            index = codebook.nearest(residual, centroids)[..., 0].astype(np.uint8)
            residual = residual - clustered.gather(centroids, index)
            arrays |= {f"index{suffix}": index, f"centroids{suffix}": centroids}
        group = self._group(values.shape[3])
        if self.quantizer == "affine":
            arrays |= clustered.affine_arrays(affine.encode(residual, group))
        else:
            code = symmetric.encode(residual, group)
            arrays |= {"codes": code.codes, "scales": code.scales}
        return SealedTensor(self.name, asdict(self), values.shape, arrays)

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """Residual plus the centroids of all stages, rounded to BF16 once."""
        by_token = ("codes", "scales", *(f"index{suffix}" for suffix in self._suffixes()))
        first, last = sealed.token_range(start, stop, *by_token)
        arrays = sealed.arrays
        if self.quantizer == "affine":
            total = affine.decode(clustered.affine_code(arrays), first, last)
        else:
            total = symmetric.decode(symmetric.SymmetricCode(arrays["codes"], arrays["scales"]), first, last)
        for suffix in reversed(self._suffixes()):
            total = total + clustered.gather(arrays[f"centroids{suffix}"], arrays[f"index{suffix}"][..., first:last])
        return total.astype(BF16)

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """Residual, and index and centroids of every stage."""
        batch, heads, tokens, channels = shape
        group = self._group(channels)
        rows = min(tokens, self.centroids or codebook.default_size(tokens))
        stream = cost.clustered_nbytes(tokens, channels, group, rows)
        stream += (self.stages - 1) * (tokens + 2 * rows * channels)
        if self.quantizer == "symmetric":
            stream -= packing.packed_size(tokens * channels // group) + 4  # no zero-points, no super-scale
        return batch * heads * stream

    def _group(self, channels: int) -> int:
        """Channels that share a scale."""
        return affine.default_group_size(channels) if self.group_size is None else self.group_size

    def _suffixes(self) -> tuple[str, ...]:
        """Names of the stages: the first bears none."""
        return ("", *(f"_{stage}" for stage in range(2, self.stages + 1)))


METHOD = QVG
