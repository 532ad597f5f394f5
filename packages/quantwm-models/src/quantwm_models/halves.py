"""Joining what a host does to its key tensor and to its value tensor into what happens to one cache.

A host writes keys and values apart: first one, then the other, each a tensor of its own. The cache takes them together.
So each operation waits until its twin has come, and then both are carried out at once. Which of them the cache sees is
read off the place that is written (window coordinates, as the host counts slots):

* a range of the store set to a later range of itself is the *roll* of a sliding window: the tokens between are evicted;
* the slots of the active chunk are one more denoising step: overwrite;
* the slots behind the newest token are a new chunk: append;
* slot 0, when none of these applies, is a new video: the cache starts over.

One case looks alike: where a video consisted of a single chunk and the next one begins in the same dicts with a chunk
of the same length, its first write is taken for one more denoising step. What is read is right; only the queries of the
short video stay in the statistics.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch import Tensor

from quantwm_core.chunk import KINDS, Kind
from quantwm_core.errors import QuantWMError, RangeError, StateError
from quantwm_core.stream import Span
from quantwm_models.cache import LayerCache

# A roll and a write of one half may come before those of the other.
MOST_WAITING = 2


class Roll(NamedTuple):
    """The window tokens ``source`` move to ``place``, where earlier ones were."""

    place: Span
    source: Span


class Write(NamedTuple):
    """The slots ``place`` are set to ``tensor`` ``[B, H, n, D]``, which nobody else has."""

    place: Span
    tensor: Tensor


class Halves:
    """Keys and values of one layer, as a host writes them.

    Args:
        cache: The cache that takes both.
    """

    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self._waiting: dict[Kind, deque[Roll | Write]] = {kind: deque() for kind in KINDS}

    def check_whole(self) -> None:
        """Refuse to read while one half is ahead of the other.

        Raises:
            StateError: An operation waits for its twin.
        """
        for kind, other in (KINDS, KINDS[::-1]):
            if self._waiting[kind]:
                place = self._waiting[kind][0].place
                raise StateError(
                    f"layer {self.cache.layer}: {kind} of slots {place.start} to {place.stop} were written, "
                    f"their {other} not yet; write both before reading"
                )

    def put(self, kind: Kind, operation: Roll | Write) -> None:
        """Take one half's operation; carry it out if its twin has come.

        Raises:
            StateError: The other half did something else, or stays behind.
            QuantWMError: The cache refuses the operation; both halves of it are dropped then, and what waits behind it.
        """
        waiting = self._waiting
        waiting[kind].append(operation)
        self.cache.half_written = True
        if len(waiting[kind]) > MOST_WAITING:
            self.drop()
            raise StateError(
                f"layer {self.cache.layer}: {kind} were written {MOST_WAITING + 1} times without the other half; "
                "the store serves hosts that write keys and values in turn"
            )
        if all(waiting.values()):
            keys, values = waiting["keys"].popleft(), waiting["values"].popleft()
            self.cache.half_written, before = any(waiting.values()), self.cache.version
            try:
                self._carry_out(keys, values)
            except BaseException as error:
                # An observer may have failed after it was done; a unit that is refused late counts as a change, too.
                if self.cache.version == before or isinstance(error, QuantWMError):
                    self.drop()
                raise

    def _carry_out(self, keys: Roll | Write, values: Roll | Write) -> None:
        if isinstance(keys, Roll) and keys == values:
            self._roll(keys)
        elif isinstance(keys, Write) and isinstance(values, Write) and keys.place == values.place:
            self._write(keys.place, keys.tensor, values.tensor)
        else:
            raise StateError(
                f"layer {self.cache.layer}: the host did {_brief(keys)} with its keys and {_brief(values)} with its "
                "values; the store serves hosts that treat both alike"
            )

    def _roll(self, roll: Roll) -> None:
        cache = self.cache
        if roll.source.stop != cache.tokens or roll.source.start < roll.place.start:
            raise RangeError(
                f"layer {cache.layer}: slots {roll.source.start} to {roll.source.stop} were moved to "
                f"{roll.place.start} to {roll.place.stop}; the store knows only the roll of a window, which moves all "
                f"tokens up to the newest ({cache.tokens}) towards the front"
            )
        cache.evict(roll.place.start, roll.source.start)

    def _write(self, place: Span, keys: Tensor, values: Tensor) -> None:
        cache = self.cache
        active = cache.stream.active_span
        begin = cache.tokens - (active.tokens if active else 0)
        if active and place == (begin, cache.tokens):
            cache.overwrite(keys, values, copy=False)
        elif place.start == cache.tokens:
            cache.append(keys, values, copy=False)
        elif place.start == 0:
            cache.restart(keys, values, copy=False)
        else:
            raise RangeError(
                f"layer {cache.layer}: a write to slots {place.start} to {place.stop}; writable are the active chunk's "
                f"({begin} to {cache.tokens}), those behind it, and 0 for a new video: the others are sealed"
            )

    def drop(self) -> None:
        """Forget what waits for its twin."""
        for queue in self._waiting.values():
            queue.clear()
        self.cache.half_written = False


def _brief(operation: Roll | Write) -> str:
    start, stop = operation.place
    if isinstance(operation, Write):
        return f"a write to slots {start} to {stop}"
    return f"a move of slots {operation.source.start} to {operation.source.stop} to {start} to {stop}"
