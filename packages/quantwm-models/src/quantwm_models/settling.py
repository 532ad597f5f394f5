"""Sealing what is due in a layer's contents, and what is to be believed of it later."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core.errors import DomainError
from quantwm_core.method import Scheme
from quantwm_core.stream import Span, Stream, overlap
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.methods import begin_chunk
from quantwm_kernels.sealing import PendingChunk
from quantwm_kernels.statistics import QueryMoment
from quantwm_models.contents import Contents, Exact, Unit, serials
from quantwm_models.errors import located
from quantwm_models.stopwatch import Stopwatch

# The moment of queries as the keys of some absolute tokens see them.
KeyFrame = Callable[[QueryMoment, Span], QueryMoment]


class Sealing(NamedTuple):
    """A unit that was just sealed, and the exact tokens it was made from."""

    chunk: SealedChunk
    keys: Tensor
    values: Tensor


class Unconfirmed(NamedTuple):
    """Units that can be read already, and of which a GPU will tell whether they could be sealed.

    Attributes:
        begun: Name for messages, span and sealing of each.
        watch: What times them.
    """

    begun: tuple[tuple[str, Span, PendingChunk], ...]
    watch: Stopwatch

    def wait(self) -> tuple[tuple[Span, SealedChunk], ...]:
        """Wait for the units, each with its span.

        Raises:
            DomainError: One cannot be sealed.
        """
        made = []
        for name, span, pending in self.begun:
            with located(name), _advised():
                made.append((span, pending.wait()))
        return tuple(made)

    def confirm(self, contents: Contents, *, keep: bool = False) -> Contents:
        """``contents``, which hold the units, with what became of them; waits for their sealing.

        Args:
            contents: Now.
            keep: Leave the units in the memory where they are read already, though less would do.

        Raises:
            DomainError: As :meth:`wait`.
        """
        units = dict(contents.units)
        for span, chunk in self.wait():
            if not keep and span in units and not _stored_alike(units[span].chunk, chunk):
                units[span] = units[span]._replace(chunk=chunk)
        return contents._replace(units=units, seal_seconds=contents.seal_seconds + self.watch.seconds())


class Settled(NamedTuple):
    """What sealing made of contents.

    Attributes:
        contents: Nothing is due in them any more.
        sealings: What was sealed.
        unconfirmed: Units that were not waited for; None if all were.
    """

    contents: Contents
    sealings: tuple[Sealing, ...]
    unconfirmed: Unconfirmed | None = None


def settle(
    contents: Contents,
    scheme: Scheme,
    frame: KeyFrame | None = None,
    *,
    replaced: SealedChunk | None = None,
    wait: bool = True,
) -> Settled:
    """Seal what is due, by queries in the frame of the keys.

    Args:
        contents: They are left as they are.
        scheme: How.
        frame: See :attr:`quantwm_models.cache.LayerCache.key_frame`.
        replaced: What is the unit before to the first unit, which has none here.
        wait: Whether to wait for units that a GPU seals; those that can be read before are left unconfirmed otherwise.

    Raises:
        QuantWMError: A unit cannot be sealed; the message names its chunk and the tensor.
    """
    stream = contents.stream.sealed()
    due = stream.units[len(contents.stream.units) :]
    if stream is contents.stream:
        queries = contents.queries.before(stream.sealed_end)
        return Settled(contents if queries is contents.queries else contents._replace(queries=queries), ())
    watch = Stopwatch()
    queries, units, sealings, unconfirmed = contents.queries, dict(contents.units), [], []
    last = (contents.newest(contents.exact[-1].keys.device) or replaced) if due else None
    for span in due:
        queries = queries.before(span.start)
        keys, values = _gathered(contents.exact, span)
        past = queries.past if frame is None or queries.past is None else frame(queries.past, span)
        begun, name = watch.start(keys.device), _named(contents.stream, span)
        with located(name), _advised():
            pending = begin_chunk(scheme, keys, values, past, last, span.start)
            readable = None if wait else pending.readable()
            if readable is not None:
                unconfirmed.append((name, span, pending))
            last = readable or pending.wait()
        watch.stop(begun)
        units[span] = Unit(next(serials), last)
        sealings.append(Sealing(last, keys, values))
    settled = contents.followed(
        stream,
        units,
        queries=queries.before(stream.sealed_end),
        chunks_sealed=contents.chunks_sealed + len(due),
        seal_seconds=contents.seal_seconds + (0 if unconfirmed else watch.seconds()),
    )
    return Settled(settled, tuple(sealings), Unconfirmed(tuple(unconfirmed), watch) if unconfirmed else None)


@contextmanager
def _advised() -> Iterator[None]:
    """Say what a host can do about numbers that cannot be sealed."""
    try:
        yield
    except DomainError as error:
        advice = "a chunk that is at fault can be rewritten with overwrite(), and clear() forgets everything"
        raise DomainError(f"{error}; {advice}") from error


def _gathered(pieces: Sequence[Exact], span: Span) -> tuple[Tensor, Tensor]:
    """BF16 keys and values of live, unsealed tokens."""
    parts = [piece.within(part) for piece in pieces if (part := overlap(piece.span, span)) is not None]
    if len(parts) == 1:
        return parts[0]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def _named(stream: Stream, span: Span) -> str:
    """Chunks that a unit lies in, for messages."""
    first, last = (bisect_right(stream.ends, token) for token in (span.start, span.stop - 1))
    return f"chunk {first}" if first == last else f"chunks {first} to {last}"


def _stored_alike(one: SealedChunk, other: SealedChunk) -> bool:
    """Whether two units are made of the same arrays."""
    pairs = ((one.keys.arrays, other.keys.arrays), (one.values.arrays, other.values.arrays))
    return all(
        ours.keys() == theirs.keys() and all(array is theirs[name] for name, array in ours.items())
        for ours, theirs in pairs
    )
