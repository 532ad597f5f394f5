"""Which queries a unit may be sealed with: only those that came before it began.

Queries arrive while a chunk is active. They belong to the group of chunks that will be sealed together, and count for
units that begin after that group, never for the group itself.
"""

from __future__ import annotations

from typing import NamedTuple

from quantwm_core.errors import StateError
from quantwm_kernels.chunk import storage_nbytes
from quantwm_kernels.statistics import QueryMoment, merge


class Group(NamedTuple):
    """Queries seen while one group of chunks was filled; the group begins at absolute token ``start``."""

    start: int
    moment: QueryMoment | None


class CausalQueries(NamedTuple):
    """Query statistics of one layer, a value: every transition returns a new one.

    Attributes:
        past: Moment of all queries that every unit still to be sealed may use; None before there are any.
        groups: Later groups, ascending by start.
        decay: Forgetting at each fold; None counts all queries equally.
    """

    past: QueryMoment | None = None
    groups: tuple[Group, ...] = ()
    decay: float | None = None

    @property
    def moments(self) -> list[QueryMoment]:
        """All that there are, oldest first."""
        every = [self.past, *(group.moment for group in self.groups)]
        return [moment for moment in every if moment is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of storage of all moments."""
        return storage_nbytes(moment.mean for moment in self.moments)

    def begin(self, start: int) -> CausalQueries:
        """A group of chunks begins at absolute token ``start``."""
        return self._replace(groups=(*self.groups, Group(start, None)))

    def observe(self, moment: QueryMoment) -> CausalQueries:
        """Count one attention call's queries for the newest group.

        Raises:
            StateError: No group has begun.
        """
        known = self.newest
        return self.counted(moment if known is None else merge(known, moment))

    @property
    def newest(self) -> QueryMoment | None:
        """Moment of the newest group's queries; None before there are any.

        Raises:
            StateError: No group has begun.
        """
        if not self.groups:
            raise StateError("queries came before any chunk; append keys and values first")
        return self.groups[-1].moment

    def counted(self, moment: QueryMoment) -> CausalQueries:
        """The newest group's queries have this moment by now."""
        return self._replace(groups=(*self.groups[:-1], Group(self.groups[-1].start, moment)))

    def before(self, token: int) -> CausalQueries:
        """Fold into the past what was seen before absolute ``token``'s group began.

        >>> import torch
        >>> from quantwm_kernels.statistics import second_moment
        >>> query = second_moment(torch.ones(1, 1, 1, 4), 1)
        >>> queries = CausalQueries().begin(0).observe(query).begin(8).observe(query)
        >>> queries.before(7).past is None, queries.before(8).past.queries, queries.before(99).past.queries
        (True, 1, 1)
        """
        queries = self
        while len(queries.groups) > 1 and queries.groups[1].start <= token:
            queries = queries._fold_first()
        return queries

    def folded(self) -> CausalQueries:
        """Fold all into the past, for a cache that is built anew.

        >>> import torch
        >>> from quantwm_kernels.statistics import second_moment
        >>> query = second_moment(torch.ones(1, 1, 1, 4), 1)
        >>> queries = CausalQueries().begin(0).observe(query).begin(8).observe(query).folded()
        >>> queries.past.queries, queries.groups
        (2, ())
        """
        queries = self
        while queries.groups:
            queries = queries._fold_first()
        return queries

    def _fold_first(self) -> CausalQueries:
        first, *rest = self.groups
        past, moment = self.past, first.moment
        if past is not None and moment is not None:
            past = merge(past, moment, self.decay)
        return self._replace(past=past or moment, groups=tuple(rest))
