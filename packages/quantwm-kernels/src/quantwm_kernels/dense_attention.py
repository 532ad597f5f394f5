"""Exact attention and its measures in plain torch, FP32, for GPUs. Formulas stand in :mod:`quantwm_core.attention`.

Whole matrices of logits are made, as in the reference: this judges a cache and does not run a model.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from quantwm_core.attention import check_alike
from quantwm_core.errors import ParameterError, ShapeError
from quantwm_kernels.launch import full_precision


def dense_logits(
    queries: Float[Tensor, "batch query_heads queries channels"], keys: Float[Tensor, "batch heads tokens channels"]
) -> Float32[Tensor, "batch query_heads queries tokens"]:
    """``q k^T / sqrt(D)``; grouped query heads share the KV head they belong to.

    Raises:
        ShapeError: Batches, channels or head counts do not fit.
    """
    shapes = f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)}"
    fits = queries.ndim == keys.ndim == 4 and queries.shape[::3] == keys.shape[::3]
    if not fits or queries.shape[1] % keys.shape[1]:
        raise ShapeError(f"{shapes}: need [B, Hq, T, D] and [B, H, N, D] with Hq a multiple of H")
    batch, heads, count, channels = queries.shape
    grouped = queries.float().reshape(batch, keys.shape[1], -1, channels)
    with full_precision():
        product = grouped @ keys.float().transpose(-1, -2)
    return (product / channels**0.5).reshape(batch, heads, count, keys.shape[2])


def dense_attend(
    queries: Float[Tensor, "batch query_heads queries channels"],
    keys: Float[Tensor, "batch heads tokens channels"],
    values: Float[Tensor, "batch heads tokens value_channels"],
) -> Float32[Tensor, "batch query_heads queries value_channels"]:
    """Unmasked softmax attention.

    Raises:
        ShapeError: Batches, channels, tokens or head counts do not fit.
    """
    weights = dense_logits(queries, keys).softmax(-1)
    if values.shape[:-1] != keys.shape[:-1]:
        raise ShapeError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)}: need the same B, H and N")
    with full_precision():
        grouped = weights.reshape(*keys.shape[:2], -1, keys.shape[2]) @ values.float()
    return grouped.reshape(*queries.shape[:-1], values.shape[-1])


def dense_logit_error(
    exact: Float32[Tensor, "*heads queries tokens"], approximate: Float32[Tensor, "*heads queries tokens"]
) -> Float32[Tensor, "*heads"]:
    """Squared error over variance, both centred per query over the tokens; 0 where nothing varies.

    Raises:
        ShapeError: The two are not of the same shape.
    """
    check_alike(exact.shape, approximate.shape)
    difference = approximate - exact
    difference = difference - difference.mean(-1, keepdim=True)
    power = (exact - exact.mean(-1, keepdim=True)).square().sum((-2, -1))
    error = difference.square().sum((-2, -1))
    return torch.where(power > 0, error / torch.where(power > 0, power, 1), 0)


def dense_selection_shift(
    exact: Float32[Tensor, "*heads queries tokens"], approximate: Float32[Tensor, "*heads queries tokens"], top: int
) -> Float32[Tensor, "*heads"]:
    """Share of queries whose selected tokens change; ties go to the earlier token.

    Raises:
        ParameterError: ``top`` is not between 1 and the number of tokens.
        ShapeError: The two are not of the same shape.
    """
    check_alike(exact.shape, approximate.shape)
    tokens = exact.shape[-1]
    if not 1 <= top <= tokens:
        raise ParameterError(f"top {top} of {tokens} tokens: need 1 to {tokens}")
    if top == 1:
        return (exact.argmax(-1) != approximate.argmax(-1)).float().mean(-1)
    chosen = [scores.sort(dim=-1, descending=True, stable=True).indices[..., :top] for scores in (exact, approximate)]
    hits = (chosen[0][..., :, None] == chosen[1][..., None, :]).any(-1)
    return 1 - hits.float().mean((-2, -1))


def dense_attention_kl(
    exact: Float32[Tensor, "*heads queries tokens"], approximate: Float32[Tensor, "*heads queries tokens"]
) -> Float32[Tensor, "*heads"]:
    """Mean divergence of the approximate attention from the exact one, in nats.

    Raises:
        ShapeError: The two are not of the same shape.
    """
    check_alike(exact.shape, approximate.shape)
    logs = [scores.log_softmax(-1) for scores in (exact, approximate)]
    return (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean(-1)
