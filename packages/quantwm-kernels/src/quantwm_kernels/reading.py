"""Reading many sealed units of a layer at once: keys and values, any ranges, each to its place in a workspace.

On a GPU a read is one launch over a table of addresses, which stays on the device. A cache reads the same tokens in every
denoising step, so it makes a :class:`ReadPlan` when a chunk was sealed or evicted, and keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import BFloat16
from torch import Tensor

from quantwm_core.errors import DeviceError, DtypeError, RangeError, ShapeError
from quantwm_kernels.arrival import Planned
from quantwm_kernels.bridge import check_detached
from quantwm_kernels.chunk import KINDS, SealedChunk, SealedTensor
from quantwm_kernels.launch import Launch
from quantwm_kernels.methods import decode_into
from quantwm_kernels.reading_batches import Batch, Part, batches
from quantwm_kernels.reading_launches import run

if TYPE_CHECKING:
    from quantwm_kernels.attention_passes import Pass


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sealed unit, counted inside it, and the workspace's token where they begin."""

    chunk: SealedChunk
    start: int
    stop: int
    place: int


class ReadPlan:
    """Reconstructs the same tokens of the same units, as often as one likes.

    Tables are copied to the device at the first read, and other streams than that one's wait for them; a CUDA graph that
    captured a later one needs the plan alive.

    Attributes:
        pieces: What is read.
        tokens: Tokens that a workspace must have.
        specification: All but places and arrays as text, which an operator takes.
        tables: What :mod:`quantwm_kernels.packed_attention` keeps to attend to the same tokens.

    Args:
        pieces: What to read. Their places must not overlap.
        launch: Other launch parameters than :data:`quantwm_kernels.launch.LAUNCHES` has.

    Raises:
        RangeError: A range does not lie inside its unit, or a place is negative.
        ShapeError: The units differ in batch, heads or head dimension.

    >>> from quantwm_core.method import scheme
    >>> from quantwm_kernels.methods import seal_chunk
    >>> units = [seal_chunk(scheme("bf16"), *(torch.full((1, 2, 4, 8), x) for x in (n, -n))) for n in (1.0, 2.0)]
    >>> plan = ReadPlan([Piece(units[0], 2, 4, 0), Piece(units[1], 0, 1, 2)])
    >>> keys, values = (torch.empty(1, 2, 3, 8, dtype=torch.bfloat16) for _ in range(2))
    >>> plan.into(keys, values)
    >>> keys[0, 0, :, 0], values[0, 0, :, 0]
    (tensor([1., 1., 2.], dtype=torch.bfloat16), tensor([-1., -1., -2.], dtype=torch.bfloat16))
    """

    def __init__(self, pieces: Iterable[Piece], launch: Launch | None = None) -> None:
        self.pieces = tuple(pieces)
        for piece in self.pieces:
            if not 0 <= piece.start <= piece.stop <= piece.chunk.tokens or piece.place < 0:
                raise RangeError(
                    f"tokens {piece.start} to {piece.stop} of a sealed unit of {piece.chunk.tokens} to place "
                    f"{piece.place}: need 0 <= start <= stop <= {piece.chunk.tokens} and a place of at least 0"
                )
        self.tokens = max((piece.place + piece.stop - piece.start for piece in self.pieces), default=0)
        self._sizes = {
            kind: _common_sizes(kind, [getattr(piece.chunk, kind) for piece in self.pieces]) for kind in KINDS
        }
        texts = [(each.chunk.keys.specification, each.chunk.values.specification, *each[1:3]) for each in self.pieces]
        self.specification = json.dumps(texts)
        self.tables: dict[Hashable, Planned[Pass]] = {}
        self._launch = launch
        self._planned: Planned[Batch] | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int] | None:
        """``(B, H, D of keys, D of values)``; None without a piece."""
        keys, values = self._sizes["keys"], self._sizes["values"]
        return None if keys is None or values is None else (*keys, values[2])

    def into(
        self,
        keys: BFloat16[Tensor, "batch heads tokens key_channels"],
        values: BFloat16[Tensor, "batch heads tokens value_channels"],
    ) -> None:
        """Write all pieces into a workspace.

        Args:
            keys, values: BF16 ``[B, H, S, D]`` of any strides, such as a transposed view of ``[B, S, H, D]``.

        Raises:
            ShapeError, DtypeError: The workspace does not fit the pieces.
            StateError: It requires grad, or a CUDA graph is captured and the plan was never read before.
            DeviceError: No implementation serves the device or the method.
        """
        check_workspace("keys", keys, self._sizes["keys"], self.tokens)
        check_workspace("values", values, self._sizes["values"], self.tokens)
        if keys.device != values.device:
            raise DeviceError(f"workspaces of keys on {keys.device}, of values on {values.device}; need one device")
        if not keys.is_cuda:
            self._into_on_cpu(keys, values)
            return
        if self._planned is None or self._planned.device != keys.device:
            parts = [
                [Part(getattr(piece.chunk, kind).row, piece.start, piece.stop, piece.place) for piece in self.pieces]
                for kind in KINDS
            ]
            self._planned = Planned(batches(parts[0], parts[1], keys.device, self._launch), keys.device)
        run(self._planned.expected(), keys, values)

    def _into_on_cpu(self, keys: Tensor, values: Tensor) -> None:
        for chunk, start, stop, place in self.pieces:
            where = slice(place, place + stop - start)
            decode_into(chunk.keys, keys[:, :, where], start, stop)
            decode_into(chunk.values, values[:, :, where], start, stop)


def check_workspace(kind: str, out: Tensor, sizes: tuple[int, int, int] | None, tokens: int) -> None:
    """Refuse a workspace that cannot take so many tokens of units of ``(B, H, D)``; None is no unit at all.

    Raises:
        ShapeError, DtypeError, StateError: It does not fit, is not BF16, or requires grad.
    """
    check_detached(out, f"workspace of {kind}")
    if out.dtype is not torch.bfloat16:
        raise DtypeError(f"workspace of {kind}: got {out.dtype}, need torch.bfloat16")
    shape = out.shape
    if sizes is not None and (len(shape) != 4 or shape[2] < tokens or (shape[0], shape[1], shape[3]) != sizes):
        need = (*sizes[:2], tokens, sizes[2])
        raise ShapeError(f"workspace of {kind}: got shape {tuple(shape)}, need {need} or more tokens")


def _common_sizes(kind: str, tensors: Sequence[SealedTensor]) -> tuple[int, int, int] | None:
    """``(B, H, D)`` that all tensors have."""
    found = {(*tensor.shape[:2], tensor.shape[3]) for tensor in tensors}
    if len(found) > 1:
        raise ShapeError(f"{kind} of (B, H, D) {sorted(found)} do not fit into one workspace; read them apart")
    return found.pop() if found else None
