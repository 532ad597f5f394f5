"""torch <-> NumPy without a copy, and the checks that must come first.

BF16 and E4M3 tensors do not convert to NumPy: they cross as integers of the same width and are viewed as their
ml_dtypes namesakes. That way round would silently drop a gradient, so tensors that record one are refused first.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from quantwm_core.domain import BF16, E4M3
from quantwm_core.errors import DeviceError, DtypeError, ShapeError, StateError

_CARRIERS = {torch.bfloat16: (torch.int16, BF16), torch.float8_e4m3fn: (torch.uint8, E4M3)}
_RETURNS = {BF16: (np.dtype(np.int16), torch.bfloat16), E4M3: (np.dtype(np.uint8), torch.float8_e4m3fn)}


def check_detached(tensor: object, name: str = "tensor") -> None:
    """Refuse what is no tensor, is sparse or nested, or records gradients.

    Raises:
        DtypeError: Not a torch tensor.
        StateError: ``tensor.requires_grad``, or it is not dense.
    """
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{name}: got {type(tensor).__name__}, need a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        raise StateError(f"{name}: got {kind}, need a dense one; call tensor.to_dense(), or pad it")
    if tensor.requires_grad:
        raise StateError(
            f"{name}: the tensor requires grad, and quantized storage has no gradient; "
            "run the model under torch.no_grad() or pass tensor.detach()"
        )


def is_eager_cuda(*tensors: Tensor) -> bool:
    """Whether kernels may be launched on tensors past PyTorch's dispatcher, which takes longer than a small one.

    Not while somebody looks on who must see the operator: a compiler, or a mode such as that of fake tensors.

    >>> is_eager_cuda(torch.ones(2))
    False
    """
    for tensor in tensors:
        if type(tensor) is not Tensor or not tensor.is_cuda:
            return False
    return not is_in_torch_dispatch_mode() and not torch.compiler.is_compiling()


def check_device(tensor: Tensor, name: str = "tensor") -> None:
    """Refuse a tensor that does not live in the memory of the CPU.

    Raises:
        DeviceError: Any other device.
    """
    if tensor.device.type != "cpu":
        raise DeviceError(
            f"{name}: the tensor lives on {tensor.device}, and this operation has an implementation for CPU tensors only; "
            "move it with tensor.cpu()"
        )


def to_numpy(tensor: Tensor, name: str = "tensor") -> np.ndarray:
    """View a CPU tensor as a NumPy array over the same memory, strides kept.

    Args:
        tensor: Dense CPU tensor; BF16 and E4M3 become their ml_dtypes namesakes.
        name: What it is, for messages: ``"layer 3, chunk 7, keys"``.

    Raises:
        StateError: The tensor requires grad or is not dense.
        DeviceError: It does not live on the CPU.

    >>> array = to_numpy(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    >>> array.dtype, array.astype("float32")
    (dtype(bfloat16), array([ 1., -2.], dtype=float32))
    """
    check_detached(tensor, name)
    check_device(tensor, name)
    plain = tensor.detach()
    if plain.dtype not in _CARRIERS:
        return plain.numpy()
    carrier, dtype = _CARRIERS[plain.dtype]
    return plain.view(carrier).numpy().view(dtype)


def to_torch(array: np.ndarray) -> Tensor:
    """View a writable NumPy array as a tensor over the same memory.

    Raises:
        StateError: The array is read-only; torch has no such tensors.
        DtypeError: torch has no such number format.

    >>> to_torch(np.float32([1.0, -2.0]).astype(BF16))
    tensor([ 1., -2.], dtype=torch.bfloat16)
    """
    if not array.flags.writeable:
        raise StateError(f"array {array.shape} is read-only, and a tensor over it would not be; pass array.copy()")
    carrier, dtype = _RETURNS.get(array.dtype, (array.dtype, None))
    try:
        tensor = torch.from_numpy(array.view(carrier))
    except TypeError as error:
        raise DtypeError(f"array {array.shape}: torch has no dtype for {array.dtype}") from error
    return tensor if dtype is None else tensor.view(dtype)


def owned(array: np.ndarray, shape: Sequence[int] | None = None) -> Tensor:
    """Turn a result into a contiguous tensor that shares its memory with nothing else; copies only if it must.

    An operator may not return an alias of its input, and a byte count from storage must not miss what a view hides.

    Args:
        array: What the reference returned.
        shape: The shape that the operator promised.

    Raises:
        ShapeError: The promise is broken.

    >>> lent = torch.zeros(3)
    >>> owned(to_numpy(lent)).data_ptr() == lent.data_ptr()
    False
    """
    if shape is not None and array.shape != tuple(shape):
        raise ShapeError(f"the reference returned shape {array.shape} where {tuple(shape)} was promised")
    flags = array.flags
    keep = flags.c_contiguous and flags.writeable and _owns_memory(array)
    return to_torch(array if keep else array.copy(order="C"))


def _owns_memory(array: np.ndarray) -> bool:
    """Whether ``array`` spans the whole of a memory block that NumPy allocated."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    foreign: object = root.base  # anything may own a buffer, whatever the stubs say
    return foreign is None and root.nbytes == array.nbytes
