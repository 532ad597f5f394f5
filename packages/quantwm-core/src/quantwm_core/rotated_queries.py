"""Logits of a transform code without its keys: queries are rotated into its basis instead.

``q . k^ = q . (mean + z W) = q . mean + (W q) . z`` with the levels ``z`` of a token's codes and the matrix ``W`` of its stream.
``W q`` is the same for all tokens of a unit, so a key is never made; what is multiplied is as long as there are directions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Float32

from quantwm_core import allocation, blocks, directions, transform
from quantwm_core.arguments import explain_errors
from quantwm_core.errors import ShapeError


def logits(
    queries: Float[np.ndarray, "batch query_heads queries channels"],
    arrays: Mapping[str, np.ndarray],
    shape: tuple[int, int, int, int],
    start: int,
    stop: int,
) -> Float32[np.ndarray, "batch query_heads queries range"]:
    """``q k^T / sqrt(D)`` with tokens ``start`` to ``stop`` of keys that were sealed with a transform code, in FP32.

    Args:
        queries: In the frame of the keys; grouped heads share the KV head they belong to.
        arrays: Of the sealed tensor.
        shape: ``[B, H, N, D]`` of the keys.
        start, stop: Range of tokens.

    Raises:
        ShapeError: Queries and keys do not fit, or the arrays do not fit together.

    >>> from quantwm_core import attention, methods
    >>> rng = np.random.default_rng(0)
    >>> keys, queries = rng.normal(size=(2, 1, 2, 64, 32)).astype("bfloat16")
    >>> sealed = methods.get("klt", bits=4.0).seal("keys", keys)
    >>> rotated = logits(queries, sealed.arrays, sealed.shape, 0, 64)
    >>> plain = attention.logits(queries, methods.get("klt").decode(sealed))
    >>> bool(np.abs(rotated - plain).max() < 0.02)
    True
    """
    batch, heads, tokens, channels = shape
    if queries.ndim != 4 or queries.shape[::3] != (batch, channels) or queries.shape[1] % heads:
        raise ShapeError(f"queries {queries.shape} for keys {shape}: need [B, Hq, T, D] with Hq a multiple of H")
    grouped = queries.astype(np.float32).reshape(batch, heads, -1, channels)
    made = np.empty((*grouped.shape[:3], stop - start), np.float32)
    for place, counts, packed, matrix in transform.stored(arrays, tokens):
        codes = blocks.unpack(packed[start:stop], counts)
        levels = directions.levels(codes, allocation.widths(counts))
        rotated = grouped[place] @ matrix.astype(np.float32).T
        made[place] = rotated @ levels.T + (grouped[place] @ arrays["means"][place].astype(np.float32))[:, None]
    scaled = made / np.float32(np.sqrt(channels))
    return scaled.reshape(*queries.shape[:3], stop - start)


explain_errors(globals())
