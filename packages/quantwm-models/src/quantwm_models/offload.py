"""Sealed units in host memory, brought to the device packed, one layer ahead of the reads.

A unit in host memory is one block (:mod:`quantwm_models.packed`), pinned where a GPU reads it. A read of a layer needs all
of the layer's units on the device: they are copied into one of two slots there, by a stream of their own, while the layer
before is still at work in the other. Which layer comes next is learned from the reads, which go round.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.recipe import VECTOR_NBYTES
from quantwm_models.contents import Unit
from quantwm_models.packed import in_block, packed


class Staged(NamedTuple):
    """A layer's units on the device that reads them.

    Attributes:
        key: Equal for two of them only if the units lie at the same addresses.
        units: What was asked for, in host memory.
        slot: Memory on the device.
    """

    key: tuple[int, ...]
    units: tuple[Unit, ...]
    slot: Tensor

    def chunks(self) -> Mapping[int, SealedChunk]:
        """The units by serial number, over the memory where they are read."""
        blocks = zip(self.units, _places(self.units), strict=True)
        return {unit.serial: in_block(unit.chunk, self.slot[slice(*place)]) for unit, place in blocks}


class Offload:
    """Host memory for the sealed units of all layers of a host, and two slots on each device that reads them.

    Where no GPU reads, the same is done without pinning and without a stream. Several threads may read: one launches its reads
    after the other.

    Attributes:
        ahead: Reads whose units had been asked for before.
        late: Reads that had to ask for them.
        generation: Counts how often memory of a slot was given back; what points into one from before must be let go.

    >>> from quantwm_models import LayerCache, Workspace
    >>> generator, shared = torch.Generator().manual_seed(0), {"workspace": Workspace(), "offload": Offload()}
    >>> layers = [LayerCache("quantwm", layer=layer, **shared) for layer in range(3)]
    >>> for cache in layers:
    ...     cache.append(*torch.randn(2, 1, 2, 256, 64, generator=generator))
    ...     cache.seal()
    >>> for cache in layers * 2:
    ...     keys, values = cache.read()
    >>> report = layers[0].report()
    >>> report.host_nbytes == report.sealed_nbytes, report.staging_nbytes == 2 * report.sealed_nbytes
    (True, True)
    >>> shared["offload"].late, shared["offload"].ahead
    (1, 5)
    """

    def __init__(self) -> None:
        self._slots: dict[torch.device, tuple[_Slot, _Slot]] = {}
        self._wanted: weakref.WeakKeyDictionary[object, tuple[torch.device, tuple[Unit, ...]]] = (
            weakref.WeakKeyDictionary()
        )
        self._after: weakref.WeakKeyDictionary[object, weakref.ref[object]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[object] | None = None
        self.ahead = 0
        self.late = 0
        self.generation = 0
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Offload], tuple[()]]:
        """A copy, as of a host that is copied, knows no layer yet."""
        return Offload, ()

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, on all devices."""
        return sum(slot.memory.nbytes for slots in self._slots.values() for slot in slots)

    @staticmethod
    def take(unit: Unit, device: torch.device) -> Unit:
        """The unit in host memory, which ``device`` can read; one that is there already comes back.

        The copy is waited for: it is made once, after a seal that is waited for, too, and whoever is handed the unit
        may read it at once.
        """
        return unit if unit.block is not None else Unit(unit.serial, *packed(unit.chunk, pinned=device.type == "cuda"))

    def expect(self, layer: object, units: Sequence[Unit], device: torch.device) -> None:
        """State which units a read of a layer needs from now on."""
        with self._lock:
            known = layer in self._wanted
            self._wanted[layer] = (device, tuple(units))
            if not known:
                self._follows(layer)

    def forget(self, layer: object) -> None:
        """A layer has nothing in host memory any more."""
        with self._lock:
            self._wanted.pop(layer, None)

    def release(self) -> None:
        """Give the memory of the slots back, once all that reads it is done."""
        with self._lock:
            for device in self._slots:
                _synchronise(device)
            self._slots.clear()
            self.generation += 1

    @contextmanager
    def staged(self, layer: object) -> Iterator[Staged]:
        """A layer's units on its device, for reads that are launched inside; the next layer's are asked for.

        Raises:
            StateError: A CUDA graph is being captured, which would replay the copy of what is no longer there.
        """
        with self._lock:  # a slot is not filled anew before what reads it is launched
            yield from self._staged(layer)

    def _staged(self, layer: object) -> Iterator[Staged]:
        device, units = self._wanted[layer]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a CUDA graph is being captured, which cannot replay reads of units in host memory; read outside of it, "
                "or keep the units on the device"
            )
        if device not in self._slots:
            self._slots[device] = (_Slot(device), _Slot(device))
        slots = self._slots[device]
        slot = next((each for each in slots if each.held == _serials(units)), None)
        if slot is None:
            slot = min(slots, key=lambda each: each.used)
            self._fill(slot, units)
            self.late += 1
        else:
            self.ahead += 1
        slot.used = 1 + max(each.used for each in slots)
        self._follows(layer)
        self._fill_next(layer, slots[1 - slots.index(slot)])
        slot.wait()
        try:
            yield Staged((self.generation, slots.index(slot), *slot.held), units, slot.memory)
        finally:
            slot.release()

    def _follows(self, layer: object) -> None:
        """Learn which layer comes after which."""
        last = None if self._last is None else self._last()
        if last is not None:
            self._after[last] = weakref.ref(layer)
        self._last = weakref.ref(layer)

    def _fill_next(self, layer: object, slot: _Slot) -> None:
        """Bring the units of the layer that comes next, if it is known and reads on the same device."""
        after = self._after.get(layer)
        following = None if after is None else after()
        device, units = (slot.device, ()) if following is None else self._wanted.get(following, (slot.device, ()))
        if units and following is not layer and device == slot.device and slot.held != _serials(units):
            self._fill(slot, units)

    def _fill(self, slot: _Slot, units: tuple[Unit, ...]) -> None:
        if _places(units)[-1].stop > slot.memory.numel():
            others = (each for device, each in self._wanted.values() if each and device == slot.device)
            slot.reserve(max(_places(each)[-1].stop for each in others))
            self.generation += 1
        slot.fill(units)


