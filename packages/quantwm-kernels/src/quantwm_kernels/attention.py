"""Exact attention and what a key error does to it, on torch tensors. See :mod:`quantwm_core.attention`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from quantwm_core import attention as core
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.dense_attention import (
    dense_attend,
    dense_attention_kl,
    dense_logit_error,
    dense_logits,
    dense_selection_shift,
)


def logit_shape(queries: Sequence[int], keys: Sequence[int]) -> tuple[int, ...]:
    """Shape of the logits of ``[B, Hq, T, D]`` queries against ``[B, H, N, D]`` keys.

    >>> logit_shape((1, 8, 100, 64), (1, 2, 30, 64))
    (1, 8, 100, 30)
    """
    return (*queries[:-1], keys[-2])


def output_shape(queries: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """Shape of what ``[B, Hq, T, D]`` queries make of ``[B, H, N, D']`` values.

    >>> output_shape((1, 8, 100, 64), (1, 2, 30, 32))
    (1, 8, 100, 32)
    """
    return (*queries[:-1], values[-1])


def head_shape(logits: Sequence[int]) -> tuple[int, ...]:
    """Shape of one figure per head.

    >>> head_shape((1, 8, 100, 30))
    (1, 8)
    """
    return tuple(logits[:-2])


@torch.library.custom_op("quantwm::attend", mutates_args=())
def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    result = core.attend(to_numpy(queries, "queries"), to_numpy(keys, "keys"), to_numpy(values, "values"))
    return owned(result, output_shape(queries.shape, values.shape))


@_attend.register_kernel("cuda")
def _(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    check_detached(queries, "queries")
    check_detached(keys, "keys")
    check_detached(values, "values")
    return dense_attend(queries, keys, values)


@_attend.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    del keys
    return queries.new_empty(output_shape(queries.shape, values.shape), dtype=torch.float32)


@torch.library.custom_op("quantwm::attention_logits", mutates_args=())
def _logits(queries: Tensor, keys: Tensor) -> Tensor:
    result = core.logits(to_numpy(queries, "queries"), to_numpy(keys, "keys"))
    return owned(result, logit_shape(queries.shape, keys.shape))


@_logits.register_kernel("cuda")
def _(queries: Tensor, keys: Tensor) -> Tensor:
    check_detached(queries, "queries")
    check_detached(keys, "keys")
    return dense_logits(queries, keys)


@_logits.register_fake
def _(queries: Tensor, keys: Tensor) -> Tensor:
    return queries.new_empty(logit_shape(queries.shape, keys.shape), dtype=torch.float32)


@torch.library.custom_op("quantwm::logit_error", mutates_args=())
def _logit_error(exact: Tensor, approximate: Tensor) -> Tensor:
    result = core.logit_error(to_numpy(exact, "exact logits"), to_numpy(approximate, "approximate logits"))
    return owned(result, head_shape(exact.shape))


@_logit_error.register_kernel("cuda")
def _(exact: Tensor, approximate: Tensor) -> Tensor:
    check_detached(exact, "exact logits")
    check_detached(approximate, "approximate logits")
    return dense_logit_error(exact, approximate)


@_logit_error.register_fake
def _(exact: Tensor, approximate: Tensor) -> Tensor:
    del approximate
    return exact.new_empty(head_shape(exact.shape))


@torch.library.custom_op("quantwm::selection_shift", mutates_args=())
def _selection_shift(exact: Tensor, approximate: Tensor, top: int) -> Tensor:
    result = core.selection_shift(to_numpy(exact, "exact logits"), to_numpy(approximate, "approximate logits"), top)
    return owned(result, head_shape(exact.shape))


@_selection_shift.register_kernel("cuda")
def _(exact: Tensor, approximate: Tensor, top: int) -> Tensor:
    check_detached(exact, "exact logits")
    check_detached(approximate, "approximate logits")
    return dense_selection_shift(exact, approximate, top)


@_selection_shift.register_fake
def _(exact: Tensor, approximate: Tensor, top: int) -> Tensor:
    del approximate, top
    return exact.new_empty(head_shape(exact.shape))


@torch.library.custom_op("quantwm::attention_kl", mutates_args=())
def _attention_kl(exact: Tensor, approximate: Tensor) -> Tensor:
    result = core.attention_kl(to_numpy(exact, "exact logits"), to_numpy(approximate, "approximate logits"))
    return owned(result, head_shape(exact.shape))


@_attention_kl.register_kernel("cuda")
def _(exact: Tensor, approximate: Tensor) -> Tensor:
    check_detached(exact, "exact logits")
    check_detached(approximate, "approximate logits")
    return dense_attention_kl(exact, approximate)


@_attention_kl.register_fake
def _(exact: Tensor, approximate: Tensor) -> Tensor:
    del approximate
    return exact.new_empty(head_shape(exact.shape))


def attend(
    queries: Float[Tensor, "batch query_heads queries channels"],
    keys: Float[Tensor, "batch heads tokens channels"],
    values: Float[Tensor, "batch heads tokens value_channels"],
) -> Float32[Tensor, "batch query_heads queries value_channels"]:
    """Dense, unmasked softmax attention, FP32; grouped query heads share the KV head they belong to.

    Raises:
        ShapeError: Batches, channels or head counts do not fit.

    >>> one = torch.ones(1, 1, 2, 4)
    >>> attend(one, one, one).shape
    torch.Size([1, 1, 2, 4])
    """
    result: Tensor = _attend(queries, keys, values)
    return result


def logits(
    queries: Float[Tensor, "batch query_heads queries channels"], keys: Float[Tensor, "batch heads tokens channels"]
) -> Float32[Tensor, "batch query_heads queries tokens"]:
    """``q k^T / sqrt(D)``.

    Raises:
        ShapeError: Batches, channels or head counts do not fit.

    >>> logits(torch.tensor([[[[2.0, 0.0, 0.0, 0.0]]]]), torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]])).item()
    1.0
    """
    result: Tensor = _logits(queries, keys)
    return result


def logit_error(
    exact: Float32[Tensor, "*heads queries tokens"], approximate: Float32[Tensor, "*heads queries tokens"]
) -> Float32[Tensor, "*heads"]:
    """Relative logit error per head: squared error over variance, both centred per query over the tokens.

    Raises:
        ShapeError: The two are not of the same shape.

    >>> exact = torch.tensor([[[0.0, 2.0]]])
    >>> logit_error(exact, exact + 5), logit_error(exact, exact * 1.5)
    (tensor([0.]), tensor([0.2500]))
    """
    result: Tensor = _logit_error(exact, approximate)
    return result


def selection_shift(
    exact: Float32[Tensor, "*heads queries tokens"],
    approximate: Float32[Tensor, "*heads queries tokens"],
    top: int = 1,
) -> Float32[Tensor, "*heads"]:
    """Share of queries whose selected past tokens change (paper: selection-shift ratio).

    Raises:
        ParameterError: ``top`` is not between 1 and the number of tokens.
        ShapeError: The two are not of the same shape.

    >>> selection_shift(torch.tensor([[[1.0, 2.0], [3.0, 0.0]]]), torch.tensor([[[3.0, 2.0], [3.0, 0.0]]]))
    tensor([0.5000])
    """
    result: Tensor = _selection_shift(exact, approximate, top)
    return result


def attention_kl(
    exact: Float32[Tensor, "*heads queries tokens"], approximate: Float32[Tensor, "*heads queries tokens"]
) -> Float32[Tensor, "*heads"]:
    """Mean Kullback-Leibler divergence of the approximate attention from the exact one, in nats.

    Raises:
        ShapeError: The two are not of the same shape.

    >>> attention_kl(torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.0, 1.0]]]))
    tensor([0.])
    """
    result: Tensor = _attention_kl(exact, approximate)
    return result
