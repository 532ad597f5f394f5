"""What a layer's cache answers: reads and attention, and what it learns from the queries that ask."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from jaxtyping import BFloat16, Float
from torch import Tensor

from quantwm_core.errors import ParameterError
from quantwm_core.rotary import Turning
from quantwm_kernels.statistics import QueryMoment
from quantwm_models.attending import AttentionPath, attend_decoded, attend_sealed, pays
from quantwm_models.contents import Part
from quantwm_models.geometry import check_queries
from quantwm_models.holding import Holding
from quantwm_models.offload import Staged
from quantwm_models.settling import KeyFrame


class Answering(Holding):
    """The contents of one layer, and what is asked of them.

    :class:`quantwm_models.LayerCache` is what a host calls.
    """

    attention: AttentionPath

    @abstractmethod
    def tell_attended(
        self, queries: Tensor, keys: Tensor, values: Tensor, start: int | None = None, stop: int | None = None
    ) -> None:
        """Tell the observers of an attention call over a read of ``start`` to ``stop``."""

    @property
    def turning(self) -> Turning | None:
        """What statistics are turned to coming frames by; None where they are left as they were asked."""
        return self._learning.turning

    @property
    def key_frame(self) -> KeyFrame | None:
        """What makes of the moment of queries the one that a unit's keys see, given the unit's absolute tokens.

        For keys that are cached in another frame than that in which queries meet them, which may then have other channels;
        None where both are the same.
        """
        return self._learning.key_frame

    @key_frame.setter
    def key_frame(self, frame: KeyFrame | None) -> None:
        if frame is not None and not callable(frame):
            raise ParameterError(
                f"layer {self.layer}: key_frame {frame!r}: need a function of a QueryMoment and a span of tokens, or None"
            )
        self._learning.key_frame = frame

    def read(
        self, start: int | None = None, stop: int | None = None
    ) -> tuple[
        BFloat16[Tensor, "batch heads range key_channels"], BFloat16[Tensor, "batch heads range value_channels"]
    ]:
        """Keys and values of window tokens ``start`` to ``stop`` (all by default).

        Returns:
            BF16 ``[B, H, n, D]`` views of the workspace, valid until the next read through it in this thread; not to be
            written, nor changed in place in any way: the same views are handed out again. On a GPU they are memory of the
            stream that allocated the workspace: who reads on another one orders the two, and finds a unit there only once a later
            change has confirmed it; until then it is there on the stream on which it was sealed.

        Raises:
            RangeError: The range lies outside the window.
            StateError: The cache is empty.
        """
        with self._located:
            batch, heads, key_channels, value_channels, device = self._known()
            first, last = self._range(start, stop)
            parts = self._reads.parts(self._contents, first, last)
            shapes = (batch, heads, key_channels), (batch, heads, value_channels)
            read = self.workspace.view(*shapes, last - first, device)
            self._reads.fill(self._contents, parts, device, self._staged)
            return read

    def attend(
        self,
        queries: Float[Tensor, "batch query_heads tokens channels"],
        start: int | None = None,
        stop: int | None = None,
    ) -> Float[Tensor, "batch query_heads tokens value_channels"]:
        """Observe the queries and attend to window tokens ``start`` to ``stop``, without a mask.

        Returns:
            ``[B, Hq, T, D]`` in the queries' number format.

        Raises:
            QuantWMError: As :meth:`observe` and :meth:`read`.
        """
        with self._located:
            check_queries(queries)
        if self._attends_packed(queries):
            return self._attend_packed(queries, start, stop)
        keys, values = self.read(start, stop)
        self.observe(queries)
        output = attend_decoded(queries, keys, values)
        self.tell_attended(queries, keys, values, start, stop)
        return output

    def observe(self, queries: Float[Tensor, "batch query_heads tokens channels"]) -> None:
        """Fold one attention call's queries into the statistics; no query is kept.

        They count for units that begin after the chunk that is active now. A scheme that uses no queries ignores them; one that
        looks ahead takes them for those of the newest tokens.

        Args:
            queries: BF16, FP16 or FP32 ``[B, Hq, T, D]``, in the frame of the cached keys; ``Hq`` a multiple of ``H``.

        Raises:
            StateError: Nothing was appended yet, or the queries require grad.
            ShapeError, DtypeError, DeviceError: They do not fit the keys, or live elsewhere.
            DomainError: On a CPU, they hold NaN, Inf or numbers too large. A GPU finds out when a unit is sealed with them:
                that seal raises it, and every later one, for their moment cannot be repaired and a rebuild keeps it. Only
                :meth:`clear` or :meth:`quantwm_models.LayerCache.restart` forgets it.
        """
        with self._located:
            self._contents = self._learning.observed(self._contents, queries, self._known())

    def foresee(self, queries: Float[Tensor, "batch heads tokens channels"]) -> None:
        """Fold queries of a host that asks before it has anything cached; they count for all that will be.

        Args:
            queries: BF16, FP16 or FP32 ``[B, H, T, D]``, as many heads as the keys will have.

        Raises:
            StateError: Something is cached already, or the queries require grad.
            DtypeError, ShapeError: They are no such tensor.
            DomainError: As :meth:`observe`.
        """
        with self._located:
            self._contents = self._learning.foreseen(self._contents, queries, self._geometry)

    def observe_moment(self, moment: QueryMoment) -> None:
        """:meth:`observe`, or :meth:`foresee` where nothing is cached, queries whose second moment is known already.

        Args:
            moment: Of ``[B, H]`` streams, in the frame in which queries are observed.

        Raises:
            StateError: The scheme looks ahead, which takes the positions of queries; or the mean requires grad.
            DeviceError, DtypeError: It is no :class:`quantwm_kernels.statistics.QueryMoment` of FP32 where one is served, or lives
                apart from the keys.
            ShapeError: The streams or the channels are not those of the keys.
            ParameterError: It is not of a whole number of queries above 0.
            DomainError: On a CPU, it holds NaN, Inf or a negative number on the diagonal. A GPU finds out when a unit is sealed
                with NaN or Inf, as with queries of :meth:`observe`; it does not look for negative ones.

        >>> import torch
        >>> from quantwm_kernels.statistics import second_moment
        >>> from quantwm_models import LayerCache
        >>> cache, (keys, values, queries) = LayerCache("quantwm"), torch.ones(3, 1, 2, 64, 32)
        >>> cache.observe_moment(second_moment(queries, 2))
        >>> cache.append(keys, values)
        >>> cache.queries.past.queries
        64
        """
        with self._located:
            self._contents = self._learning.told(self._contents, moment, self._geometry)

    def _range(self, start: int | None, stop: int | None) -> tuple[int, int]:
        """First window token of a range and the one behind its last; all by default."""
        return 0 if start is None else start, self.tokens if stop is None else stop

    def _staged(self, parts: Sequence[Part]) -> AbstractContextManager[Staged | None]:
        """The units brought from host memory if ``parts`` are of any; None where they are read from where they are."""
        if self.offload is None or all(part.unit is None for part in parts):
            return nullcontext()
        return self.offload.staged(self)

    def _attends_packed(self, queries: Tensor) -> bool:
        """Whether to attend from the packed cache; where somebody looks on, only if told to."""
        if self.attention != "auto":
            return self.attention in ("packed", "rotated")
        return not self.observers and self._geometry is not None and pays(queries, self._geometry)

    def _attend_packed(self, queries: Tensor, start: int | None, stop: int | None) -> Tensor:
        with self._located:
            known, rotated = self._known(), self.attention == "rotated"
            parts = self._reads.parts(self._contents, *self._range(start, stop))
            exact = [(keys, values) for _, keys, values in self._contents.plain(parts)]
            with self._staged(parts) as staged:
                plan = self._reads.plan(self._contents, parts, staged)
                output = attend_sealed(queries, plan, exact, known, rotated=rotated)
        self.observe(queries)
        if self.observers:
            self.tell_attended(queries, *self.read(start, stop), start, stop)
        return output
