"""Which of several processes this one is that share a layer's heads, and the file of which of them a snapshot is."""

from __future__ import annotations

from typing import NamedTuple

from torch import distributed

from quantwm_core.errors import FormatError, ParameterError
from quantwm_core.stream import is_whole
from quantwm_models.bookkeeping import whole


class Rank(NamedTuple):
    """One of several processes.

    >>> str(Rank(1, 4))
    'rank 1 of 4'
    """

    number: int
    ranks: int

    def __str__(self) -> str:
        return f"rank {self.number} of {self.ranks}"


def rank_here() -> Rank | None:
    """Which process this is of those that ``torch.distributed`` knows; None before it knows any.

    >>> rank_here() is None
    True
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return Rank(distributed.get_rank(), distributed.get_world_size())


def rank_told(told: object) -> Rank | None:
    """What a file says of the rank that saved it; None where it says nothing.

    >>> str(rank_told([0, 2]))
    'rank 0 of 2'
    >>> rank_told([2, 2])
    Traceback (most recent call last):
    ...
    quantwm_core.errors.FormatError: rank: got 2, need a whole number from 0 to 1
    """
    if told is None:
        return None
    if not isinstance(told, list) or len(told) != 2:
        raise FormatError(f"rank: got {told!r}, need a rank and of how many it is one")
    count = whole("ranks", told[1], least=1)
    return Rank(whole("rank", told[0], most=count - 1), count)


def checked_ranks(count: int) -> int:
    """Of how many ranks each holds as many of a layer's heads.

    >>> checked_ranks(0)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: ranks 0: need a whole number above 0, of how many ranks each holds as many heads
    """
    if not is_whole(count) or count < 1:
        raise ParameterError(
            f"ranks {count!r}: need a whole number above 0, of how many ranks each holds as many heads"
        )
    return int(count)
