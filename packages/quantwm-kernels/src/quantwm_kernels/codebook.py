"""k-means and nearest centroids on torch tensors. What a metric is stands in :mod:`quantwm_core.codebook`."""

from collections.abc import Sequence

import torch
from jaxtyping import BFloat16, Float, Float32, Int64
from torch import Tensor

from quantwm_core import codebook as core
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.launch import check_available

Metric = Float32[Tensor, "..."] | None


def table_shape(values: Sequence[int], centroids: int) -> tuple[int, ...]:
    """Shape of the codebook of ``[*streams, tokens, channels]`` values: never more rows than tokens.

    >>> table_shape((2, 3, 8), 16)
    (2, 3, 8)
    """
    *streams, tokens, channels = values
    return (*streams, min(centroids, tokens), channels)


def index_shape(values: Sequence[int], count: int) -> tuple[int, ...]:
    """Shape of the ``count`` nearest centroids of every token.

    >>> index_shape((2, 3, 8), 4)
    (2, 3, 4)
    """
    return (*values[:-1], count)


@torch.library.custom_op("quantwm::fit_codebook", mutates_args=())
def _fit(
    values: Tensor,
    centroids: int,
    metric: Tensor | None,
    iterations: int,
    initial: Tensor | None,
    relaxation: float = 1.0,
) -> Tensor:
    table = core.fit(
        to_numpy(values, "values"),
        centroids,
        None if metric is None else to_numpy(metric, "metric"),
        iterations,
        None if initial is None else to_numpy(initial, "initial centroids"),
        relaxation,
    )
    return owned(table, table_shape(values.shape, centroids))


@_fit.register_kernel("cuda")
def _(
    values: Tensor,
    centroids: int,
    metric: Tensor | None,
    iterations: int,
    initial: Tensor | None,
    relaxation: float = 1.0,
) -> Tensor:
    check_detached(values, "values")
    if metric is not None:
        check_detached(metric, "metric")
    if initial is not None:
        check_detached(initial, "initial centroids")
    check_available("values")
    from quantwm_kernels.triton import codebook as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.fit(values, centroids, metric, iterations, initial, relaxation)


@_fit.register_fake
def _(
    values: Tensor,
    centroids: int,
    metric: Tensor | None,
    iterations: int,
    initial: Tensor | None,
    relaxation: float = 1.0,
) -> Tensor:
    del metric, iterations, initial, relaxation
    return values.new_empty(table_shape(values.shape, centroids), dtype=torch.bfloat16)


@torch.library.custom_op("quantwm::nearest_centroids", mutates_args=())
def _nearest(values: Tensor, centroids: Tensor, metric: Tensor | None, count: int) -> Tensor:
    index = core.nearest(
        to_numpy(values, "values"),
        to_numpy(centroids, "centroids"),
        None if metric is None else to_numpy(metric, "metric"),
        count,
    )
    return owned(index, index_shape(values.shape, count))


@_nearest.register_kernel("cuda")
def _(values: Tensor, centroids: Tensor, metric: Tensor | None, count: int) -> Tensor:
    check_detached(values, "values")
    check_detached(centroids, "centroids")
    if metric is not None:
        check_detached(metric, "metric")
    check_available("values")
    from quantwm_kernels.triton import codebook as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.nearest(values, centroids, metric, count)


@_nearest.register_fake
def _(values: Tensor, centroids: Tensor, metric: Tensor | None, count: int) -> Tensor:
    del centroids, metric
    return values.new_empty(index_shape(values.shape, count), dtype=torch.int64)


def fit(
    values: Float[Tensor, "*streams tokens channels"],
    centroids: int,
    metric: Metric = None,
    iterations: int = 10,
    initial: Float[Tensor, "*streams centroids channels"] | None = None,
    relaxation: float = 1.0,
) -> BFloat16[Tensor, "*streams centroids channels"]:
    """Lloyd's algorithm, all streams side by side, each for itself.

    Args:
        values: ``[*streams, tokens, channels]``; BF16 or FP32.
        centroids: Codebook size, 1 to 256; at most ``tokens`` rows are made.
        metric: None, ``[*streams, channels]`` or ``[*streams, channels, channels]``, FP32.
        iterations: Rounds of assignment and update, at least 0.
        initial: Warm start, ``[*streams, min(centroids, tokens), channels]``.
        relaxation: How many times the way to its cluster's mean a centroid goes, 1 (Lloyd's) to below 2; in the last
            round, the way.

    Returns:
        BF16 ``[*streams, min(centroids, tokens), channels]``.

    Raises:
        ParameterError, ShapeError: As :func:`quantwm_core.codebook.fit`.

    >>> fit(torch.tensor([[[0.0], [1.0], [10.0], [11.0]]]), 2).ravel()
    tensor([ 0.5000, 10.5000], dtype=torch.bfloat16)
    """
    result: Tensor = _fit(values, centroids, metric, iterations, initial, relaxation)
    return result


def nearest(
    values: Float[Tensor, "*streams tokens channels"],
    centroids: Float[Tensor, "*streams centroids channels"],
    metric: Metric = None,
    count: int = 1,
) -> Int64[Tensor, "*streams tokens count"]:
    """The ``count`` nearest centroids of every token, nearest first, ties to the lowest index.

    Raises:
        ParameterError: ``count`` is not between 1 and the codebook's size.

    >>> nearest(torch.tensor([[[2.0]]]), torch.tensor([[[0.0], [3.0], [1.0]]]), count=3)
    tensor([[[1, 2, 0]]])
    """
    result: Tensor = _nearest(values, centroids, metric, count)
    return result
