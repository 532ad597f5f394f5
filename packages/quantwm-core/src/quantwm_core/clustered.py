"""A centroid index per token and a 2-bit residual: what QVG and QuantWM share, and how it is laid out in a chunk."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import BFloat16, Float32, UInt8

from quantwm_core import affine, integer_table, rounding
from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16

AFFINE_PARTS = ("codes", "scales", "zero_points", "super_scale")
PARTS = (*AFFINE_PARTS, "index", "centroids")
TABLE_SCALES = "centroid_scales"


def gather(
    centroids: BFloat16[np.ndarray, "*streams centroids channels"], index: UInt8[np.ndarray, "*streams tokens"]
) -> Float32[np.ndarray, "*streams tokens channels"]:
    """Each token's centroid in FP32.

    >>> gather(np.array([[[1.0], [2.0]]], "bfloat16"), np.uint8([[1, 0, 1]])).ravel()
    array([2., 1., 2.], dtype=float32)
    """
    return np.take_along_axis(centroids.astype(np.float32), index[..., None].astype(np.int64), axis=-2)


def affine_arrays(code: affine.AffineCode) -> dict[str, np.ndarray]:
    """Arrays of an affine code under the names they bear in a sealed chunk."""
    return {part: getattr(code, part) for part in AFFINE_PARTS}


def affine_code(arrays: Mapping[str, np.ndarray]) -> affine.AffineCode:
    """Inverse of :func:`affine_arrays`."""
    return affine.AffineCode(**{part: arrays[part] for part in AFFINE_PARTS})


def table(arrays: Mapping[str, np.ndarray]) -> BFloat16[np.ndarray, "*streams centroids channels"]:
    """Centroids of a sealed tensor, whichever way they are stored."""
    stored: np.ndarray = arrays["centroids"]
    return stored if stored.dtype == BF16 else integer_table.decode(stored, arrays[TABLE_SCALES])


def encode(
    values: Float32[np.ndarray, "*streams tokens channels"],
    centroids: BFloat16[np.ndarray, "*streams centroids channels"],
    index: UInt8[np.ndarray, "*streams tokens"],
    group_size: int,
    scale_candidates: int = 1,
    feedback: Float32[np.ndarray, "*streams channels channels"] | None = None,
) -> dict[str, np.ndarray]:
    """Code ``values`` against their centroids; the residual is taken from the stored centroid.

    Args:
        values: What is coded.
        centroids: Stored codebook.
        index: Centroid of each token.
        group_size: Channels per scale.
        scale_candidates: See :func:`quantwm_core.affine.encode_groups`.
        feedback: Matrix of :func:`quantwm_core.rounding.feedback`; None rounds each channel for itself.
    """
    residual = values - gather(centroids, index)
    code = affine.encode(residual, group_size, scale_candidates)
    if feedback is not None:
        code = rounding.refine(residual, code, feedback)
    return {**affine_arrays(code), "index": index, "centroids": centroids}


def decode(arrays: Mapping[str, np.ndarray], start: int, stop: int) -> Float32[np.ndarray, "*streams tokens channels"]:
    """``c + x^`` for tokens ``start`` to ``stop``, FP32, not yet rounded to BF16."""
    base = gather(table(arrays), arrays["index"][..., start:stop])
    return base + affine.decode(affine_code(arrays), start, stop)


explain_errors(globals())
