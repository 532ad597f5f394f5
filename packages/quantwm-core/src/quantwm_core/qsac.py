"""QSAC: quantization-sensitivity-aware clustering, which centroid a key is coded against (paper, QSAC section).

A key error ``e`` costs the logits ``E[(q^T e)^2] = e^T M e``, about ``sum_j M_jj e_j^2``. Per token:

1. the ``m`` nearest centroids under the query metric;
2. among them, the one whose residual is cheapest to quantize: minimise ``sum_g W_g R_g^2`` where ``R_g`` is the range of
   group ``g`` (zero included) and ``W_g`` the summed sensitivity of its channels. Ties go to the nearer centroid.

``m = 1`` is the nearest centroid, ``m = C`` tries every one.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32, UInt8

from quantwm_core import affine, codebook
from quantwm_core.arguments import explain_errors
from quantwm_core.domain import binary_exponent, check_finite


def choose(
    keys: Float[np.ndarray, "*streams tokens channels"],
    centroids: Float[np.ndarray, "*streams centroids channels"],
    group_size: int,
    sensitivity: Float32[np.ndarray, "*streams channels"],
    metric: codebook.Metric = None,
    candidates: int = 4,
) -> UInt8[np.ndarray, "*streams tokens"]:
    """Centroid index of every key.

    Args:
        keys: ``[*streams, tokens, channels]``.
        centroids: Stored codebook, BF16.
        group_size: Channels per quantization group.
        sensitivity: Channel weights ``w``, ``[*streams, channels]``, all ones when nothing is known.
        metric: What "nearest" means in step 1; see :mod:`quantwm_core.codebook`.
        candidates: ``m``; more than there are centroids means all.

    Returns:
        uint8 ``[*streams, tokens]``.

    Raises:
        ParameterError: ``candidates`` is below 1 or the group size does not fit.
        DomainError: A number is NaN or infinite.

    The second centroid is farther, but its residual spans 1.5 instead of 2:

    >>> keys = np.zeros((1, 1, 4), np.float32)
    >>> table = np.float32([[[-1.0, 1.0, -1.0, 1.0], [-1.5, -1.5, -1.5, 0.0]]])
    >>> ones = np.ones((1, 4), np.float32)
    >>> choose(keys, table, 4, ones, candidates=1), choose(keys, table, 4, ones, candidates=2)
    (array([[0]], dtype=uint8), array([[1]], dtype=uint8))
    """
    groups = affine.check_group_size(keys.shape[-1], group_size)
    count = min(candidates, centroids.shape[-2])
    near = codebook.nearest(keys, centroids, metric, count)
    if count == 1:
        return near[..., 0].astype(np.uint8)
    exponent = binary_exponent(keys, centroids)
    points = np.ldexp(keys.astype(np.float32), -exponent)
    table = np.ldexp(centroids.astype(np.float32), -exponent)
    check_finite(sensitivity, "sensitivity")
    weights = sensitivity.reshape(*sensitivity.shape[:-1], 1, groups, group_size).sum(axis=-1)
    best_cost = np.full(keys.shape[:-1], np.inf, np.float32)
    best = np.zeros(keys.shape[:-1], np.uint8)
    for rank in range(count):
        index = near[..., rank]
        residual = points - np.take_along_axis(table, index[..., None], axis=-2)
        low, high = affine.group_range(residual, group_size)
        cost = (weights * np.square(high - low)).sum(axis=-1)
        better = cost < best_cost
        best_cost = np.where(better, cost, best_cost)
        best = np.where(better, index.astype(np.uint8), best)
    return best


explain_errors(globals())
