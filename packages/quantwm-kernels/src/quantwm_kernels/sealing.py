"""Units whose sealing was begun: what was launched on a GPU and is still to be believed.

A GPU finds out late whether a unit may be sealed at all: whether its numbers are finite, and how many coefficients of
each stream are zero. Kernels write a *status*, which is copied to the host behind them, and :meth:`PendingChunk.wait`
waits for it and reads it: whoever begins the units of several layers before the first wait, waits once for all, and
whoever takes them one by one waits for each. Until then the BF16 tensors must stay as they are. What is decided only
then, such as the bits of a transform code, is launched by that wait on the stream on which the unit was begun, and the
caller's stream waits for it: what comes after on either of the two may overwrite the tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core.chunk import Kind, Parameter
from quantwm_core.domain import MAX_MAGNITUDE
from quantwm_core.errors import DomainError
from quantwm_core.method import Method
from quantwm_kernels.arrival import current_stream, is_current
from quantwm_kernels.chunk import SealedChunk, SealedTensor
from quantwm_kernels.psac import PsacCode


class Status(IntEnum):
    """Rows of a status, int32 ``[rows, streams]``: bits of magnitudes, which order as the numbers do, and a count."""

    MAGNITUDE = 0
    MOMENT = 1
    NON_ZERO = 2


ACCEPTED = (torch.bfloat16, torch.float16, torch.float32)
"""Number formats of tensors that can be sealed."""

_LARGEST = int(torch.tensor(MAX_MAGNITUDE, dtype=torch.float32).view(torch.int32))
_INFINITE = int(torch.tensor(torch.inf, dtype=torch.float32).view(torch.int32))


@dataclass(frozen=True)
class Asked:
    """One tensor that is to be sealed.

    Attributes:
        method: How.
        kind: ``"keys"`` or ``"values"``.
        values: BF16, FP16 or FP32 ``[B, H, N, D]``.
        label: Which tensor it is, for messages.
        previous: The same tensor of the unit before.
    """

    method: Method
    kind: Kind
    values: Tensor
    label: str
    previous: SealedTensor | None = None

    @property
    def exact(self) -> Tensor:
        """The tensor in BF16."""
        return self.values.to(torch.bfloat16)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, H, N, D)``."""
        batch, heads, tokens, channels = self.values.shape
        return batch, heads, tokens, channels


@dataclass(frozen=True)
class Draft:
    """A tensor that is being sealed.

    Attributes:
        method, parameters, shape: As in :class:`quantwm_kernels.chunk.SealedTensor`.
        arrays: Storage, as if every stream's coefficients were dense.
        label: Which tensor it is, for messages.
        source: What is sealed.
        streams: Its streams in the status, first and behind the last.
        later: Makes the arrays once the status is believed, where a host must decide about them.
    """

    method: str
    parameters: Mapping[str, Parameter]
    shape: tuple[int, int, int, int]
    arrays: Mapping[str, Tensor]
    label: str
    source: Tensor
    streams: tuple[int, int]
    later: Callable[[], Mapping[str, Tensor]] | None = None

    @cached_property
    def readable(self) -> SealedTensor:
        """The tensor as the kernels write it."""
        return SealedTensor(self.method, self.parameters, self.shape, self.arrays)


class PendingTensors:
    """Tensors whose kernels were launched together.

    Args:
        drafts: What the kernels write.
        status: int32 ``[rows, streams]``, written by them too.
    """

    def __init__(self, drafts: Sequence[Draft], status: Tensor) -> None:
        self._drafts: Sequence[Draft] = drafts
        self._sealed: tuple[SealedTensor, ...] | None = None
        self._arrived: torch.cuda.Event | None = None
        self._begun: torch.cuda.Stream | None = None
        self._status = status
        if status.is_cuda:
            self._status = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
            self._status.copy_(status, non_blocking=True)
            self._begun = current_stream(status.device)
            self._arrived = self._begun.record_event()

    def readable(self) -> tuple[SealedTensor, ...] | None:
        """The tensors as they can be read already, all coefficients dense; None where :meth:`wait` decides how they are stored.

        To be read on the stream of ``__init__`` alone. Whether to believe them :meth:`wait` tells.
        """
        if any(draft.later is not None for draft in self._drafts):
            return None
        return self._sealed or tuple(draft.readable for draft in self._drafts)

    def wait(self) -> tuple[SealedTensor, ...]:
        """Wait for the status and return the sealed tensors, in the order in which they were given.

        What is still to be launched is so on the stream of ``__init__``, and the current stream waits for it.

        Raises:
            DomainError: A tensor, or the queries whose moment it was sealed with, holds NaN, Inf or numbers beyond 2**60.
        """
        if self._sealed is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            rows = self._status.tolist()
            with nullcontext() if self._begun is None or is_current(self._begun) else torch.cuda.stream(self._begun):
                self._sealed = tuple(_finished(draft, rows) for draft in self._drafts)
            self._drafts = ()  # what was sealed may be freed
        if self._begun is not None:
            _hand_over(self._sealed, self._begun)
        return self._sealed


