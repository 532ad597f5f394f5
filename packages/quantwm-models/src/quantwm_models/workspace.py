"""The BF16 keys and values of one read, in memory that all layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_core.stream import Span
from quantwm_kernels.chunk import storage_nbytes

# Reads grow by a chunk at a time while a window fills: some room keeps the memory from moving with each of them.
GROWTH = 1.25

# Different parts that reads between two chunks fill.
MOST_PARTS = 64


class Segment(NamedTuple):
    """Consecutive tokens of a read.

    Attributes:
        source: Serial number of the stored piece that they come from; no two pieces ever share one.
        span: Absolute tokens.
    """

    source: int
    span: Span


class Workspace:
    """Memory for the keys and values of one read at a time.

    What was read last stays until the next read: a read that begins with the same segments keeps them.

    Args:
        capacity: Tokens to make room for at the first read.
        token_major: Lay tokens before heads, ``[B, S, H, D]``, as hosts do that attend in this layout.
    """

    def __init__(self, capacity: int = 0, *, token_major: bool = False) -> None:
        self.capacity = capacity
        self.token_major = token_major
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._shapes: tuple[Sequence[int], Sequence[int]] | None = None
        self._segments: tuple[Segment, ...] = ()
        # Waits for what one of the layers is sealing. There is one at a time, whose BF16 tokens are still there.
        self.unconfirmed: Callable[[], None] | None = None

    def confirm(self) -> None:
        """Wait for what one of the layers is sealing, before any changes.

        Raises:
            DomainError: It cannot be sealed; the message names the layer, and its cache is as it was.
        """
        if self.unconfirmed is None:
            return
        try:
            self.unconfirmed()
        except Exception:
            self.unconfirmed = None  # that layer has decided; after an interrupt it is asked again
            raise
        self.unconfirmed = None

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return 0 if self._buffers is None else storage_nbytes(self._buffers)

    def reserve(self, tokens: int) -> None:
        """Make room for reads of that many tokens at the next allocation."""
        self.capacity = max(self.capacity, tokens)

    def release(self) -> None:
        """Give the memory back; tensors that a read returned keep theirs alive."""
        self._buffers, self._shapes, self._segments = None, None, ()
        self._parts.clear()

    def view(
        self, keys: tuple[int, int, int], values: tuple[int, int, int], tokens: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """BF16 ``[B, H, tokens, D]`` views for keys and values; contents kept only if the memory is the same.

        Args:
            keys, values: ``(B, H, D)`` of each.
            tokens: Tokens of the read.
            device: Where they are needed.
        """
        enough = self._buffers is not None and tokens <= self._buffers[0].shape[1 if self.token_major else 2]
        if not enough or self._shapes != (keys, values) or self._buffers is None or self._buffers[0].device != device:
            capacity = max(self.capacity, tokens if self._buffers is None else int(GROWTH * tokens))
            self.release()
            self._buffers = (self._allocate(keys, capacity, device), self._allocate(values, capacity, device))
            self._shapes, self.capacity = (keys, values), capacity
        return self.part(0, tokens)

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views ``[B, H, stop - start, D]`` of tokens of the last :meth:`view`; each pass of a chunk asks for the same.

        Whoever reads them is not to write them, nor to change them in place in any way: the same views are handed out again.
        """
        if (start, stop) not in self._parts:
            if len(self._parts) == MOST_PARTS:
                self._parts.clear()
            self._parts[start, stop] = self._made(start, stop)
        return self._parts[start, stop]

    def kept(self, segments: Sequence[Segment]) -> int:
        """How many leading ``segments`` the memory holds already, at the same place."""
        same = 0
        for held, wanted in zip(self._segments, segments, strict=False):
            if held != wanted:
                break
            same += 1
        return same

    def holds(self, segments: Sequence[Segment]) -> None:
        """State what the memory holds from now on."""
        self._segments = tuple(segments)

    def _made(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if self._buffers is None:
            raise StateError(f"tokens {start} to {stop} of a workspace without memory; ask for a view first")
        # A view outlives the mode that it was made in.
        with torch.inference_mode(False), torch.no_grad():
            first, second = (self._cut(buffer, start, stop) for buffer in self._buffers)
        return first, second

    def _cut(self, buffer: Tensor, start: int, stop: int) -> Tensor:
        if not self.token_major:
            return buffer[:, :, start:stop]
        # The stride of a batch of one says nothing, but should be that of a tensor of these tokens alone.
        tokens = buffer[0, start:stop][None] if len(buffer) == 1 else buffer[:, start:stop]
        return tokens.transpose(1, 2)

    def _allocate(self, shape: tuple[int, int, int], capacity: int, device: torch.device) -> Tensor:
        batch, heads, channels = shape
        sizes = (batch, capacity, heads, channels) if self.token_major else (batch, heads, capacity, channels)
        # A tensor born in inference mode could not be written outside of it, and the next video may run there.
        with torch.inference_mode(False):
            return torch.empty(sizes, dtype=torch.bfloat16, device=device)
