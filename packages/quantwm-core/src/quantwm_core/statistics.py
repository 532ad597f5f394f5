"""What past queries tell: running second moment, channel sensitivity, principal directions (paper: QSAC and PSAC).

``M = E[q q^T]``, uncentred, one ``D x D`` FP32 matrix per KV head; queries of a grouped head are pooled. No query is
kept. A unit is sealed with what was gathered *before* it began; its own queries count from the next unit on, which is
why :class:`QueryStatistics` holds two moments, ``past`` and ``pending``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import BFloat16, Float, Float32

from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16, binary_exponent, check_finite, to_bf16
from quantwm_core.errors import DomainError, ParameterError, ShapeError

ROUNDING = 1e-5
"""Share of the largest mean of squares that another may be below 0 by."""


@dataclass(frozen=True)
class QueryMoment:
    """Second moment of a set of queries.

    Attributes:
        mean: FP32 ``[B, H, D, D]``, ``E[q q^T]`` per KV head.
        count: Queries per KV head that the mean is over.
    """

    mean: Float32[np.ndarray, "batch heads channels channels"]
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.mean.nbytes


def second_moment(queries: Float[np.ndarray, "batch query_heads tokens channels"], kv_heads: int) -> QueryMoment:
    """Second moment of one attention call's queries.

    Args:
        queries: BF16 (or FP16, FP32: rounded to BF16) ``[B, Hq, T, D]``, in the frame of the cached keys.
        kv_heads: KV heads ``H``; query heads ``h * Hq / H`` to ``(h + 1) * Hq / H - 1`` attend through KV head ``h``.

    Raises:
        ShapeError: The query heads are not a multiple of the KV heads.
        DomainError: A query is NaN, infinite or beyond 2**60.

    >>> second_moment(np.float32([[[[1.0, 2.0], [3.0, 0.0]]]]), 1).mean
    array([[[[5., 1.],
             [1., 2.]]]], dtype=float32)
    """
    exact = to_bf16(queries, "queries", rank=4)
    batch, heads, tokens, channels = exact.shape
    if kv_heads < 1 or heads % kv_heads:
        raise ShapeError(f"queries: {heads} heads do not divide among {kv_heads} KV heads")
    count = heads // kv_heads * tokens
    pooled = exact.astype(np.float32).reshape(batch, kv_heads, count, channels)
    exponent = binary_exponent(pooled)
    scaled = np.ldexp(pooled, -exponent)
    mean = np.swapaxes(scaled, -1, -2) @ scaled / np.float32(count)
    return QueryMoment(np.ldexp(mean, 2 * exponent), count)


def merge(first: QueryMoment, second: QueryMoment) -> QueryMoment:
    """Moment of both sets together, every query counting equally.

    Raises:
        ShapeError: The moments belong to different caches.

    >>> one, two = second_moment(np.float32([[[[2.0]]]]), 1), second_moment(np.float32([[[[4.0]]]]), 1)
    >>> merge(one, two).mean.item(), merge(one, two).count
    (10.0, 2)
    """
    if first.mean.shape != second.mean.shape:
        raise ShapeError(f"query moments: got shapes {first.mean.shape} and {second.mean.shape}, need equal ones")
    count = first.count + second.count
    share = np.float32(second.count / count)
    return QueryMoment(first.mean * (1 - share) + second.mean * share, count)


@dataclass(frozen=True)
class QueryStatistics:
    """Causal query statistics of one layer.

    Attributes:
        past: Moment of all queries before the unit that is being filled began; None in the first unit.
        pending: Moment of the queries since.
    """

    past: QueryMoment | None = None
    pending: QueryMoment | None = None

    def observe(self, moment: QueryMoment) -> QueryStatistics:
        """Count one attention call's queries."""
        return replace(self, pending=moment if self.pending is None else merge(self.pending, moment))

    def sealed(self, decay: float | None = None) -> QueryStatistics:
        """A unit was sealed: fold its own queries into the past.

        Args:
            decay: None pools all queries equally; ``0 <= decay < 1`` forgets: ``decay * past + (1 - decay) * unit``.

        Raises:
            ParameterError: ``decay`` is out of range.
        """
        check_decay(decay)
        if self.pending is None or self.past is None:
            return QueryStatistics(self.pending or self.past, None)
        if decay is None:
            return QueryStatistics(merge(self.past, self.pending), None)
        keep = np.float32(decay)
        mean = keep * self.past.mean + (1 - keep) * self.pending.mean
        return QueryStatistics(QueryMoment(mean, self.past.count + self.pending.count), None)

    @property
    def nbytes(self) -> int:
        """Bytes of both moments."""
        return sum(moment.nbytes for moment in (self.past, self.pending) if moment is not None)