class _Slot:
    """Memory on a device for the units of one layer, and who is at work in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.held: tuple[int, ...] = ()
        self.used = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._filled, self._read = (torch.cuda.Event() if self._stream else None for _ in range(2))

    def reserve(self, nbytes: int) -> None:
        """Have memory of another size."""
        # Rare, so waiting is cheaper than knowing all that may still read the memory that goes.
        _synchronise(self.device)
        self.held = ()
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self._stream is not None:
            self.memory.record_stream(self._stream)  # or it could be given away while the stream still writes
        self.release()

    def fill(self, units: Sequence[Unit]) -> None:
        """Ask for units, once what reads the memory now is done."""
        self.held = ()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._read is not None:
                torch.cuda.current_stream(self.device).wait_event(self._read)
            for unit, place in zip(units, _places(units), strict=True):
                if unit.block is not None:
                    self.memory[slice(*place)].copy_(unit.block, non_blocking=True)
            if self._filled is not None:
                self._filled.record()
        self.held = _serials(units)

    def wait(self) -> None:
        """Let what is launched next wait for the units, and for what reads them on another stream: the next units wait for the last."""
        for event in (self._filled, self._read):
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def release(self) -> None:
        """What was launched until now may still read; the next units wait for that."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self.device))


class _Place(NamedTuple):
    start: int
    stop: int


def _places(units: Sequence[Unit]) -> list[_Place]:
    """Bytes of a slot that each unit takes; each begins where a GPU's widest load may."""
    places, begin = [], 0
    for unit in units:
        size = 0 if unit.block is None else unit.block.numel()
        places.append(_Place(begin, begin + size))
        begin += -(-size // VECTOR_NBYTES) * VECTOR_NBYTES
    return places


def _serials(units: Sequence[Unit]) -> tuple[int, ...]:
    return tuple(unit.serial for unit in units)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
