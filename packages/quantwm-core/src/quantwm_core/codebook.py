"""Centroids of a unit: k-means under a metric of the queries (paper: semantic-aware clustering, and QSAC's codebook).

The metric is one of

* ``None``: plain squared distance,
* a diagonal ``w [*streams, D]``: ``d(k, c) = sum_j w_j (k_j - c_j)^2``,
* a full matrix ``M [*streams, D, D]``: ``d(k, c) = (k - c)^T M (k - c)``.

No random numbers: centroid ``i`` starts at token ``floor((i + 1/2) N / C)``. Ties go to the lowest index, an empty
cluster keeps its last centroid, duplicates are legal. Centroids are stored BF16, and the stored values are what
residuals are taken from.

Lloyd's algorithm moves a centroid to the mean of its cluster. Over-relaxed (ours, after Salakhutdinov and Roweis 2003),
it moves ``w`` times as far in every round but the last. ``n`` tokens at a distance ``d`` of their centroid from their mean
cost ``n d^2`` more than they would there, and ``(1 - w)^2 n d^2`` afterwards: below ``w = 2`` no round makes the sum of
distances larger, and fewer of them lead as far.

Distances are expanded, ``d = k^T M k - 2 k^T M c + c^T M c``, and the first term, which no argmin sees, is left out. That
is exact enough only where keys are no larger than they are far apart, so both sides are brought into a frame first:
scaled by a power of two, so that squares stay finite, and moved by the mean centroid, rounded to BF16 so that the
subtraction is exact. Neither changes a distance.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse
from jaxtyping import BFloat16, Float, Float32, Int

from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16, binary_exponent, check_finite
from quantwm_core.errors import ParameterError, ShapeError

MAX_CENTROIDS = 256

Metric = Float32[np.ndarray, "..."] | None


def default_size(tokens: int, bits: int = 16) -> int:
    """``min(256, largest power of two <= tokens / 16)``, at least 1; ``tokens / 8`` where an entry has but 8 or 4 ``bits``.

    >>> [default_size(n) for n in (1, 31, 256, 4680, 29640)], default_size(512, bits=4)
    ([1, 1, 16, 256, 256], 64)
    """
    if tokens < 1:
        raise ShapeError(f"a unit of {tokens} tokens: need at least one")
    return min(MAX_CENTROIDS, 1 << max(0, (tokens // max(bits, 8)).bit_length() - 1))


def check_size(centroids: int | None) -> None:
    """Raise :class:`ParameterError` unless a codebook of ``centroids`` rows can be made; None means the default.

    >>> check_size(256)
    """
    if centroids is not None and not 1 <= centroids <= MAX_CENTROIDS:
        raise ParameterError(f"{centroids} centroids: need 1 to {MAX_CENTROIDS}, an index takes one byte")


def check_rounds(iterations: int, relaxation: float = 1.0) -> None:
    """Raise :class:`ParameterError` unless k-means can be run so.

    >>> check_rounds(4, 1.5)
    """
    if iterations < 0:
        raise ParameterError(f"{iterations} iterations: need 0 or more")
    if not 1 <= relaxation < 2:
        raise ParameterError(f"relaxation {relaxation}: need 1 (Lloyd's algorithm) or more, and less than 2")


def initial_tokens(tokens: int, centroids: int) -> Int[np.ndarray, " centroids"]:
    """Token whose value each centroid starts from.

    >>> initial_tokens(10, 4)
    array([1, 3, 6, 8])
    """
    return (2 * np.arange(centroids) + 1) * tokens // (2 * centroids)


def fit(
    values: Float[np.ndarray, "*streams tokens channels"],
    centroids: int,
    metric: Metric = None,
    iterations: int = 10,
    initial: Float[np.ndarray, "*streams centroids channels"] | None = None,
    relaxation: float = 1.0,
) -> BFloat16[np.ndarray, "*streams centroids channels"]:
    """Lloyd's algorithm, all streams side by side, each for itself.

    Args:
        values: ``[*streams, tokens, channels]``; BF16 or FP32.
        centroids: Codebook size, 1 to 256; at most ``tokens`` rows are made.
        metric: See the module; the mean of a cluster minimises all three.
        iterations: Rounds of assignment and update, at least 0.
        initial: Warm start, ``[*streams, min(centroids, tokens), channels]``.
        relaxation: How many times the way to its cluster's mean a centroid goes, 1 (Lloyd's) to below 2; in the last
            round, the way.

    Returns:
        BF16 ``[*streams, min(centroids, tokens), channels]``.

    Raises:
        ParameterError: ``centroids``, ``iterations`` or ``relaxation`` is out of range.
        ShapeError: ``initial`` or ``metric`` does not fit, or ``values`` are no tokens of channels.
        DomainError: A number of ``values``, ``metric`` or ``initial`` is NaN or infinite.

    >>> fit(np.float32([[[0.0], [1.0], [10.0], [11.0]]]), 2).astype(np.float32).ravel()
    array([ 0.5, 10.5], dtype=float32)
    """
    if values.ndim < 2 or not values.shape[-2]:
        raise ShapeError(f"values {values.shape}: need [..., tokens, channels], and at least one token")
    check_size(centroids)
    check_rounds(iterations, relaxation)
    *streams, tokens, channels = values.shape
    size = min(centroids, tokens)
    if initial is None:
        initial = values[..., initial_tokens(tokens, size), :]
    if initial.shape != (*streams, size, channels):
        raise ShapeError(f"initial centroids: got shape {initial.shape}, need {(*streams, size, channels)}")
    _check_metric(metric, values.shape)
    exponent = binary_exponent(values, initial)
    points = np.ldexp(values.astype(np.float32), -exponent).reshape(-1, tokens, channels)
    table = np.ldexp(initial.astype(np.float32), -exponent).reshape(-1, size, channels)
    offset = _offset(table)
    centred = points - offset
    flat_metric = None if metric is None else metric.reshape(len(points), *metric.shape[len(streams) :])
    for left in reversed(range(iterations)):
        index = _scores(centred, table - offset, flat_metric).argmin(axis=-1)
        means = _means(points, index, table)
        table = means if relaxation == 1 or not left else table + np.float32(relaxation) * (means - table)
    return np.ldexp(table.reshape(*streams, size, channels), exponent).astype(BF16)


def nearest(
    values: Float[np.ndarray, "*streams tokens channels"],
    centroids: Float[np.ndarray, "*streams centroids channels"],
    metric: Metric = None,
    count: int = 1,
) -> Int[np.ndarray, "*streams tokens count"]:
    """The ``count`` nearest centroids of every token, nearest first, ties to the lowest index.

    Raises:
        ParameterError: ``count`` is not between 1 and the codebook's size.
        ShapeError: ``metric`` does not fit.
        DomainError: A number is NaN or infinite.

    >>> nearest(np.float32([[[2.0]]]), np.float32([[[0.0], [3.0], [1.0]]]), count=3)
    array([[[1, 2, 0]]])
    """
    if not 1 <= count <= centroids.shape[-2]:
        raise ParameterError(f"{count} nearest of {centroids.shape[-2]} centroids: need 1 to {centroids.shape[-2]}")
    _check_metric(metric, values.shape)
    exponent = binary_exponent(values, centroids)
    table = np.ldexp(centroids.astype(np.float32), -exponent)
    offset = _offset(table)
    scores = _scores(np.ldexp(values.astype(np.float32), -exponent) - offset, table - offset, metric)
    if count == 1:
        return scores.argmin(axis=-1)[..., None]
    if count > 16:  # one sort beats many sweeps
        return np.argsort(scores, axis=-1, kind="stable")[..., :count]
    found = np.empty((*scores.shape[:-1], count), np.int64)
    for rank in range(count):
        best = scores.argmin(axis=-1)
        found[..., rank] = best
        np.put_along_axis(scores, best[..., None], np.inf, axis=-1)
    return found


def _check_metric(metric: Metric, shape: tuple[int, ...]) -> None:
    """Refuse a metric that is not of the streams and channels of values of a shape, or not finite."""
    if metric is None:
        return
    *streams, _, channels = shape
    if metric.shape not in ((*streams, channels), (*streams, channels, channels)):
        raise ShapeError(
            f"metric {metric.shape} of values {shape}: need {(*streams, channels)}, or a matrix of each stream"
        )
    check_finite(metric, "metric")


def _offset(table: Float32[np.ndarray, "*streams centroids channels"]) -> Float32[np.ndarray, "*streams 1 channels"]:
    """Mean centroid, rounded to BF16."""
    return table.mean(axis=-2, keepdims=True).astype(BF16).astype(np.float32)


def _scores(
    points: Float32[np.ndarray, "*streams tokens channels"],
    table: Float32[np.ndarray, "*streams centroids channels"],
    metric: Metric,
) -> Float32[np.ndarray, "*streams tokens centroids"]:
    """Distance of every token to every centroid, less the token's own norm, which no argmin sees."""
    if metric is None:
        weighted = table
    elif metric.ndim == table.ndim:
        weighted = table @ metric
    else:
        weighted = table * metric[..., None, :]
    norms = (table * weighted).sum(axis=-1)
    scores = points @ np.swapaxes(np.float32(-2) * weighted, -1, -2)
    scores += norms[..., None, :]
    return scores


def _means(
    points: Float32[np.ndarray, "streams tokens channels"],
    index: Int[np.ndarray, "streams tokens"],
    table: Float32[np.ndarray, "streams centroids channels"],
) -> Float32[np.ndarray, "streams centroids channels"]:
    """Mean of every cluster; an empty one keeps its centroid."""
    streams, size, channels = table.shape
    rows = (index + size * np.arange(streams)[:, None]).ravel()
    members = scipy.sparse.csr_array(
        (np.ones(rows.size, np.float32), rows, np.arange(rows.size + 1)), shape=(rows.size, streams * size)
    )
    sums = (members.T @ points.reshape(-1, channels)).reshape(table.shape)
    counts = np.bincount(rows, minlength=streams * size).reshape(streams, size, 1)
    return np.where(counts > 0, sums / np.maximum(counts, 1).astype(np.float32), table)


explain_errors(globals())
