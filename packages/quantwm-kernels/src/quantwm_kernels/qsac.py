"""QSAC on torch tensors: which centroid a key is coded against. See :mod:`quantwm_core.qsac`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from quantwm_core import qsac as core
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.codebook import Metric
from quantwm_kernels.launch import check_available


def choice_shape(keys: Sequence[int]) -> tuple[int, ...]:
    """Shape of one index per token.

    >>> choice_shape((2, 3, 8))
    (2, 3)
    """
    return tuple(keys[:-1])


@torch.library.custom_op("quantwm::choose_centroids", mutates_args=())
def _choose(
    keys: Tensor, centroids: Tensor, group_size: int, sensitivity: Tensor, metric: Tensor | None, candidates: int
) -> Tensor:
    index = core.choose(
        to_numpy(keys, "keys"),
        to_numpy(centroids, "centroids"),
        group_size,
        to_numpy(sensitivity, "sensitivity"),
        None if metric is None else to_numpy(metric, "metric"),
        candidates,
    )
    return owned(index, choice_shape(keys.shape))


@_choose.register_kernel("cuda")
def _(
    keys: Tensor, centroids: Tensor, group_size: int, sensitivity: Tensor, metric: Tensor | None, candidates: int
) -> Tensor:
    check_detached(keys, "keys")
    check_detached(centroids, "centroids")
    check_detached(sensitivity, "sensitivity")
    if metric is not None:
        check_detached(metric, "metric")
    check_available("keys")
    from quantwm_kernels.triton import qsac as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.choose(keys, centroids, group_size, sensitivity, metric, candidates)


@_choose.register_fake
def _(
    keys: Tensor, centroids: Tensor, group_size: int, sensitivity: Tensor, metric: Tensor | None, candidates: int
) -> Tensor:
    del centroids, group_size, sensitivity, metric, candidates
    return keys.new_empty(choice_shape(keys.shape), dtype=torch.uint8)


def choose(
    keys: Float[Tensor, "*streams tokens channels"],
    centroids: Float[Tensor, "*streams centroids channels"],
    group_size: int,
    sensitivity: Float32[Tensor, "*streams channels"],
    metric: Metric = None,
    candidates: int = 4,
) -> UInt8[Tensor, "*streams tokens"]:
    """Centroid index of every key: among the nearest, the one whose residual is cheapest to quantize.

    Args:
        keys: ``[*streams, tokens, channels]``.
        centroids: Stored codebook, BF16.
        group_size: Channels per quantization group.
        sensitivity: Channel weights, FP32, all ones when nothing is known.
        metric: What "nearest" means; see :mod:`quantwm_core.codebook`.
        candidates: How many nearest centroids compete.

    Raises:
        ParameterError: As :func:`quantwm_core.qsac.choose`.

    >>> keys = torch.tensor([[[0.0, 4.0, 4.0, 4.0]]])
    >>> table = torch.tensor([[[0.0, 3.0, 3.0, 3.0], [-2.0, 2.0, 2.0, 2.0]]])
    >>> choose(keys, table, 4, torch.ones(1, 4), candidates=1)
    tensor([[0]], dtype=torch.uint8)
    """
    result: Tensor = _choose(keys, centroids, group_size, sensitivity, metric, candidates)
    return result
