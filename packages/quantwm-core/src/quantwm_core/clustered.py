"""A centroid index per token and a 2-bit residual: what QVG and QuantWM share, and how it is laid out in a chunk."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import BFloat16, Float32, UInt8

from quantwm_core import affine

AFFINE_PARTS = ("codes", "scales", "zero_points", "super_scale")
PARTS = (*AFFINE_PARTS, "index", "centroids")


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


def encode(
    values: Float32[np.ndarray, "*streams tokens channels"],
    centroids: BFloat16[np.ndarray, "*streams centroids channels"],
    index: UInt8[np.ndarray, "*streams tokens"],
    group_size: int,
) -> dict[str, np.ndarray]:
    """Code ``values`` against their centroids; the residual is taken from the stored BF16 centroid."""
    code = affine.encode(values - gather(centroids, index), group_size)
    return {**affine_arrays(code), "index": index, "centroids": centroids}


def decode(arrays: Mapping[str, np.ndarray], start: int, stop: int) -> Float32[np.ndarray, "*streams tokens channels"]:
    """``c + x^`` for tokens ``start`` to ``stop``, FP32, not yet rounded to BF16."""
    base = gather(arrays["centroids"], arrays["index"][..., start:stop])
    return base + affine.decode(affine_code(arrays), start, stop)
