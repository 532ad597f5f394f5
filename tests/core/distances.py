"""Distances in FP64, and whether an index is nearest up to what FP32 can tell."""

import numpy as np

from quantwm_core.codebook import Metric
from tests.core import tolerances


def exact(points: np.ndarray, table: np.ndarray, metric: Metric) -> np.ndarray:
    """Squared distances ``[*streams, tokens, centroids]`` by subtraction, FP64."""
    error = points.astype(np.float64)[..., :, None, :] - table.astype(np.float64)[..., None, :, :]
    if metric is None:
        return np.asarray(np.square(error).sum(axis=-1))
    wide = metric.astype(np.float64)
    if metric.ndim == table.ndim:
        return np.asarray(np.einsum("...nci,...ij,...ncj->...nc", error, wide, error))
    return np.asarray((np.square(error) * wide[..., None, None, :]).sum(axis=-1))


def assert_nearest(
    index: np.ndarray,
    points: np.ndarray,
    table: np.ndarray,
    metric: Metric,
    frame: bool = True,
    near_tie: float = tolerances.NEAR_TIE,
) -> None:
    """``index[..., j]`` is the ``j``-th nearest centroid of every token, near ties excepted.

    Args:
        index: ``[*streams, tokens, count]``.
        frame: Whether centroids may also be confused that are closer to each other than to the mean centroid.
        near_tie: Share of a distance by which another may exceed it and pass for the same.
    """
    distance = exact(points, table, metric)
    allowed = near_tie * np.sort(distance, axis=-1)[..., : index.shape[-1]]
    if frame:
        middle = table.astype(np.float64).mean(axis=-2, keepdims=True)
        size = exact(points, middle, metric) + exact(table, middle, metric).max(axis=-2, keepdims=True)
        allowed = allowed + tolerances.EXPANDED_DISTANCE * size
    excess = np.take_along_axis(distance, index, axis=-1) - np.sort(distance, axis=-1)[..., : index.shape[-1]]
    bad = np.abs(excess) > allowed
    assert not bad.any(), (
        f"{int(bad.sum())} of {bad.size} are not nearest, worst by {(excess / np.maximum(allowed, 1e-300)).max()}"
    )
    if index.shape[-1] > 1:
        assert (np.diff(np.sort(index, axis=-1), axis=-1) > 0).all(), "a centroid is named twice"