def check_decay(decay: object) -> None:
    """Raise :class:`ParameterError` unless ``decay`` is None or a number in ``[0, 1)``.

    >>> check_decay(0.9)
    """
    if decay is not None and not (isinstance(decay, int | float) and 0 <= decay < 1):
        raise ParameterError(f"decay {decay!r}: need None or a number in [0, 1)")


def check_moment(mean: Float32[np.ndarray, "*streams channels channels"], name: str = "query moment") -> None:
    """Raise :class:`DomainError` unless every number is finite and none on the diagonal, a mean of squares, is negative.

    Turning a moment (:mod:`quantwm_core.rotary`) rounds what cancels to a little below 0, which is let pass.

    >>> check_moment(np.float32([[[1.0, -2.0], [-2.0, 4.0]]]))
    """
    if not np.isfinite(mean).all():
        raise DomainError(f"{name}: NaN or infinite numbers; make it of queries that are finite")
    diagonal = np.diagonal(mean, axis1=-2, axis2=-1)
    below = diagonal < -ROUNDING * diagonal.max(axis=-1, keepdims=True, initial=0)
    if below.any():
        raise DomainError(
            f"{name}: {diagonal[below].min()} on the diagonal, where means of squares stand; need 0 or more"
        )


def sensitivity(mean: Float32[np.ndarray, "*streams channels channels"]) -> Float32[np.ndarray, "*streams channels"]:
    """Channel weights ``w_j = M_jj / mean_j M_jj``; all ones where ``M`` is zero.

    >>> sensitivity(np.float32([[[1.0, 0.0], [0.0, 3.0]]]))
    array([[0.5, 1.5]], dtype=float32)
    """
    diagonal = np.diagonal(mean, axis1=-2, axis2=-1)
    check_finite(diagonal, "query moment")
    average = _average(mean)[..., None]
    return np.where(average > 0, diagonal / np.where(average > 0, average, np.float32(1)), np.float32(1))


def normalised(
    mean: Float32[np.ndarray, "*streams channels channels"],
) -> Float32[np.ndarray, "*streams channels channels"]:
    """``M / mean_j M_jj``; the identity where ``M`` is zero.

    >>> normalised(np.zeros((1, 2, 2), np.float32))[0]
    array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    check_finite(mean, "query moment")
    average = _average(mean)[..., None, None]
    identity = np.eye(mean.shape[-1], dtype=np.float32)
    return np.where(average > 0, mean / np.where(average > 0, average, np.float32(1)), identity)


def principal_basis(
    mean: Float32[np.ndarray, "*streams channels channels"], rank: int
) -> tuple[BFloat16[np.ndarray, "*streams channels rank"], Float32[np.ndarray, "*streams rank"]]:
    """The ``rank`` eigenvectors of ``M`` with the largest eigenvalues.

    Returns:
        BF16 basis ``[*streams, D, rank]``, largest eigenvalue first, the component of largest magnitude positive, zero
        where ``M`` is zero; FP32 eigenvalues ``[*streams, rank]``.

    Raises:
        ParameterError: ``rank`` is not between 1 and ``D``.
        DomainError: It is no second moment, see :func:`check_moment`.

    >>> basis, energies = principal_basis(np.float32([[[1.0, 0.0], [0.0, 4.0]]]), 1)
    >>> basis.astype(np.float32).ravel(), energies.ravel()
    (array([0., 1.], dtype=float32), array([4.], dtype=float32))
    """
    channels = mean.shape[-1]
    if not 1 <= rank <= channels:
        raise ParameterError(f"rank {rank}: need 1 to {channels}, the head dimension")
    check_moment(mean)
    values, vectors = np.linalg.eigh(mean.astype(np.float64))
    vectors = vectors[..., ::-1][..., :rank]
    largest = np.abs(vectors).argmax(axis=-2)[..., None, :]
    vectors = vectors * np.where(np.take_along_axis(vectors, largest, axis=-2) < 0, -1.0, 1.0)
    energies = np.clip(values[..., ::-1][..., :rank], 0, np.finfo(np.float32).max).astype(np.float32)
    known = (_average(mean) > 0)[..., None, None]
    return np.where(known, vectors, 0).astype(np.float32).astype(BF16), energies


def _average(mean: Float32[np.ndarray, "*streams channels channels"]) -> Float32[np.ndarray, "*streams"]:
    """``mean_j M_jj``; summed in FP64, because the sum of 256 squares of 2**60 passes FP32's range."""
    if mean.ndim < 2 or mean.shape[-1] != mean.shape[-2] or not mean.size:
        raise ShapeError(f"query moment: got shape {mean.shape}, need [..., D, D], not empty")
    return np.asarray(np.diagonal(mean, axis1=-2, axis2=-1).mean(axis=-1, dtype=np.float64), np.float32)


explain_errors(globals())
