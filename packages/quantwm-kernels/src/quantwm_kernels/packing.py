"""2-bit codes <-> bytes on torch tensors. The layout is drawn in :mod:`quantwm_core.packing`."""

from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from quantwm_core import packing as core
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.launch import check_available


def packed_shape(codes: Sequence[int]) -> tuple[int, ...]:
    """Shape of packed codes.

    >>> packed_shape((2, 5))
    (2, 2)
    """
    return (*codes[:-1], core.packed_size(codes[-1]))


def unpacked_shape(packed: Sequence[int], codes: int) -> tuple[int, ...]:
    """Shape of unpacked codes.

    >>> unpacked_shape((2, 2), 5)
    (2, 5)
    """
    return (*packed[:-1], codes)


@torch.library.custom_op("quantwm::pack_codes", mutates_args=())
def _pack(codes: Tensor) -> Tensor:
    result = core.pack(to_numpy(codes, "codes"))
    return owned(result, packed_shape(codes.shape))


@_pack.register_kernel("cuda")
def _(codes: Tensor) -> Tensor:
    check_detached(codes, "codes")
    check_available("codes")
    from quantwm_kernels.triton import packing as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.pack(codes)


@_pack.register_fake
def _(codes: Tensor) -> Tensor:
    return codes.new_empty(packed_shape(codes.shape))


@torch.library.custom_op("quantwm::unpack_codes", mutates_args=())
def _unpack(packed: Tensor, codes: int) -> Tensor:
    result = core.unpack(to_numpy(packed, "packed codes"), codes)
    return owned(result, unpacked_shape(packed.shape, codes))


@_unpack.register_kernel("cuda")
def _(packed: Tensor, codes: int) -> Tensor:
    check_detached(packed, "packed codes")
    check_available("packed codes")
    from quantwm_kernels.triton import packing as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.unpack(packed, codes)


@_unpack.register_fake
def _(packed: Tensor, codes: int) -> Tensor:
    return packed.new_empty(unpacked_shape(packed.shape, codes))


def pack(codes: UInt8[Tensor, "*lead codes"]) -> UInt8[Tensor, "*lead packed"]:
    """Pack 2-bit codes along the last axis.

    Args:
        codes: uint8 ``[..., n]``, each 0 to 3. On a GPU nobody waits to check this: bits above the lowest two are dropped.

    Returns:
        uint8 ``[..., ceil(n / 4)]``.

    Raises:
        DtypeError, ShapeError: As :func:`quantwm_core.packing.pack`.

    >>> pack(torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8))
    tensor([57,  2], dtype=torch.uint8)
    """
    result: Tensor = _pack(codes)
    return result


def unpack(packed: UInt8[Tensor, "*lead packed"], codes: int) -> UInt8[Tensor, "*lead codes"]:
    """Inverse of :func:`pack`.

    Args:
        packed: uint8 ``[..., ceil(codes / 4)]``.
        codes: How many codes to read from the last axis.

    Raises:
        DtypeError, ShapeError: As :func:`quantwm_core.packing.unpack`.

    >>> unpack(torch.tensor([57, 2], dtype=torch.uint8), 5)
    tensor([1, 2, 3, 0, 2], dtype=torch.uint8)
    """
    result: Tensor = _unpack(packed, codes)
    return result
