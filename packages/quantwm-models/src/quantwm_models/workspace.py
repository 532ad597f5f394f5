"""The BF16 keys and values of one read, in memory that all layers share, of each thread that reads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(eq=False)
class _Memory:
    """What one thread reads into.

    Attributes:
        buffers: Keys and values of the last read.
        shapes: ``(B, H, D)`` of each.
        segments: What they hold.
        parts: Views of them.
        unconfirmed: Waits for what one of the layers is sealing. There is one at a time, whose BF16 tokens are still there.
    """

    buffers: tuple[Tensor, Tensor] | None = None
    shapes: tuple[Sequence[int], Sequence[int]] | None = None
    segments: tuple[Segment, ...] = ()
    parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    unconfirmed: Callable[[], None] | None = None

    def forget(self) -> None:
        """Hold nothing."""
        self.buffers, self.shapes, self.segments = None, None, ()
        self.parts.clear()


class _Here(threading.local):
    """The memory of the calling thread, made when it first asks, and added to those of a workspace."""

    def __init__(self, memories: weakref.WeakSet[_Memory], lock: threading.Lock) -> None:
        self.memory = _Memory()
        with lock:
            memories.add(self.memory)


class Workspace:
    """Memory for the keys and values of one read at a time, in each thread that reads.

    What was read last stays until the next read of the same thread: a read that begins with the same segments keeps them. A
    thread's memory is taken by its first read and goes when the thread ends, or by :meth:`release`.

    Args:
        capacity: Tokens to make room for at the first read.
        token_major: Lay tokens before heads, ``[B, S, H, D]``, as hosts do that attend in this layout.
    """

    def __init__(self, capacity: int = 0, *, token_major: bool = False) -> None:
        self.capacity = capacity
        self.token_major = token_major
        self._memories: weakref.WeakSet[_Memory] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._here = _Here(self._memories, self._lock)

    def __reduce__(self) -> tuple[Callable[..., Workspace], tuple[int]]:
        """A copy, as of a host that is copied with its caches, has read nothing."""
        return partial(Workspace, token_major=self.token_major), (self.capacity,)

    @property
    def unconfirmed(self) -> Callable[[], None] | None:
        """Waits for what one of the layers is sealing, begun by the calling thread; None where nothing is."""
        return self._here.memory.unconfirmed

    @unconfirmed.setter
    def unconfirmed(self, wait: Callable[[], None] | None) -> None:
        self._here.memory.unconfirmed = wait

    def confirm(self) -> None:
        """Wait for what one of the layers is sealing, begun by the calling thread, before any changes.

        Raises:
            DomainError: It cannot be sealed; the message names the layer, and its cache is as it was.
        """
        mine = self._here.memory
        if mine.unconfirmed is None:
            return
        try:
            mine.unconfirmed()
        except Exception:
            mine.unconfirmed = None  # that layer has decided; after an interrupt it is asked again
            raise
        mine.unconfirmed = None

    @property
    def nbytes(self) -> int:
        """Bytes of storage, of all threads."""
        with self._lock:
            held = [memory.buffers for memory in self._memories]
        return sum(storage_nbytes(buffers) for buffers in held if buffers is not None)

    def reserve(self, tokens: int) -> None:
        """Make room for reads of that many tokens at the next allocation."""
        self.capacity = max(self.capacity, tokens)

    def release(self) -> None:
        """Give the memory of all threads back, none of which may be reading; tensors that a read returned keep theirs alive."""
        with self._lock:
            for memory in self._memories:
                memory.forget()

    def view(
        self, keys: tuple[int, int, int], values: tuple[int, int, int], tokens: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """BF16 ``[B, H, tokens, D]`` views for keys and values; contents kept only if the memory is the same.

        Args:
            keys, values: ``(B, H, D)`` of each.
            tokens: Tokens of the read.
            device: Where they are needed.
        """
        mine = self._here.memory
        buffers = mine.buffers
        enough = buffers is not None and tokens <= buffers[0].shape[1 if self.token_major else 2]
        if not enough or mine.shapes != (keys, values) or buffers is None or buffers[0].device != device:
            capacity = max(self.capacity, tokens if buffers is None else int(GROWTH * tokens))
            del buffers
            mine.forget()
            mine.buffers = (self._allocate(keys, capacity, device), self._allocate(values, capacity, device))
            mine.shapes, self.capacity = (keys, values), capacity
        return self._part(mine, 0, tokens)

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views ``[B, H, stop - start, D]`` of tokens of the thread's last :meth:`view`; each pass of a chunk asks for the same.

        Whoever reads them is not to write them, nor to change them in place in any way: the same views are handed out again.
        """
        return self._part(self._here.memory, start, stop)

    def kept(self, segments: Sequence[Segment]) -> int:
        """How many leading ``segments`` the thread's memory holds already, at the same place."""
        same = 0
        for held, wanted in zip(self._here.memory.segments, segments, strict=False):
            if held != wanted:
                break
            same += 1
        return same

    def holds(self, segments: Sequence[Segment]) -> None:
        """State what the thread's memory holds from now on."""
        self._here.memory.segments = tuple(segments)

    def _part(self, memory: _Memory, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if (start, stop) not in memory.parts:
            if len(memory.parts) == MOST_PARTS:
                memory.parts.clear()
            memory.parts[start, stop] = self._made(memory.buffers, start, stop)
        return memory.parts[start, stop]

    def _made(self, buffers: tuple[Tensor, Tensor] | None, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if buffers is None:
            raise StateError(f"tokens {start} to {stop} of a workspace without memory; ask for a view first")
        # A view outlives the mode that it was made in.
        with torch.inference_mode(False), torch.no_grad():
            first, second = (self._cut(buffer, start, stop) for buffer in buffers)
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