class Finished(NamedTuple):
    """Tensors that were sealed at once, as on a CPU."""

    tensors: tuple[SealedTensor, ...]

    def readable(self) -> None:
        """Nothing before :meth:`wait`, which waits for nothing."""

    def wait(self) -> tuple[SealedTensor, ...]:
        """The tensors."""
        return self.tensors


class PendingChunk:
    """A unit of one layer that is being sealed.

    Args:
        tensors: Its keys and its values.
        start: Absolute position of its first token.
    """

    def __init__(self, tensors: PendingTensors | Finished, start: int) -> None:
        self._tensors = tensors
        self._start = start

    def readable(self) -> SealedChunk | None:
        """The unit as it can be read on the stream on which it was begun, before it is known whether to believe it.

        None where only :meth:`wait` tells how it is stored, and on a CPU.
        """
        tensors = self._tensors.readable()
        if tensors is None:
            return None
        keys, values = tensors
        return SealedChunk(keys, values, self._start)

    def wait(self) -> SealedChunk:
        """Wait until the unit is sealed; later calls return it at once.

        Raises:
            DomainError: As :meth:`PendingTensors.wait`; the unit is not sealed.
        """
        keys, values = self._tensors.wait()
        return SealedChunk(keys, values, self._start)


def forget_recordings() -> None:
    """Give back the GPU memory that is kept to seal small units with one launch; the next of them are recorded anew.

    >>> forget_recordings()
    """
    recorded = sys.modules.get("quantwm_kernels.triton.replay")
    if recorded is not None:
        recorded.RECORDINGS.clear()


def recorded_nbytes() -> int:
    """Bytes of GPU memory, of all devices, that :func:`forget_recordings` would give back.

    >>> recorded_nbytes()
    0
    """
    recorded = sys.modules.get("quantwm_kernels.triton.replay")
    return 0 if recorded is None else int(recorded.RECORDINGS.nbytes())


def _hand_over(sealed: Sequence[SealedTensor], begun: torch.cuda.Stream) -> None:
    """Let the current stream use what another one makes."""
    caller = current_stream(begun.device)
    if caller == begun:
        return
    caller.wait_stream(begun)
    for tensor in sealed:
        for array in tensor.arrays.values():
            array.record_stream(caller)


def _finished(draft: Draft, status: Sequence[Sequence[int]]) -> SealedTensor:
    """Believe the status, and store coefficients as they are smallest."""
    rows = [row[slice(*draft.streams)] for row in status]
    if max(rows[Status.MAGNITUDE]) > _LARGEST:
        raise DomainError(_complaint(draft))
    if max(rows[Status.MOMENT]) >= _INFINITE:
        raise DomainError(
            f"{draft.label}: the queries that it is sealed with hold NaN, infinite numbers or numbers beyond 2**60; "
            "their moment cannot be repaired, so begin the cache anew"
        )
    if draft.later is not None:
        return SealedTensor(draft.method, draft.parameters, draft.shape, dict(draft.later()))
    parts = _laid_out(draft.arrays, rows[Status.NON_ZERO], draft.shape) if "coefficients" in draft.arrays else {}
    return replace(draft.readable, arrays={**draft.arrays, **parts}) if parts else draft.readable


def _laid_out(arrays: Mapping[str, Tensor], non_zero: Sequence[int], shape: Sequence[int]) -> dict[str, Tensor]:
    """Coefficients and their layout under the names that they bear in a sealed tensor, an empty part absent; none if all are dense."""
    from quantwm_kernels.triton.psac import laid_out, sparse_streams  # noqa: PLC0415 - Triton is needed on a GPU only

    if not any(sparse_streams(arrays["coefficients"], non_zero)):
        return {}
    code: PsacCode = laid_out(arrays["coefficients"], arrays["coefficient_scales"], non_zero)
    parts = {
        "coefficients": code.dense,
        "layout": code.layout.view(shape[:2]) if code.layout.numel() else code.layout,
        "bitmap": code.bitmap,
        "sparse_values": code.values,
        "sparse_counts": code.counts,
    }
    return {name: part for name, part in parts.items() if part.numel() or name == "coefficients"}


def _complaint(draft: Draft) -> str:
    """What :func:`quantwm_core.domain.check_domain` says about numbers that cannot be sealed."""
    wide = draft.source.float()
    bad = ~(wide.abs() <= MAX_MAGNITUDE)
    first = tuple(int(place) for place in bad.nonzero()[0]) if bad.any() else None
    where = "" if first is None else f"first {wide[first].item()} at index {first}; "
    return (
        f"{draft.label}: {int(bad.sum())} of {bad.numel()} values are NaN, infinite or beyond 2**60, {where}"
        "repair the input before sealing"
    )
