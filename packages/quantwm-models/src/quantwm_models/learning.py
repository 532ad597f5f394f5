"""What a layer's cache learns from queries, and in which frame its units are sealed with it."""

from __future__ import annotations

import torch
from torch import Tensor

from quantwm_core.errors import DeviceError, ShapeError, StateError
from quantwm_core.method import Scheme
from quantwm_core.rotary import Turning
from quantwm_kernels.statistics import QueryMoment, merge, second_moment
from quantwm_models.contents import Contents
from quantwm_models.geometry import Geometry, check_moment, check_queries
from quantwm_models.rotary import coming_moment, still_moment
from quantwm_models.settling import KeyFrame


class Learning:
    """Folds queries into the statistics of contents, of which it returns new ones.

    Args:
        scheme: What is learned for; a scheme that uses no queries is spared their statistics.
        turning: How the host's positions turn queries, for schemes that look ahead.

    Attributes:
        turning, key_frame: As those of :class:`quantwm_models.LayerCache`.
    """

    def __init__(self, scheme: Scheme, turning: Turning | None) -> None:
        scheme.check_turning(turning)
        self.turning = turning if scheme.frames_ahead else None
        self.key_frame: KeyFrame | None = None
        self._ahead = scheme.frames_ahead
        self._learns = scheme.uses_queries

    @property
    def frame(self) -> KeyFrame | None:
        """What makes of the moment that is kept the one that a unit is sealed with."""
        turning, ahead = self.turning, self._ahead
        if turning is None:
            return self.key_frame
        return lambda moment, span: coming_moment(moment, span.stop, ahead, turning)

    def observed(self, contents: Contents, queries: Tensor, known: Geometry) -> Contents:
        """The contents after an attention call's queries; see :meth:`quantwm_models.LayerCache.observe`."""
        check_queries(queries)
        batch, heads, channels, _, _ = known
        # Queries may have other channels where the frame says what they are to the keys.
        framed = self.key_frame is not None
        fits = queries.ndim == 4 and queries.shape[0] == batch and (framed or queries.shape[3] == channels)
        if not fits or queries.shape[1] % heads:
            raise ShapeError(f"queries: got {tuple(queries.shape)}, need [{batch}, multiple of {heads}, T, {channels}]")
        _check_device("queries", queries.device, known)
        if not self._learns:
            return contents
        moment = self._moment(queries, heads, contents.stream.end, contents.queries.newest)
        return contents._replace(queries=contents.queries.counted(moment))

    def foreseen(self, contents: Contents, queries: Tensor, known: Geometry | None) -> Contents:
        """The same before the first chunk; see :meth:`quantwm_models.LayerCache.foresee`."""
        if known is not None:
            raise StateError("queries before the first chunk came after it; observe() them")
        check_queries(queries)
        if queries.ndim != 4 or queries.numel() == 0:
            raise ShapeError(f"queries: got {tuple(queries.shape)}, need [B, H, T, D], not empty")
        if not self._learns:
            return contents
        if self.turning is not None:
            raise StateError("queries before the first chunk have no position to be turned from; set frames_ahead=0")
        return _counted(contents, second_moment(queries, queries.shape[1]))

    def told(self, contents: Contents, moment: QueryMoment, known: Geometry | None) -> Contents:
        """The same of a moment; see :meth:`quantwm_models.LayerCache.observe_moment`."""
        check_moment(moment)
        shape, framed = tuple(moment.mean.shape), self.key_frame is not None
        if known is not None:
            batch, heads, channels, _, _ = known
            if shape[:2] != (batch, heads) or not (framed or shape[2:] == (channels, channels)):
                raise ShapeError(f"moment: got {shape}, need {(batch, heads, channels, channels)}")
            _check_device("moment of queries", moment.mean.device, known)
        if self.turning is not None:
            raise StateError("a moment of queries has no positions to be turned from; set frames_ahead=0")
        return _counted(contents, moment) if self._learns else contents

    def check_foreseen(self, contents: Contents, known: Geometry) -> None:
        """Refuse a first chunk that does not fit the queries that came before it.

        Raises:
            ShapeError, DeviceError: No unit could be sealed with their moment.
        """
        framed = self.key_frame is not None
        for moment in contents.queries.moments:
            batch, heads, _, channels = moment.mean.shape
            if (batch, heads) != known[:2] or not (framed or channels == known.key_channels):
                raise ShapeError(
                    f"keys of [batch, heads, channels] {list(known[:3])} after queries of {[batch, heads, channels]}, which came "
                    "before them; clear() forgets those, and so does restart()"
                )
            _check_device("queries that came before", moment.mean.device, known)

    def _moment(self, queries: Tensor, heads: int, end: int, before: QueryMoment | None) -> QueryMoment:
        """Moment of queries of the tokens up to absolute ``end``, and of those before, as it is kept."""
        if self.turning is None:
            return second_moment(queries, heads, before)
        start = end - queries.shape[2]
        if start < 0 or start == end:
            raise ShapeError(f"queries of {queries.shape[2]} tokens after {end} came; need those of the newest tokens")
        moment = still_moment(queries, heads, start, self.turning)
        return moment if before is None else merge(before, moment)


def _check_device(name: str, device: torch.device, known: Geometry) -> None:
    """Refuse what lives apart from the keys, of which no unit could be sealed."""
    if device != known.device:
        raise DeviceError(f"{name} on {device}, the keys on {known.device}; move one to the other")


def _counted(contents: Contents, moment: QueryMoment) -> Contents:
    """The contents after queries of that moment, which may come before any chunk."""
    known = contents.queries if contents.queries.groups else contents.queries.begin(0)
    return contents._replace(queries=known.observe(moment))
