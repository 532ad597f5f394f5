"""PSAC on torch tensors: rank-r coefficients of the key error. Layouts are drawn in :mod:`quantwm_core.psac`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Float32, Int8, Int32, UInt8
from torch import Tensor

from quantwm_core import packing
from quantwm_core import psac as core
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.launch import check_available


class PsacCode(NamedTuple):
    """Coefficients of a unit's streams; fields as in :class:`quantwm_core.psac.PsacCode`, ``layout`` flattened."""

    scales: BFloat16[Tensor, "*streams rank"]
    dense: Int8[Tensor, "dense tokens rank"] | UInt8[Tensor, "dense tokens pairs"]
    layout: UInt8[Tensor, " streams"]
    bitmap: UInt8[Tensor, "sparse bytes"]
    values: Int8[Tensor, " values"]
    counts: Int32[Tensor, "sparse blocks"]


def coefficient_shape(error: Sequence[int], rank: int) -> tuple[int, ...]:
    """Shape of the coefficients of ``[*streams, tokens, channels]``.

    >>> coefficient_shape((2, 3, 64), 8)
    (2, 3, 8)
    """
    return (*error[:-1], rank)


def decoded_shape(scales: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Shape of the coefficients of a token range, from the shape of their scales.

    >>> decoded_shape((2, 8), 1, 3)
    (2, 2, 8)
    """
    return (*scales[:-1], stop - start, scales[-1])


@torch.library.custom_op("quantwm::project_error", mutates_args=())
def _project(error: Tensor, basis: Tensor) -> Tensor:
    result = core.project(to_numpy(error, "error"), to_numpy(basis, "basis"))
    return owned(result, coefficient_shape(error.shape, basis.shape[-1]))


@_project.register_kernel("cuda")
def _(error: Tensor, basis: Tensor) -> Tensor:
    check_detached(error, "error")
    check_detached(basis, "basis")
    check_available("error")
    from quantwm_kernels.triton import psac as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.project(error, basis)


@_project.register_fake
def _(error: Tensor, basis: Tensor) -> Tensor:
    return error.new_empty(coefficient_shape(error.shape, basis.shape[-1]))


@torch.library.custom_op("quantwm::encode_psac", mutates_args=())
def _encode(
    error: Tensor, basis: Tensor, energies: Tensor, threshold: float, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = (to_numpy(error, "error"), to_numpy(basis, "basis"), to_numpy(energies, "energies"))
    code = core.encode(*arguments, threshold, bits)
    return (
        owned(code.scales),
        owned(code.dense),
        owned(code.layout.ravel()),
        owned(code.bitmap),
        owned(code.values),
        owned(code.counts),
    )


@_encode.register_kernel("cuda")
def _(
    error: Tensor, basis: Tensor, energies: Tensor, threshold: float, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_detached(error, "error")
    check_detached(basis, "basis")
    check_detached(energies, "energies")
    check_available("error")
    from quantwm_kernels.triton import psac as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    code = kernels.encode(error, basis, energies, threshold, bits)
    return code.scales, code.dense, code.layout, code.bitmap, code.values, code.counts


@_encode.register_fake
def _(
    error: Tensor, basis: Tensor, energies: Tensor, threshold: float, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    del energies, threshold
    # How many streams are sparse, and how many values those keep, only the data tell.
    context = torch.library.get_ctx()
    dense, layout, sparse, values = (context.new_dynamic_size(min=0) for _ in range(4))
    tokens, rank = error.shape[-2], basis.shape[-1]
    return (
        basis.new_empty((*basis.shape[:-2], rank)),
        error.new_empty((dense, tokens, packing.nibble_size(rank)), dtype=torch.uint8)
        if bits == 4
        else error.new_empty((dense, tokens, rank), dtype=torch.int8),
        error.new_empty((layout,), dtype=torch.uint8),
        error.new_empty((sparse, -(-tokens * rank // 8)), dtype=torch.uint8),
        error.new_empty((values,), dtype=torch.int8),
        error.new_empty((sparse, -(-tokens // core.TOKENS_PER_COUNT)), dtype=torch.int32),
    )


@torch.library.custom_op("quantwm::decode_psac", mutates_args=())
def _decode(
    scales: Tensor,
    dense: Tensor,
    layout: Tensor,
    bitmap: Tensor,
    values: Tensor,
    counts: Tensor,
    tokens: int,
    start: int,
    stop: int,
) -> Tensor:
    named = zip(PsacCode._fields, (scales, dense, layout, bitmap, values, counts), strict=True)
    code = core.PsacCode(*(to_numpy(tensor, name) for name, tensor in named))
    return owned(core.decode(code, tokens, start, stop), decoded_shape(scales.shape, start, stop))


@_decode.register_kernel("cuda")
def _(
    scales: Tensor,
    dense: Tensor,
    layout: Tensor,
    bitmap: Tensor,
    values: Tensor,
    counts: Tensor,
    tokens: int,
    start: int,
    stop: int,
) -> Tensor:
    check_detached(scales, "scales")
    check_detached(dense, "coefficients")
    check_available("scales")
    from quantwm_kernels.triton import psac as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.decode(PsacCode(scales, dense, layout, bitmap, values, counts), tokens, start, stop)


@_decode.register_fake
def _(
    scales: Tensor,
    dense: Tensor,
    layout: Tensor,
    bitmap: Tensor,
    values: Tensor,
    counts: Tensor,
    tokens: int,
    start: int,
    stop: int,
) -> Tensor:
    del dense, layout, bitmap, values, counts, tokens
    return scales.new_empty(decoded_shape(scales.shape, start, stop), dtype=torch.float32)


def project(
    error: Float32[Tensor, "*streams tokens channels"], basis: BFloat16[Tensor, "*streams channels rank"]
) -> Float32[Tensor, "*streams tokens rank"]:
    """Least-squares coefficients of ``error`` in the columns of ``basis``; zero where the basis is zero.

    >>> project(torch.tensor([[[1.0, 7.0]]]), torch.tensor([[[0.5], [0.0]]], dtype=torch.bfloat16))
    tensor([[[2.]]])
    """
    result: Tensor = _project(error, basis)
    return result


def encode(
    error: Float32[Tensor, "*streams tokens channels"],
    basis: BFloat16[Tensor, "*streams channels rank"],
    energies: Float32[Tensor, "*streams rank"],
    threshold: float = 0.0,
    bits: int = 8,
) -> PsacCode:
    """Code the key error along the basis, INT8 of each stream dense or sparse, whichever is smaller.

    Args:
        error: FP32 ``K - K^``, before ``K^`` is rounded to BF16.
        basis: Stored BF16 basis.
        energies: Eigenvalues that belong to the basis.
        threshold: Coefficients whose effect on a logit is below this many standard deviations are set to zero.
        bits: Of a coefficient, 8, or 4 without a threshold.

    Raises:
        ParameterError: Such coefficients cannot be stored.

    >>> one = torch.ones(1, 1, 1)
    >>> encode(torch.tensor([[[127.0], [-63.0]]]), one.bfloat16(), one[0]).dense.ravel()
    tensor([127, -63], dtype=torch.int8)
    """
    return PsacCode(*_encode(error, basis, energies, threshold, bits))


def decode(
    code: PsacCode, tokens: int, start: int = 0, stop: int | None = None
) -> Float32[Tensor, "*streams range rank"]:
    """Coefficients of tokens ``start`` to ``stop`` of a unit of ``tokens``, FP32.

    >>> one = torch.ones(1, 1, 1)
    >>> decode(encode(torch.tensor([[[127.0], [62.7]]]), one.bfloat16(), one[0]), 2, start=1)
    tensor([[[63.]]])
    """
    result: Tensor = _decode(*code, tokens, start, tokens if stop is None else stop)
    return result
