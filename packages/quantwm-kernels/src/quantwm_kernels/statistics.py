"""Second moments of queries on torch tensors, and what is read off them. See :mod:`quantwm_core.statistics`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor

from quantwm_core import statistics as core
from quantwm_core.errors import StateError
from quantwm_kernels.bridge import check_detached, is_eager_cuda, owned, to_numpy
from quantwm_kernels.launch import check_available


class QueryMoment(NamedTuple):
    """Second moment of a set of queries.

    Attributes:
        mean: FP32 ``[B, H, D, D]``, ``E[q q^T]`` per KV head.
        queries: Queries per KV head that the mean is over.
    """

    mean: Float32[Tensor, "batch heads channels channels"]
    queries: int

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self.mean.untyped_storage().nbytes()


def moment_shape(queries: Sequence[int], kv_heads: int) -> tuple[int, ...]:
    """Shape of the second moment of ``[B, Hq, T, D]`` queries.

    >>> moment_shape((1, 8, 100, 64), 2)
    (1, 2, 64, 64)
    """
    return queries[0], kv_heads, queries[-1], queries[-1]


def basis_shapes(mean: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the principal basis and of its energies.

    >>> basis_shapes((1, 2, 64, 64), 8)
    ((1, 2, 64, 8), (1, 2, 8))
    """
    return (*mean[:-1], rank), (*mean[:-2], rank)


@torch.library.custom_op("quantwm::second_moment", mutates_args=())
def _second_moment(queries: Tensor, kv_heads: int) -> Tensor:
    moment = core.second_moment(to_numpy(queries, "queries"), kv_heads)
    return owned(moment.mean, moment_shape(queries.shape, kv_heads))


def _second_moment_by_kernels(queries: Tensor, kv_heads: int, before: QueryMoment | None) -> QueryMoment:
    check_detached(queries, "queries")
    check_available("queries")
    from quantwm_kernels.triton import statistics as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.second_moment(queries, kv_heads, before)


@_second_moment.register_kernel("cuda")
def _(queries: Tensor, kv_heads: int) -> Tensor:
    return _second_moment_by_kernels(queries, kv_heads, None).mean


@_second_moment.register_fake
def _(queries: Tensor, kv_heads: int) -> Tensor:
    return queries.new_empty(moment_shape(queries.shape, kv_heads), dtype=torch.float32)


@torch.library.custom_op("quantwm::fold_moment", mutates_args=())
def _fold(past: Tensor, past_queries: int, unit: Tensor, unit_queries: int, decay: float | None) -> Tensor:
    moments = [
        core.QueryMoment(to_numpy(mean, "query moment"), count)
        for mean, count in ((past, past_queries), (unit, unit_queries))
    ]
    folded = core.QueryStatistics(*moments).sealed(decay).past
    if folded is None:  # two moments fold into one; the type does not say so
        raise StateError("folding two query moments left none")
    return owned(folded.mean, past.shape)


@_fold.register_kernel("cuda")
def _fold_by_kernels(past: Tensor, past_queries: int, unit: Tensor, unit_queries: int, decay: float | None) -> Tensor:
    check_detached(past, "query moment")
    check_detached(unit, "query moment")
    check_available("query moment")
    from quantwm_kernels.triton import statistics as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.merge(QueryMoment(past, past_queries), QueryMoment(unit, unit_queries), decay).mean


@_fold.register_fake
def _(past: Tensor, past_queries: int, unit: Tensor, unit_queries: int, decay: float | None) -> Tensor:
    del past_queries, unit, unit_queries, decay
    return past.new_empty(past.shape)


@torch.library.custom_op("quantwm::sensitivity", mutates_args=())
def _sensitivity(mean: Tensor) -> Tensor:
    return owned(core.sensitivity(to_numpy(mean, "query moment")), mean.shape[:-1])


@_sensitivity.register_kernel("cuda")
def _(mean: Tensor) -> Tensor:
    check_detached(mean, "query moment")
    check_available("query moment")
    from quantwm_kernels.triton import statistics as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.sensitivity(mean)


@_sensitivity.register_fake
def _(mean: Tensor) -> Tensor:
    return mean.new_empty(mean.shape[:-1])


@torch.library.custom_op("quantwm::normalised_moment", mutates_args=())
def _normalised(mean: Tensor) -> Tensor:
    return owned(core.normalised(to_numpy(mean, "query moment")), mean.shape)


@_normalised.register_kernel("cuda")
def _(mean: Tensor) -> Tensor:
    check_detached(mean, "query moment")
    check_available("query moment")
    from quantwm_kernels.triton import statistics as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.normalised(mean)


@_normalised.register_fake
def _(mean: Tensor) -> Tensor:
    return mean.new_empty(mean.shape)


