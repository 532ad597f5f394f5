"""Group affine INT2 on torch tensors. The formulas stand in :mod:`quantwm_core.affine`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float8e4m3fn, Float32, UInt8
from torch import Tensor

from quantwm_core import affine as core
from quantwm_core import packing
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.launch import check_available


class AffineCode(NamedTuple):
    """Encoded groups of ``[*streams, tokens, channels]``; fields as in :class:`quantwm_core.affine.AffineCode`."""

    codes: UInt8[Tensor, "*streams tokens quads"]
    scales: Float8e4m3fn[Tensor, "*streams tokens groups"]
    zero_points: UInt8[Tensor, "*streams packed"]
    super_scale: Float32[Tensor, "*streams"]


def code_shapes(values: Sequence[int], group_size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of codes, scales, zero-points and super-scale of ``[*streams, tokens, channels]`` values.

    Raises:
        ParameterError: The group size does not fit.

    >>> code_shapes((2, 3, 128), 64)
    ((2, 3, 32), (2, 3, 2), (2, 2), (2,))
    """
    *streams, tokens, channels = values
    groups = core.check_group_size(channels, group_size)
    packed = packing.packed_size(tokens * groups)
    return (
        (*streams, tokens, packing.packed_size(channels)),
        (*streams, tokens, groups),
        (*streams, packed),
        (*streams,),
    )


def decoded_shape(codes: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Shape of a decoded token range.

    >>> decoded_shape((2, 3, 32), 1, 3)
    (2, 2, 128)
    """
    return (*codes[:-2], stop - start, codes[-1] * packing.CODES_PER_BYTE)


@torch.library.custom_op("quantwm::encode_affine", mutates_args=())
def _encode(values: Tensor, group_size: int, scale_candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = code_shapes(values.shape, group_size)
    code = core.encode(to_numpy(values, "values"), group_size, scale_candidates)
    return (
        owned(code.codes, shapes[0]),
        owned(code.scales, shapes[1]),
        owned(code.zero_points, shapes[2]),
        owned(code.super_scale, shapes[3]),
    )


@_encode.register_kernel("cuda")
def _(values: Tensor, group_size: int, scale_candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_detached(values, "values")
    check_available("values")
    from quantwm_kernels.triton import affine as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    code = kernels.encode(values, group_size, scale_candidates)
    return code.codes, code.scales, code.zero_points, code.super_scale


@_encode.register_fake
def _(values: Tensor, group_size: int, scale_candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del scale_candidates
    codes, scales, zero_points, super_scale = code_shapes(values.shape, group_size)
    return (
        values.new_empty(codes, dtype=torch.uint8),
        values.new_empty(scales, dtype=torch.float8_e4m3fn),
        values.new_empty(zero_points, dtype=torch.uint8),
        values.new_empty(super_scale, dtype=torch.float32),
    )


@torch.library.custom_op("quantwm::decode_affine", mutates_args=())
def _decode(codes: Tensor, scales: Tensor, zero_points: Tensor, super_scale: Tensor, start: int, stop: int) -> Tensor:
    named = (("codes", codes), ("scales", scales), ("zero-points", zero_points), ("super-scale", super_scale))
    code = core.AffineCode(*(to_numpy(tensor, name) for name, tensor in named))
    return owned(core.decode(code, start, stop), decoded_shape(codes.shape, start, stop))


@_decode.register_kernel("cuda")
def _(codes: Tensor, scales: Tensor, zero_points: Tensor, super_scale: Tensor, start: int, stop: int) -> Tensor:
    check_detached(codes, "codes")
    check_detached(super_scale, "super-scale")
    check_available("codes")
    from quantwm_kernels.triton import affine as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.decode(AffineCode(codes, scales, zero_points, super_scale), start, stop)


@_decode.register_fake
def _(
    codes: Tensor, scales: Tensor, zero_points: Tensor, super_scale: Tensor, start: int, stop: int
) -> Tensor:  # fmt: skip
    del scales, zero_points
    return super_scale.new_empty(decoded_shape(codes.shape, start, stop))


def encode(
    values: Float32[Tensor, "*streams tokens channels"], group_size: int, scale_candidates: int = 1
) -> AffineCode:
    """Quantize FP32 values to 2 bits in groups of consecutive channels of a token.

    Args:
        values: FP32 ``[*streams, tokens, channels]``, finite.
        group_size: Channels that share a scale; a multiple of 4 that divides ``channels``.
        scale_candidates: How many shares of a group's range compete for its scale.

    Raises:
        ParameterError: The group size does not fit, or there are not so many candidates.

    >>> encode(torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]), 4).codes
    tensor([[[228]]], dtype=torch.uint8)
    """
    return AffineCode(*_encode(values, group_size, scale_candidates))


def decode(code: AffineCode, start: int = 0, stop: int | None = None) -> Float32[Tensor, "*streams tokens channels"]:
    """Reconstruct tokens ``start`` to ``stop`` (end by default) in FP32.

    >>> decode(encode(torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]), 4))
    tensor([[[0., 1., 2., 3.]]])
    """
    result: Tensor = _decode(*code, start, code.codes.shape[-2] if stop is None else stop)
    return result
