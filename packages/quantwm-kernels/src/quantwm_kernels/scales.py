"""Group scales <-> one FP32 super-scale per stream and one E4M3 byte per group, on torch tensors."""

from collections.abc import Sequence

import torch
from jaxtyping import Float8e4m3fn, Float32
from torch import Tensor

from quantwm_core import scales as core
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.launch import check_available


def super_scale_shape(steps: Sequence[int]) -> tuple[int, ...]:
    """Shape of the super-scales of ``[*streams, rows, groups]`` steps.

    >>> super_scale_shape((2, 3, 7, 4))
    (2, 3)
    """
    return tuple(steps[:-2])


@torch.library.custom_op("quantwm::encode_scales", mutates_args=())
def _encode(steps: Tensor) -> tuple[Tensor, Tensor]:
    stored, super_scale = core.encode(to_numpy(steps, "steps"))
    return owned(stored, steps.shape), owned(super_scale, super_scale_shape(steps.shape))


@_encode.register_kernel("cuda")
def _(steps: Tensor) -> tuple[Tensor, Tensor]:
    check_detached(steps, "steps")
    check_available("steps")
    from quantwm_kernels.triton import scales as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.encode(steps)


@_encode.register_fake
def _(steps: Tensor) -> tuple[Tensor, Tensor]:
    stored = steps.new_empty(steps.shape, dtype=torch.float8_e4m3fn)
    return stored, steps.new_empty(super_scale_shape(steps.shape), dtype=torch.float32)


@torch.library.custom_op("quantwm::decode_scales", mutates_args=())
def _decode(stored: Tensor, super_scale: Tensor) -> Tensor:
    return owned(core.decode(to_numpy(stored, "scales"), to_numpy(super_scale, "super-scale")), stored.shape)


@_decode.register_kernel("cuda")
def _(stored: Tensor, super_scale: Tensor) -> Tensor:
    check_detached(stored, "scales")
    check_detached(super_scale, "super-scale")
    check_available("scales")
    from quantwm_kernels.triton import scales as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.decode(stored, super_scale)


@_decode.register_fake
def _(stored: Tensor, super_scale: Tensor) -> Tensor:  # noqa: ARG001 - a fake has its operator's signature
    return stored.new_empty(stored.shape, dtype=torch.float32)


def encode(
    steps: Float32[Tensor, "*streams rows groups"],
) -> tuple[Float8e4m3fn[Tensor, "*streams rows groups"], Float32[Tensor, "*streams"]]:
    """Store non-negative group scales as E4M3 under a super-scale.

    Args:
        steps: FP32 ``[*streams, rows, groups]``, finite, at least zero.

    Returns:
        E4M3 scales of the same shape and the FP32 super-scale ``[*streams]``.

    >>> stored, super_scale = encode(torch.tensor([[[7.0, 3.5, 0.0]]]))
    >>> stored.float(), super_scale
    (tensor([[[448., 224.,   0.]]]), tensor([0.0156]))
    """
    stored, super_scale = _encode(steps)
    return stored, super_scale


def decode(
    stored: Float8e4m3fn[Tensor, "*streams rows groups"], super_scale: Float32[Tensor, "*streams"]
) -> Float32[Tensor, "*streams rows groups"]:
    """FP32 scales of the same shape.

    >>> decode(torch.tensor([[[448.0, 1.0]]]).to(torch.float8_e4m3fn), torch.tensor([0.5]))
    tensor([[[224.0000,   0.5000]]])
    """
    result: Tensor = _decode(stored, super_scale)
    return result