@torch.library.custom_op("quantwm::principal_basis", mutates_args=())
def _principal_basis(mean: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    shapes = basis_shapes(mean.shape, rank)
    basis, energies = core.principal_basis(to_numpy(mean, "query moment"), rank)
    return owned(basis, shapes[0]), owned(energies, shapes[1])


@_principal_basis.register_kernel("cuda")
def _(mean: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    check_detached(mean, "query moment")
    check_available("query moment")
    from quantwm_kernels.triton import statistics as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.principal_basis(mean, rank)


@_principal_basis.register_fake
def _(mean: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    basis, energies = basis_shapes(mean.shape, rank)
    return mean.new_empty(basis, dtype=torch.bfloat16), mean.new_empty(energies)


def second_moment(
    queries: Float[Tensor, "batch query_heads tokens channels"], kv_heads: int, before: QueryMoment | None = None
) -> QueryMoment:
    """Second moment of one attention call's queries; no query is kept.

    Args:
        queries: BF16, FP16 or FP32 ``[B, Hq, T, D]`` of any strides, in the frame of the cached keys.
        kv_heads: KV heads ``H``; a grouped head's queries are pooled.
        before: Moment of queries that are counted, too, as if it were merged with theirs.

    Raises:
        ShapeError: As :func:`quantwm_core.statistics.second_moment`, or ``before`` does not fit.
        DeviceError: On a GPU, ``before`` lives elsewhere.
        DomainError: On a CPU, the same for numbers. On a GPU nothing is waited for: NaN, Inf and what is too large become
            part of the moment, and the unit that is sealed with it is refused.

    >>> second_moment(torch.tensor([[[[1.0, 2.0], [3.0, 0.0]]]]), 1).mean.squeeze()
    tensor([[5., 1.],
            [1., 2.]])
    """
    if is_eager_cuda(queries, *(() if before is None else (before.mean,))):
        return _second_moment_by_kernels(queries, kv_heads, before)
    mean: Tensor = _second_moment(queries, kv_heads)
    moment = QueryMoment(mean, queries.shape[1] // kv_heads * queries.shape[2])
    return moment if before is None else merge(before, moment)


def merge(first: QueryMoment, second: QueryMoment, decay: float | None = None) -> QueryMoment:
    """Moment of two sets of queries together.

    Args:
        first: The older queries.
        second: The newer ones.
        decay: None counts every query equally; ``0 <= decay < 1`` forgets: ``decay * first + (1 - decay) * second``.

    Raises:
        ShapeError, ParameterError: The moments do not fit, or the decay is out of range.
        DeviceError: They live on two devices.

    >>> one, two = (second_moment(torch.full((1, 1, 1, 1), x), 1) for x in (2.0, 4.0))
    >>> merge(one, two).mean.item(), merge(one, two, decay=0.75).mean.item()
    (10.0, 7.0)
    """
    run = _fold_by_kernels if is_eager_cuda(first.mean, second.mean) else _fold
    mean: Tensor = run(first.mean, first.queries, second.mean, second.queries, decay)
    return QueryMoment(mean, first.queries + second.queries)


def sensitivity(mean: Float32[Tensor, "*streams channels channels"]) -> Float32[Tensor, "*streams channels"]:
    """Channel weights ``w_j = M_jj / mean_j M_jj``; all ones where ``M`` is zero.

    >>> sensitivity(torch.tensor([[[1.0, 0.0], [0.0, 3.0]]]))
    tensor([[0.5000, 1.5000]])
    """
    result: Tensor = _sensitivity(mean)
    return result


def normalised(mean: Float32[Tensor, "*streams channels channels"]) -> Float32[Tensor, "*streams channels channels"]:
    """``M / mean_j M_jj``; the identity where ``M`` is zero.

    >>> normalised(torch.zeros(1, 2, 2))
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    result: Tensor = _normalised(mean)
    return result


def principal_basis(
    mean: Float32[Tensor, "*streams channels channels"], rank: int
) -> tuple[BFloat16[Tensor, "*streams channels rank"], Float32[Tensor, "*streams rank"]]:
    """The ``rank`` eigenvectors of ``M`` with the largest eigenvalues.

    Returns:
        BF16 basis ``[*streams, D, rank]``, largest eigenvalue first, and FP32 eigenvalues ``[*streams, rank]``.

    Raises:
        ParameterError: ``rank`` is not between 1 and ``D``.

    >>> basis, energies = principal_basis(torch.tensor([[[1.0, 0.0], [0.0, 4.0]]]), 1)
    >>> basis.ravel(), energies.ravel()
    (tensor([0., 1.], dtype=torch.bfloat16), tensor([4.]))
    """
    basis, energies = _principal_basis(mean, rank)
    return basis, energies
