"""``quantwm``: the method of the QuantWM paper (arXiv 2609.26425).

Keys: centroids fitted and chosen under the metric of past queries (QSAC), the residual in affine INT2, the remaining
error along the top query directions in low-rank INT8 (PSAC). Values: plain k-means and affine INT2.

What each part is worth can be measured by switching it off: ``rank=0`` leaves QSAC alone; ``metric="uniform",
candidates=1`` leaves PSAC alone; both together are ``qvg`` with its affine quantizer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import BFloat16, Float32

from quantwm_core import affine, clustered, codebook, cost, psac, qsac, statistics
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.domain import BF16
from quantwm_core.errors import ParameterError
from quantwm_core.statistics import QueryMoment

METRICS = ("diagonal", "full", "uniform")
WARM_ITERATIONS = 2
PSAC_PARTS = ("basis", "coefficient_scales", "coefficients", "layout", "bitmap", "sparse_values", "sparse_counts")


@dataclass(frozen=True)
class QuantWM:
    """QuantWM.

    Attributes:
        centroids: Codebook size ``C``, 1 to 256; None picks by the unit's tokens.
        group_size: Channels per scale ``G``; None picks by head dimension.
        candidates: ``m`` of QSAC: 1 nearest, 4 default, 256 all.
        metric: Distance for keys: ``"diagonal"`` (channel sensitivities), ``"full"`` (``M``), ``"uniform"``.
        rank: Directions ``r`` of PSAC; 0 switches it off.
        iterations: Rounds of k-means.
        threshold: PSAC coefficients whose effect on a logit is below this many standard deviations are dropped.
        warm_start: Begin k-means from the codebook of the unit before, with two rounds.
    """

    centroids: int | None = None
    group_size: int | None = None
    candidates: int = 4
    metric: str = "diagonal"
    rank: int = 8
    iterations: int = 10
    threshold: float = 0.0
    warm_start: bool = False
    name = "quantwm"
    recent_tokens = 0

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ParameterError(f"quantwm metric {self.metric!r}: known: {', '.join(METRICS)}")
        codebook.check_size(self.centroids)
        affine.check_group_multiple(self.group_size)
        if self.candidates < 1 or self.rank < 0 or self.iterations < 0 or not 0 <= self.threshold < math.inf:
            raise ParameterError(
                f"quantwm candidates {self.candidates}, rank {self.rank}, iterations {self.iterations}, "
                f"threshold {self.threshold}: need at least 1, 0, 0 and 0"
            )

    def uses_queries(self, kind: Kind) -> bool:
        """For keys, unless both QSAC and PSAC are switched off."""
        return kind == "keys" and (self.rank > 0 or self.metric != "uniform")

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """Clustered parts, and PSAC's for keys."""
        return (*clustered.PARTS, *PSAC_PARTS) if kind == "keys" and self.rank else clustered.PARTS

    def seal(
        self,
        kind: Kind,
        values: BFloat16[np.ndarray, "batch heads tokens channels"],
        moment: QueryMoment | None = None,
        previous: SealedTensor | None = None,
    ) -> SealedTensor:
        """Encode a unit's keys or values.

        Raises:
            ParameterError: The rank exceeds the head dimension, or the group size does not divide it.

        >>> unit = np.ones((1, 1, 32, 64), "bfloat16")
        >>> moment = statistics.second_moment(unit, 1)
        >>> sealed = METHOD(rank=4).seal("keys", unit, moment)
        >>> sorted(sealed.arrays)[:4], bool((METHOD().decode(sealed) == unit).all())
        (['basis', 'bitmap', 'centroids', 'codes'], True)
        """
        wide = values.astype(np.float32)
        channels = values.shape[3]
        group = affine.default_group_size(channels) if self.group_size is None else self.group_size
        affine.check_group_size(channels, group)
        if kind == "keys" and self.rank > channels:
            raise ParameterError(f"quantwm rank {self.rank}: need at most {channels}, the head dimension")
        initial = self._initial(values, previous)
        size = self.centroids or codebook.default_size(values.shape[2])
        iterations = self.iterations if initial is None else WARM_ITERATIONS
        if kind == "values":
            centroids = codebook.fit(wide, size, None, iterations, initial)
            index = codebook.nearest(wide, centroids)[..., 0].astype(np.uint8)
            return self._sealed(values, clustered.encode(wide, centroids, index, group))
        sensitivity, metric = self._metric(values, moment)
        centroids = codebook.fit(wide, size, metric, iterations, initial)
        index = qsac.choose(values, centroids, group, sensitivity, metric, self.candidates)
        arrays = clustered.encode(wide, centroids, index, group)
        if self.rank and moment is not None:
            arrays |= self._compensation(wide, arrays, moment)
        return self._sealed(values, arrays)

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """``c + x^ + A^ U^T``, rounded to BF16 once."""
        first, last = sealed.token_range(start, stop)
        arrays = sealed.arrays
        wide = clustered.decode(arrays, first, last)
        if not arrays.keys().isdisjoint(PSAC_PARTS):
            wide = wide + psac.correction(_psac_code(sealed), arrays["basis"], sealed.shape[2], first, last)
        return wide.astype(BF16)

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """The storage table; PSAC coefficients count as dense."""
        batch, heads, tokens, channels = shape
        rank = 0 if first else self.rank
        keys, values = cost.quantwm_nbytes(tokens, channels, self.group_size, self.centroids, rank)
        return batch * heads * (keys if kind == "keys" else values)

    def _metric(
        self, keys: np.ndarray, moment: QueryMoment | None
    ) -> tuple[Float32[np.ndarray, "batch heads channels"], codebook.Metric]:
        """Channel weights of the residual ranges, and the distance."""
        if moment is None or self.metric == "uniform":
            return np.ones((*keys.shape[:2], keys.shape[3]), np.float32), None
        weights = statistics.sensitivity(moment.mean)
        return weights, weights if self.metric == "diagonal" else statistics.normalised(moment.mean)

    def _initial(self, values: np.ndarray, previous: SealedTensor | None) -> np.ndarray | None:
        """Codebook of the unit before, if it may be used and fits."""
        if not self.warm_start or previous is None or "centroids" not in previous.arrays:
            return None
        size = min(values.shape[2], self.centroids or codebook.default_size(values.shape[2]))
        table = previous.arrays["centroids"]
        return table if table.shape == (*values.shape[:2], size, values.shape[3]) else None

    def _compensation(
        self, keys: np.ndarray, arrays: dict[str, np.ndarray], moment: QueryMoment
    ) -> dict[str, np.ndarray]:
        """PSAC of the error that the clustered code leaves."""
        basis, energies = statistics.principal_basis(moment.mean, self.rank)
        error = keys - clustered.decode(arrays, 0, keys.shape[2])
        code = psac.encode(error, basis, energies, self.threshold)
        parts = (basis, code.scales, code.dense, code.layout, code.bitmap, code.values, code.counts)
        return {name: part for name, part in zip(PSAC_PARTS, parts, strict=True) if part.size or name == "coefficients"}

    def _sealed(self, values: np.ndarray, arrays: dict[str, np.ndarray]) -> SealedTensor:
        batch, heads, tokens, channels = values.shape
        return SealedTensor(self.name, asdict(self), (batch, heads, tokens, channels), arrays)


def _psac_code(sealed: SealedTensor) -> psac.PsacCode:
    """The coefficients of a sealed tensor, absent parts as empty arrays."""
    arrays = sealed.arrays
    tokens = sealed.shape[2]
    scales, dense = arrays["coefficient_scales"], arrays["coefficients"]
    values = arrays.get("sparse_values", np.zeros(0, np.int8))  # absent where every coefficient is zero
    if "layout" in arrays:
        return psac.PsacCode(scales, dense, arrays["layout"], arrays["bitmap"], values, arrays["sparse_counts"])
    rank = scales.shape[-1]
    bitmap = np.zeros((0, -(-tokens * rank // 8)), np.uint8)
    counts = np.zeros((0, -(-tokens // psac.TOKENS_PER_COUNT)), np.int32)
    return psac.PsacCode(scales, dense, np.zeros(0, np.uint8), bitmap, values, counts)


METHOD = QuantWM
