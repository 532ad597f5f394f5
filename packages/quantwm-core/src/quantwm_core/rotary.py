"""Queries as those of coming frames will be asked: a rotary embedding turns them with time, and that part is known.

A host that rotates queries and keys by the number of their frame asks in turn after turn of the same planes, whereas what
it asks *about* changes slowly (arXiv 2605.30083 finds queries before their rotation nearly stationary). So the second moment
is kept as if every query had been asked in frame 0, and turned to the frames to come before a unit is sealed with it::

    M_0 = E[R_f^T q q^T R_f]        M = mean over coming frames g of R_g M_0 R_g^T

``R_f`` turns each two neighbouring channels by an angle that grows with the frame. Row and column of a token turn queries, too,
but alike in every frame; that part stays in the moment. Which frames come is known, what they ask is not: causal as before.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64

from quantwm_core.arguments import explain_errors
from quantwm_core.errors import ParameterError, ShapeError
from quantwm_core.statistics import QueryMoment, merge, second_moment
from quantwm_core.stream import is_whole


@dataclass(frozen=True)
class Turning:
    """How a host's rotary embedding follows time.

    Attributes:
        frame_tokens: Tokens of a frame; token ``t`` of a video is in frame ``t // frame_tokens``.
        rates: Radians a frame of each pair of neighbouring channels, ``D / 2`` of them; 0 for pairs that follow row or column.
            Any sequence or array of numbers; kept as a tuple.

    Raises:
        ParameterError: A frame has no tokens or no whole number of them, or the rates are no finite numbers in a row.

    >>> Turning(64, (1.0, 0.0)).angles(2, 4)
    array([[2., 0.],
           [3., 0.]])
    """

    frame_tokens: int
    rates: Sequence[float] | Float[np.ndarray, " pairs"]

    def __post_init__(self) -> None:
        if not is_whole(self.frame_tokens) or self.frame_tokens < 1:
            raise ParameterError(f"frame_tokens {self.frame_tokens!r}: need a whole number of at least 1")
        object.__setattr__(self, "frame_tokens", int(self.frame_tokens))
        object.__setattr__(self, "rates", _numbers(self.rates))

    def angles(self, first: int, last: int) -> Float64[np.ndarray, "frames pairs"]:
        """Radians by which frames ``first`` to ``last`` turn each pair."""
        return np.arange(first, last, dtype=np.float64)[:, None] * np.array(self.rates)

    def frames(self, start: int, tokens: int) -> Iterator[tuple[int, slice]]:
        """Frames that ``tokens`` tokens from token ``start`` of a video lie in, and which of these tokens each has.

        >>> list(Turning(64, (1.0,)).frames(60, 70))
        [(0, slice(0, 4, None)), (1, slice(4, 68, None)), (2, slice(68, 70, None))]
        """
        begin = 0
        while begin < tokens:
            frame = (start + begin) // self.frame_tokens
            end = min(tokens, (frame + 1) * self.frame_tokens - start)
            yield frame, slice(begin, end)
            begin = end

    def frames_before(self, token: int) -> int:
        """Frames that begin before a token of a video.

        >>> Turning(64, (1.0,)).frames_before(64), Turning(64, (1.0,)).frames_before(65)
        (1, 2)
        """
        return -(-token // self.frame_tokens)

    def check_channels(self, channels: int) -> None:
        """Raise :class:`ShapeError` unless there is a rate for each pair of ``channels``."""
        if channels != 2 * len(self.rates):
            raise ShapeError(
                f"turning by {len(self.rates)} rates for queries of {channels} channels: need one for each two"
            )


def _numbers(rates: object) -> tuple[float, ...]:
    """A turning's rates, whatever they came as."""
    try:
        numbers = np.asarray(rates)
    except (RuntimeError, TypeError, ValueError):  # rows of several lengths; tensors that NumPy cannot see
        numbers = np.asarray(None)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf" or not numbers.size or not np.isfinite(numbers).all():
        raise ParameterError(f"rates {reprlib.repr(rates)}: need finite numbers, one for each two channels")
    return tuple(numbers.astype(np.float64).tolist())


