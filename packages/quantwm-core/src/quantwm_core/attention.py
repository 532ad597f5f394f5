"""Exact attention, and three measures of what a key error does to it.

Everything here is FP32 on whole matrices: a reference, not a way to run a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float32

from quantwm_core.arguments import explain_errors
from quantwm_core.domain import check_finite
from quantwm_core.errors import ParameterError, ShapeError


def logits(
    queries: Float[np.ndarray, "batch query_heads queries channels"],
    keys: Float[np.ndarray, "batch heads tokens channels"],
) -> Float32[np.ndarray, "batch query_heads queries tokens"]:
    """``q k^T / sqrt(D)``; grouped query heads share the KV head they belong to.

    Raises:
        ShapeError: Batches, channels or head counts do not fit.

    >>> logits(np.float32([[[[2.0, 0.0, 0.0, 0.0]]]]), np.float32([[[[1.0, 0.0, 0.0, 0.0]]]])).item()
    1.0
    """
    fits = queries.ndim == keys.ndim == 4 and queries.shape[::3] == keys.shape[::3]
    if not fits or queries.shape[1] % keys.shape[1]:
        raise ShapeError(
            f"queries {queries.shape} and keys {keys.shape}: need [B, Hq, T, D] and [B, H, N, D] with Hq a multiple of H"
        )
    batch, heads, count, channels = queries.shape
    grouped = queries.astype(np.float32).reshape(batch, keys.shape[1], -1, channels)
    product = grouped @ np.swapaxes(keys.astype(np.float32), -1, -2) / np.float32(np.sqrt(channels))
    return product.reshape(batch, heads, count, keys.shape[2])


def softmax(scores: Float32[np.ndarray, "... tokens"]) -> Float32[np.ndarray, "... tokens"]:
    """Softmax over the last axis.

    >>> softmax(np.float32([0.0, 0.0]))
    array([0.5, 0.5], dtype=float32)
    """
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def log_sum_exp(scores: Float32[np.ndarray, "... tokens"]) -> Float32[np.ndarray, "..."]:
    """Natural logarithm of the sum of exponentials over the last axis: what two attentions are merged with.

    >>> log_sum_exp(np.float32([1000.0, -1000.0]))
    array(1000., dtype=float32)
    """
    highest = scores.max(axis=-1, keepdims=True)
    total = np.exp(scores - highest).sum(axis=-1, keepdims=True)
    return np.asarray((highest + np.log(total))[..., 0])


def attend(
    queries: Float[np.ndarray, "batch query_heads queries channels"],
    keys: Float[np.ndarray, "batch heads tokens channels"],
    values: Float[np.ndarray, "batch heads tokens value_channels"],
) -> Float32[np.ndarray, "batch query_heads queries value_channels"]:
    """Dense, unmasked softmax attention, FP32.

    Raises:
        ShapeError: Batches, channels, tokens or head counts do not fit.

    >>> one = np.ones((1, 1, 2, 4), np.float32)
    >>> attend(one, one, one).shape
    (1, 1, 2, 4)
    """
    weights = softmax(logits(queries, keys))
    if values.shape[:-1] != keys.shape[:-1]:
        raise ShapeError(f"keys {keys.shape} and values {values.shape}: need the same B, H and N")
    return averaged(weights, values)


def averaged(
    weights: Float32[np.ndarray, "batch query_heads queries tokens"],
    values: Float[np.ndarray, "batch heads tokens value_channels"],
) -> Float32[np.ndarray, "batch query_heads queries value_channels"]:
    """Values weighted by what :func:`softmax` gave, for query heads that may share KV heads.

    >>> averaged(np.full((1, 2, 1, 4), 0.25, np.float32), np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1)).ravel()
    array([1.5, 1.5], dtype=float32)
    """
    batch, heads, tokens, channels = values.shape
    grouped = weights.reshape(batch, heads, -1, tokens) @ values.astype(np.float32)
    return grouped.reshape(*weights.shape[:-1], channels)


def logit_error(
    exact: Float32[np.ndarray, "*heads queries tokens"], approximate: Float32[np.ndarray, "*heads queries tokens"]
) -> Float32[np.ndarray, "*heads"]:
    """Relative logit error per head: squared error over variance, both centred per query over the tokens.

    A constant shift of a query's logits changes no attention weight, hence the centring. 0 is exact; 1 is as bad as
    equal logits. Heads whose logits do not vary at all give 0.

    Raises:
        ShapeError: The two are not of the same shape.
        DomainError: A logit is NaN or infinite.

    >>> exact = np.float32([[[0.0, 2.0]]])
    >>> logit_error(exact, exact + 5), logit_error(exact, exact * 1.5)
    (array([0.], dtype=float32), array([0.25], dtype=float32))
    """
    _check_logits(exact, approximate)
    difference = approximate - exact
    difference = difference - difference.mean(axis=-1, keepdims=True)
    spread = exact - exact.mean(axis=-1, keepdims=True)
    power = np.square(spread).sum(axis=(-2, -1))
    error = np.square(difference).sum(axis=(-2, -1))
    return np.where(power > 0, error / np.where(power > 0, power, 1), 0).astype(np.float32)


def check_alike(exact: Sequence[int], approximate: Sequence[int]) -> None:
    """Raise :class:`ShapeError` for logits of other queries or tokens, which would be compared by broadcasting or not at all.

    >>> check_alike((2, 4, 8), (2, 4, 8))
    """
    if tuple(exact) != tuple(approximate):
        raise ShapeError(f"exact logits {tuple(exact)} and approximate ones {tuple(approximate)}: need the same shape")


def _check_logits(exact: np.ndarray, approximate: np.ndarray) -> None:
    """Refuse what no measure compares: of NaN, one would be 0 or anything."""
    check_alike(exact.shape, approximate.shape)
    check_finite(exact, "exact logits")
    check_finite(approximate, "approximate logits")


def selection_shift(
    exact: Float32[np.ndarray, "*heads queries tokens"],
    approximate: Float32[np.ndarray, "*heads queries tokens"],
    top: int = 1,
) -> Float32[np.ndarray, "*heads"]:
    """Share of queries whose selected past tokens change (paper: selection-shift ratio).

    ``top = 1`` compares the index of the largest logit; ``top = k`` gives ``1 - overlap / k`` of the k largest, averaged.

    Raises:
        ParameterError: ``top`` is not between 1 and the number of tokens.
        ShapeError: The two are not of the same shape.
        DomainError: A logit is NaN or infinite, as a mask would make it: leave masked tokens out.

    >>> selection_shift(np.float32([[[1.0, 2.0], [3.0, 0.0]]]), np.float32([[[3.0, 2.0], [3.0, 0.0]]]))
    array([0.5], dtype=float32)
    """
    _check_logits(exact, approximate)
    tokens = exact.shape[-1]
    if not 1 <= top <= tokens:
        raise ParameterError(f"top {top} of {tokens} tokens: need 1 to {tokens}")
    if top == 1:
        return np.asarray(np.mean(exact.argmax(-1) != approximate.argmax(-1), axis=-1), np.float32)
    chosen = [np.argsort(-scores, axis=-1, kind="stable")[..., :top] for scores in (exact, approximate)]
    hits = (chosen[0][..., :, None] == chosen[1][..., None, :]).any(axis=-1)
    return np.asarray(1 - np.mean(hits, axis=(-2, -1)), np.float32)


def attention_kl(
    exact: Float32[np.ndarray, "*heads queries tokens"], approximate: Float32[np.ndarray, "*heads queries tokens"]
) -> Float32[np.ndarray, "*heads"]:
    """Mean Kullback-Leibler divergence of the approximate attention from the exact one, in nats.

    Raises:
        ShapeError: The two are not of the same shape.
        DomainError: A logit is NaN or infinite.

    >>> attention_kl(np.float32([[[0.0, 1.0]]]), np.float32([[[0.0, 1.0]]]))
    array([0.], dtype=float32)
    """
    _check_logits(exact, approximate)
    logs = [scores - scores.max(-1, keepdims=True) for scores in (exact, approximate)]
    logs = [log - np.log(np.exp(log).sum(axis=-1, keepdims=True)) for log in logs]
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1).mean(axis=-1)


explain_errors(globals())
