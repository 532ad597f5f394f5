"""A sealed unit whose arrays are torch tensors on any device; fields as in :mod:`quantwm_core.chunk`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from quantwm_core import chunk as core
from quantwm_core.errors import ShapeError
from quantwm_kernels.bridge import to_numpy, to_torch
from quantwm_kernels.description import describe
from quantwm_kernels.recipe import Row

Kind = core.Kind
KINDS = core.KINDS


def storage_nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors hold on to; memory that several share counts once.

    A view keeps the whole block alive, so the block counts.

    >>> block = torch.zeros(8, dtype=torch.bfloat16)
    >>> storage_nbytes([block[:2], block[4:]])
    16
    """
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(blocks.values())


def stored_nbytes(chunks: Iterable[SealedChunk]) -> tuple[int, int]:
    """Bytes of units together: what is each one's own, and what they share, every array once.

    >>> own, basis = torch.zeros(4, dtype=torch.uint8), torch.zeros(64, dtype=torch.int8)
    >>> tensor = SealedTensor("klt", {}, (1, 1, 2, 8), {"codes": own, "shared_basis": basis})
    >>> plain = SealedTensor("bf16", {}, (1, 1, 2, 8), {"exact": torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)})
    >>> stored_nbytes([SealedChunk(tensor, plain, start) for start in (0, 2)])
    (36, 64)
    """
    tensors = [tensor for each in chunks for tensor in (each.keys, each.values)]
    shared = storage_nbytes(array for tensor in tensors for array in tensor.shared.values())
    return storage_nbytes(array for tensor in tensors for array in tensor.own.values()), shared


def description(
    method: str, parameters: Mapping[str, core.Parameter], shape: Sequence[int], names: Iterable[str]
) -> dict[str, Any]:
    """What must be said about a sealed tensor beside its arrays, as JSON can say it."""
    return {"method": method, "parameters": dict(parameters), "shape": list(shape), "names": list(names)}


def described(told: Mapping[str, Any], arrays: Sequence[Tensor]) -> dict[str, Any]:
    """Fields of the sealed tensor that a description and a flat list of arrays make together."""
    shape = cast("tuple[int, int, int, int]", tuple(told["shape"]))
    named = dict(zip(told["names"], arrays, strict=True))
    return {
        "method": told["method"], "parameters": told["parameters"], "shape": shape, "arrays": named,
    }  # fmt: skip


@dataclass(frozen=True)
class SealedTensor:
    """Keys or values of one sealed unit.

    Attributes:
        method: Public name of the method that wrote it and can read it.
        parameters: The method's settings, enough to decode.
        shape: ``(B, H, N, D)`` of the BF16 tensor it stands for.
        arrays: Storage, each tensor by name; an absent part is missing.
        specification: All but the arrays as text, which an operator takes.
    """

    method: str
    parameters: Mapping[str, core.Parameter]
    shape: tuple[int, int, int, int]
    arrays: Mapping[str, Tensor]
    specification: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = json.dumps(description(self.method, self.parameters, self.shape, self.arrays))
        object.__setattr__(self, "specification", text)  # a frozen dataclass fills a field of its own this way

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return storage_nbytes(self.arrays.values())

    @property
    def shared(self) -> dict[str, Tensor]:
        """Arrays that other units may have, too: see :data:`quantwm_core.chunk.SHARED`."""
        return {name: tensor for name, tensor in self.arrays.items() if name.startswith(core.SHARED)}

    @property
    def own(self) -> dict[str, Tensor]:
        """All other arrays."""
        return {name: tensor for name, tensor in self.arrays.items() if not name.startswith(core.SHARED)}

    @cached_property
    def row(self) -> Row:
        """What a kernel needs to read it; made once.

        Raises:
            QuantWMError: As :func:`quantwm_kernels.description.describe`.
        """
        return describe(self.method, self.parameters, self.shape, self.arrays)

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of the BF16 tensor it stands for."""
        batch, heads, tokens, channels = self.shape
        return 2 * batch * heads * tokens * channels

    def to(self, device: torch.device | str) -> SealedTensor:
        """Copy to a device, contiguous as kernels need it; what is there already is shared."""
        return replace(self, arrays={name: tensor.to(device).contiguous() for name, tensor in self.arrays.items()})

    def to_core(self) -> core.SealedTensor:
        """The same tensor for quantwm-core, over the same memory.

        Raises:
            DeviceError: It does not live on the CPU.
        """
        arrays = {name: to_numpy(tensor, name) for name, tensor in self.arrays.items()}
        return core.SealedTensor(self.method, self.parameters, self.shape, arrays)

    @classmethod
    def from_core(cls, sealed: core.SealedTensor) -> SealedTensor:
        """The same tensor for torch, over the same memory; read-only arrays, such as a file's, are copied."""
        arrays = {name: to_torch(_writable(array)) for name, array in sealed.arrays.items()}
        return cls(sealed.method, sealed.parameters, sealed.shape, arrays)


@dataclass(frozen=True)
class SealedChunk:
    """Keys and values of one layer's sealed unit.

    Attributes:
        keys, values: The two tensors; methods may differ.
        start: Absolute position of the first token, counted from the beginning of the stream.
        version: Format version.
    """

    keys: SealedTensor
    values: SealedTensor
    start: int = 0
    version: int = core.FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.keys.shape[:3] != self.values.shape[:3]:
            raise ShapeError(f"keys {self.keys.shape} and values {self.values.shape} hold different tokens")

    @property
    def tokens(self) -> int:
        """Tokens of the unit."""
        return self.keys.shape[2]

    @property
    def stop(self) -> int:
        """Absolute position after the last token."""
        return self.start + self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return storage_nbytes([*self.keys.arrays.values(), *self.values.arrays.values()])

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the arrays that other units may have, too; they are among :attr:`nbytes`."""
        return storage_nbytes([*self.keys.shared.values(), *self.values.shared.values()])

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of the BF16 keys and values it stands for."""
        return self.keys.bf16_nbytes + self.values.bf16_nbytes

    def to(self, device: torch.device | str) -> SealedChunk:
        """Copy to a device; what is there already is shared."""
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))

    def to_core(self) -> core.SealedChunk:
        """The same unit for quantwm-core, over the same memory.

        Raises:
            DeviceError: It does not live on the CPU.
        """
        return core.SealedChunk(self.keys.to_core(), self.values.to_core(), self.start, self.version)

    @classmethod
    def from_core(cls, chunk: core.SealedChunk) -> SealedChunk:
        """The same unit for torch, over the same memory; read-only arrays, such as a file's, are copied.

        >>> unit = np.zeros((1, 1, 3, 4), "bfloat16")
        >>> tensor = core.SealedTensor("bf16", {}, unit.shape, {"exact": unit})
        >>> chunk = SealedChunk.from_core(core.SealedChunk(tensor, tensor, start=8))
        >>> chunk.stop, chunk.keys.nbytes, chunk.keys.arrays["exact"].dtype
        (11, 24, torch.bfloat16)
        """
        keys, values = (SealedTensor.from_core(tensor) for tensor in (chunk.keys, chunk.values))
        return cls(keys, values, chunk.start, chunk.version)


def _writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else array.copy()
