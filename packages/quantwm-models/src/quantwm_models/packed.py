"""A sealed unit's arrays one after the other in one block of memory, so that one copy moves them all.

The arrays follow each other without gaps: those whose length the largest power of two divides come first, so that each begins
where its elements may and a GPU's widest loads as far as its length lets them. Arrays that units share stay where they are: in
every block they would be there as often as there are units.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core.chunk import KINDS, Kind
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.recipe import VECTOR_NBYTES


class Array(NamedTuple):
    """One array of a unit, and where it begins in the block."""

    kind: Kind
    name: str
    tensor: Tensor
    place: int


def layout(chunk: SealedChunk) -> tuple[Array, ...]:
    """Where each array that is the unit's own goes, in the order of the block.

    >>> from quantwm_core.method import scheme
    >>> from quantwm_kernels.methods import seal_chunk
    >>> unit = seal_chunk(scheme("bf16"), torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    >>> [(kind, name, place) for kind, name, _, place in layout(unit)]
    [('keys', 'exact', 0), ('values', 'exact', 16)]
    """
    arrays = [(kind, name, tensor) for kind in KINDS for name, tensor in getattr(chunk, kind).own.items()]
    # Each begins where its length lets vectors be read.
    arrays.sort(key=lambda each: -gcd(each[2].nbytes, VECTOR_NBYTES))
    placed, place = [], 0
    for kind, name, tensor in arrays:
        placed.append(Array(kind, name, tensor, place))
        place += tensor.nbytes
    return tuple(placed)


def packed_nbytes(chunk: SealedChunk) -> int:
    """Bytes of the block, which are those of the arrays in it."""
    return sum(array.tensor.nbytes for array in layout(chunk))


def in_block(chunk: SealedChunk, block: Tensor) -> SealedChunk:
    """The unit with its own arrays in ``block``, uint8 ``[packed_nbytes(chunk)]`` of any device; nothing is copied."""
    arrays: dict[Kind, dict[str, Tensor]] = {kind: dict(getattr(chunk, kind).arrays) for kind in KINDS}
    for kind, name, tensor, place in layout(chunk):
        arrays[kind][name] = block[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    keys, values = (replace(getattr(chunk, kind), arrays=arrays[kind]) for kind in KINDS)
    return replace(chunk, keys=keys, values=values)


def packed(chunk: SealedChunk, *, pinned: bool = False) -> tuple[SealedChunk, Tensor]:
    """Copy a unit into a block of host memory, and wait until it is there.

    Args:
        chunk: On any device.
        pinned: Whether a GPU is to read the block.

    Returns:
        The unit over the block, and the block, uint8.

    >>> from quantwm_core.method import scheme
    >>> from quantwm_kernels.methods import seal_chunk
    >>> unit = seal_chunk(scheme("rtn"), *torch.ones(2, 1, 2, 32, 64))
    >>> there, block = packed(unit)
    >>> there.nbytes == unit.nbytes == block.nbytes
    True
    """
    # A tensor born in inference mode could not be written outside of it, and the block may be handed out.
    with torch.inference_mode(False):
        block = torch.empty(packed_nbytes(chunk), dtype=torch.uint8, pin_memory=pinned)
    there = in_block(chunk, block)
    for kind, name, tensor, _ in layout(chunk):
        getattr(there, kind).arrays[name].copy_(tensor)
    return there, block