def still_moment(
    queries: Float[np.ndarray, "batch query_heads tokens channels"], kv_heads: int, start: int, turning: Turning
) -> QueryMoment:
    """Second moment of an attention call's queries as if all had been asked in frame 0.

    Args:
        queries: As :func:`quantwm_core.statistics.second_moment` takes them, rotated.
        kv_heads: KV heads.
        start: Token of the video that the first query belongs to.
        turning: What the host turned them by.

    Raises:
        ShapeError, DomainError: As there; or the rates are not of so many channels.

    >>> asked = np.float32([[[[1.0, 0.0], [0.0, 1.0]]]])  # a quarter turn a frame, a token each
    >>> still_moment(asked, 1, 0, Turning(1, (np.pi / 2,))).mean.round(6) + 0.0
    array([[[[1., 0.],
             [0., 0.]]]], dtype=float32)
    """
    turning.check_channels(queries.shape[-1])
    known: QueryMoment | None = None
    for frame, own in turning.frames(start, queries.shape[2]):
        moment = second_moment(queries[:, :, own], kv_heads)
        still = QueryMoment(turned_moment(moment.mean, -turning.angles(frame, frame + 1)), moment.count)
        known = still if known is None else merge(known, still)
    if known is None:
        raise ShapeError(f"queries {queries.shape}: need at least one")
    return known


def coming_moment(still: QueryMoment, stop: int, frames: int, turning: Turning) -> QueryMoment:
    """A moment of frame 0 as it will be asked in the frames that follow a unit.

    Args:
        still: Of :func:`still_moment`.
        stop: Token behind the unit's last.
        frames: How many frames to come, counted alike.
        turning: What the host will turn them by.

    >>> still = QueryMoment(np.float32([[[[4.0, 0.0], [0.0, 0.0]]]]), 1)  # a quarter turn a frame, a token each
    >>> coming_moment(still, 1, 1, Turning(1, (np.pi / 2,))).mean.round(6) + 0.0
    array([[[[0., 0.],
             [0., 4.]]]], dtype=float32)
    """
    first = turning.frames_before(stop)
    return QueryMoment(turned_moment(still.mean, turning.angles(first, first + frames)), still.count)


def turned_moment(
    mean: Float32[np.ndarray, "*streams channels channels"], angles: Float64[np.ndarray, "frames pairs"]
) -> Float32[np.ndarray, "*streams channels channels"]:
    """Mean of ``R M R^T`` over rotations, in FP64.

    A 2 x 2 block of ``M`` is the sum of a rotation and a reflection, each a complex number. Turning its rows by ``a`` and its
    columns by ``b`` multiplies the former by ``exp(i(a - b))`` and the latter by ``exp(i(a + b))``, so no loop is needed.

    >>> quarter = np.array([[0.0], [np.pi / 2]])
    >>> turned_moment(np.float32([[4.0, 0.0], [0.0, 0.0]]), quarter).round(6) + 0.0
    array([[2., 0.],
           [0., 2.]], dtype=float32)
    """
    phases = np.exp(1j * angles)
    differences = phases.T @ phases.conj() / len(phases)
    sums = phases.T @ phases / len(phases)
    pairs = mean.shape[-1] // 2
    blocks = mean.astype(np.float64).reshape(*mean.shape[:-2], pairs, 2, pairs, 2)
    a, b, c, d = (blocks[..., row, :, column] for row in (0, 1) for column in (0, 1))
    rotation = ((a + d) + 1j * (c - b)) * differences
    reflection = ((a - d) + 1j * (c + b)) * sums
    both, rest = rotation + reflection, reflection - rotation
    first = np.stack([both.real, rest.imag], axis=-1)
    second = np.stack([both.imag, -rest.real], axis=-1)
    return (np.stack([first, second], axis=-3).reshape(mean.shape) / 2).astype(np.float32)


explain_errors(globals())
