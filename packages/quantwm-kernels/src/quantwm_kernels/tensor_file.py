"""Tensors of any device <-> a safetensors file, one after the other. See :mod:`quantwm_core.tensor_file`.

What lies in the memory of the CPU goes between it and the file without a copy; what lies on a GPU passes through one
pinned buffer of :data:`STAGE_NBYTES`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantwm_core.errors import DeviceError, DtypeError, FormatError
from quantwm_core.tensor_file import DTYPES, Place, make_header, read_header, replaced
from quantwm_kernels.bridge import check_detached, to_torch
from quantwm_kernels.launch import check_served

STAGE_NBYTES = 2**25
_FORMATS = {to_torch(np.zeros(1, dtype)).dtype: dtype for dtype in DTYPES.values()}
_BACK = {dtype: tensor_dtype for tensor_dtype, dtype in _FORMATS.items()}


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors to one file, which replaces what was there only when it is whole and on the disk.

    Args:
        path: Where to.
        tensors: Of any device and strides; dense.
        metadata: Text entries.

    Raises:
        StateError: A tensor requires grad.
        DtypeError: One has a number format that the files do not know.
        FormatError: ``path`` is a folder, a device, a pipe or a socket.
        OSError: The folder cannot be written, or the disk is full; an older file stays as it was.
    """
    kinds = {}
    for name, tensor in tensors.items():
        check_detached(tensor, name)
        if tensor.dtype not in _FORMATS:
            known = ", ".join(str(each) for each in _FORMATS)
            raise DtypeError(f"{name}: got {tensor.dtype}, files hold {known}")
        kinds[name] = (_FORMATS[tensor.dtype], tuple(tensor.shape))
    text, order = make_header(kinds, metadata)
    with replaced(path) as file:
        file.write(text)
        for name in order:
            for piece in _pieces(tensors[name]):
                file.write(piece)


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose tensors are read one at a time; :func:`opened` makes one.

    Attributes:
        places: Number format, shape and bytes of each tensor by name.
        metadata: Text entries.
        stream: The open file.
    """

    places: Mapping[str, Place]
    metadata: Mapping[str, str]
    stream: BufferedReader

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A tensor in memory of its own on ``device``.

        Raises:
            FormatError: There is no such tensor, or the file ends within it.
        """
        if name not in self.places:
            raise FormatError(f"no array {name!r}; the file is damaged")
        place = self.places[name]
        # A tensor born in inference mode could not be written outside of it, and who reads does not say where it goes.
        with torch.inference_mode(False):
            tensor = torch.empty(place.shape, dtype=_BACK[place.dtype], device=device)
        flat = tensor.view(-1).view(torch.uint8)
        self.stream.seek(place.start)
        for part, stage in _staged(flat):
            if self.stream.readinto(stage.numpy().data) != stage.numel():
                raise FormatError(f"the file ends within array {name!r}; it was cut while it was read")
            if stage is not part:
                part.copy_(stage)  # waits, so that the stage may be filled again
        return tensor


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Open a file of tensors; its header is read and held against the file's length.

    Raises:
        FormatError: The file is truncated, no safetensors file, a folder, or holds a number format that none of ours has.
        OSError: It cannot be read.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "two.safetensors"
    >>> write_tensors(path, {"a": torch.arange(3), "b": torch.ones(2, 2).bfloat16()}, {"made": "here"})
    >>> with opened(path) as file:
    ...     file.read("a"), file.metadata, sorted(file.places)
    (tensor([0, 1, 2]), {'made': 'here'}, ['a', 'b'])
    """
    places, metadata = read_header(path)
    with Path(path).open("rb") as stream:
        yield TensorFile(places, metadata, stream)


def available_device(device: torch.device | str) -> torch.device:
    """A device with its number, as tensors state it.

    Raises:
        DeviceError: It is not there, or of a kind that nothing here serves.

    >>> available_device("cpu")
    device(type='cpu')
    """
    try:
        tensor = torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:
        first, *_ = str(error).splitlines()  # CUDA goes on with advice for programmers
        raise DeviceError(f"device {str(device)!r} is not there ({first}); name another one") from error
    check_served(tensor, f"device {str(device)!r}")
    return tensor.device


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in its order, in the memory of the CPU."""
    for part, stage in _staged(tensor.contiguous().view(-1).view(torch.uint8)):
        if stage is not part:
            stage.copy_(part)  # waits
        yield stage.numpy().data


def _staged(flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a uint8 tensor, each with as much memory of the CPU: its own where it lies there, else a pinned buffer."""
    if flat.device.type == "cpu":
        yield flat, flat
        return
    stage = torch.empty(min(STAGE_NBYTES, flat.numel()), dtype=torch.uint8, pin_memory=flat.is_cuda)
    for part in flat.split(STAGE_NBYTES):
        yield part, stage[: part.numel()]
