"""``quantwm``: the method of the QuantWM paper (arXiv 2609.26425).

Keys: centroids fitted and chosen under the metric of past queries (QSAC), the residual in affine INT2, the remaining
error along the top query directions in low-rank INT8 (PSAC). Values: plain k-means and affine INT2.

Beyond the paper (ours), at no byte more: scales may be searched (``scale_candidates``), codes chosen with error feedback
(``rounding``), coefficients stored in INT4 so that there can be twice as many (``coefficient_bits``), and centroids in small
integers (``centroid_bits``). Preset ``sharp`` is their best combination; the defaults are the paper's. Beside that, k-means may
overshoot, so that fewer rounds do (``relaxation``), as in preset ``fast``.

What each part is worth can be measured by switching it off: ``rank=0`` leaves QSAC alone; ``metric="uniform",
candidates=1`` leaves PSAC alone; both together are ``qvg`` with its affine quantizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import BFloat16, Float32

from quantwm_core import affine, clustered, codebook, cost, integer_table, psac, qsac, rounding, statistics
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.domain import BF16
from quantwm_core.errors import ParameterError
from quantwm_core.methods import ADDED, settings
from quantwm_core.statistics import QueryMoment

METRICS = ("diagonal", "full", "uniform")
ROUNDINGS = ("nearest", "feedback")
WARM_ITERATIONS = 2
SPARSE_PARTS = ("layout", "bitmap", "sparse_values", "sparse_counts")
PSAC_PARTS = ("basis", "coefficient_scales", "coefficients", *SPARSE_PARTS)


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
        scale_candidates: Shares of a group's range that compete for its scale, 1 (all of it) to 4.
        rounding: How keys are rounded: ``"nearest"``, or ``"feedback"`` for the smallest logit error that PSAC leaves.
        coefficient_bits: Of a PSAC coefficient, 8 or 4.
        centroid_bits: Of an entry of the codebook, 16 (BF16), 8 or 4.
        relaxation: How far k-means moves a centroid, 1 (to its cluster's mean) to below 2; see
            :mod:`quantwm_core.codebook`.
    """

    centroids: int | None = None
    group_size: int | None = None
    candidates: int = 4
    metric: str = "diagonal"
    rank: int = 8
    iterations: int = 10
    threshold: float = 0.0
    warm_start: bool = False
    scale_candidates: int = field(default=1, metadata=ADDED)
    rounding: str = field(default="nearest", metadata=ADDED)
    coefficient_bits: int = field(default=8, metadata=ADDED)
    centroid_bits: int = field(default=16, metadata=ADDED)
    relaxation: float = field(default=1.0, metadata=ADDED)
    name = "quantwm"
    recent_tokens = 0

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ParameterError(f"quantwm metric {self.metric!r}: known: {', '.join(METRICS)}")
        if self.rounding not in ROUNDINGS:
            raise ParameterError(f"quantwm rounding {self.rounding!r}: known: {', '.join(ROUNDINGS)}")
        codebook.check_size(self.centroids)
        affine.check_group_multiple(self.group_size)
        affine.check_scale_candidates(self.scale_candidates)
        psac.check_bits(self.coefficient_bits, self.threshold)
        integer_table.check_bits(self.centroid_bits)
        codebook.check_rounds(self.iterations, self.relaxation)
        if self.candidates < 1:
            raise ParameterError(f"quantwm candidates {self.candidates}: need at least 1, the nearest")
        if self.rank < 0:
            raise ParameterError(f"quantwm rank {self.rank}: need at least 0, which switches PSAC off")
        if not 0 <= self.threshold < math.inf:
            raise ParameterError(f"quantwm threshold {self.threshold}: need a finite number of at least 0")

    def uses_queries(self, kind: Kind) -> bool:
        """For keys, unless QSAC and PSAC are switched off and nothing is fed back."""
        return kind == "keys" and (self.rank > 0 or self.metric != "uniform" or self.rounding == "feedback")

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """Clustered parts, and PSAC's for keys."""
        scales = () if self.centroid_bits == integer_table.EXACT_BITS else (clustered.TABLE_SCALES,)
        return (*clustered.PARTS, *scales, *(PSAC_PARTS if kind == "keys" and self.rank else ()))

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
        self._check_rank(kind, channels)
        initial = self._initial(values, previous)
        if kind == "values":
            centroids, stored = self._codebook(wide, None, initial)
            index = codebook.nearest(wide, centroids)[..., 0].astype(np.uint8)
            return self._sealed(values, clustered.encode(wide, centroids, index, group, self.scale_candidates) | stored)
        sensitivity, metric = self._metric(values, moment)
        centroids, stored = self._codebook(wide, metric, initial)
        index = qsac.choose(values, centroids, group, sensitivity, metric, self.candidates)
        basis, energies = self._basis(moment)
        fed_back = None
        if moment is not None and self.rounding == "feedback":
            fed_back = rounding.feedback(moment.mean, basis)
        arrays = clustered.encode(wide, centroids, index, group, self.scale_candidates, fed_back) | stored
        if basis is not None and energies is not None:
            arrays |= self._compensation(wide, arrays, basis, energies)
        return self._sealed(values, arrays)

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """``c + x^ + A^ U^T``, rounded to BF16 once."""
        first, last = sealed.token_range(start, stop, "codes", "scales", "index")
        arrays = sealed.arrays
        wide = clustered.decode(arrays, first, last)
        if not arrays.keys().isdisjoint(PSAC_PARTS):
            wide = wide + psac.correction(_psac_code(sealed), arrays["basis"], sealed.shape[2], first, last)
        return wide.astype(BF16)

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """The storage table; PSAC coefficients count as dense."""
        batch, heads, tokens, channels = shape
        rank = 0 if first else self.rank
        keys, values = cost.quantwm_nbytes(
            tokens, channels, self.group_size, self.centroids, rank, self.coefficient_bits, self.centroid_bits
        )
        self._check_rank(kind, channels)
        return batch * heads * (keys if kind == "keys" else values)

    def _check_rank(self, kind: Kind, channels: int) -> None:
        """Refuse keys that have fewer channels than directions that are compensated."""
        if kind == "keys" and self.rank > channels:
            raise ParameterError(f"quantwm rank {self.rank}: need at most {channels}, the head dimension")

    def _metric(
        self, keys: np.ndarray, moment: QueryMoment | None
    ) -> tuple[Float32[np.ndarray, "batch heads channels"], codebook.Metric]:
        """Channel weights of the residual ranges, and the distance."""
        if moment is None or self.metric == "uniform":
            return np.ones((*keys.shape[:2], keys.shape[3]), np.float32), None
        weights = statistics.sensitivity(moment.mean)
        return weights, weights if self.metric == "diagonal" else statistics.normalised(moment.mean)

    def _size(self, tokens: int) -> int:
        """Centroids that are asked for."""
        return self.centroids or codebook.default_size(tokens, self.centroid_bits)

    def _initial(self, values: np.ndarray, previous: SealedTensor | None) -> np.ndarray | None:
        """Codebook of the unit before, if it may be used, is whole and fits."""
        stored = None if previous is None or not self.warm_start else previous.arrays.get("centroids")
        if previous is None or stored is None:
            return None
        if stored.dtype != BF16 and clustered.TABLE_SCALES not in previous.arrays:
            return None
        table = clustered.table(previous.arrays)
        size = min(values.shape[2], self._size(values.shape[2]))
        return table if table.shape == (*values.shape[:2], size, values.shape[3]) else None

    def _codebook(
        self, wide: np.ndarray, metric: codebook.Metric, initial: np.ndarray | None
    ) -> tuple[BFloat16[np.ndarray, "batch heads centroids channels"], dict[str, np.ndarray]]:
        """Centroids as they will be decoded, and the arrays that stand for them."""
        iterations = self.iterations if initial is None else WARM_ITERATIONS
        size = self._size(wide.shape[2])
        centroids = codebook.fit(wide, size, metric, iterations, initial, self.relaxation)
        if self.centroid_bits == integer_table.EXACT_BITS:
            return centroids, {}
        codes, scales = integer_table.encode(centroids, self.centroid_bits)
        return integer_table.decode(codes, scales), {"centroids": codes, clustered.TABLE_SCALES: scales}

    def _basis(self, moment: QueryMoment | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """PSAC's basis and energies, where it is on."""
        if moment is None or not self.rank:
            return None, None
        return statistics.principal_basis(moment.mean, self.rank)

    def _compensation(
        self, keys: np.ndarray, arrays: dict[str, np.ndarray], basis: np.ndarray, energies: np.ndarray
    ) -> dict[str, np.ndarray]:
        """PSAC of the error that the clustered code leaves."""
        error = keys - clustered.decode(arrays, 0, keys.shape[2])
        code = psac.encode(error, basis, energies, self.threshold, self.coefficient_bits)
        parts = (basis, code.scales, code.dense, code.layout, code.bitmap, code.values, code.counts)
        return {name: part for name, part in zip(PSAC_PARTS, parts, strict=True) if part.size or name == "coefficients"}

    def _sealed(self, values: np.ndarray, arrays: dict[str, np.ndarray]) -> SealedTensor:
        batch, heads, tokens, channels = values.shape
        return SealedTensor(self.name, settings(self), (batch, heads, tokens, channels), arrays)


def _psac_code(sealed: SealedTensor) -> psac.PsacCode:
    """The coefficients of a sealed tensor, absent parts as empty arrays."""
    arrays = sealed.arrays
    tokens = sealed.shape[2]
    scales, dense = arrays["coefficient_scales"], arrays["coefficients"]
    if not arrays.keys().isdisjoint(SPARSE_PARTS):
        values = arrays.get("sparse_values", np.zeros(0, np.int8))  # absent where every coefficient is zero
        return psac.PsacCode(scales, dense, arrays["layout"], arrays["bitmap"], values, arrays["sparse_counts"])
    return psac.PsacCode(scales, dense, *psac.no_sparse_parts(tokens, scales.shape[-1]))


METHOD = QuantWM
