"""Looking on while a cache works, without changing what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quantwm_core.errors import ParameterError
from quantwm_core.stream import Span
from quantwm_kernels.chunk import SealedChunk

if TYPE_CHECKING:
    from quantwm_models.cache import LayerCache


class CacheObserver:
    """What a cache tells those who look on; override what is of interest.

    Tensors are lent: BF16, valid during the call, not to be written. An exception passes through to the caller of the
    cache, whose state has changed already. A call that begins anew, as ``restart()`` and ``rebuild()`` do, tells first that the
    tokens of before are gone; one that goes on tells first of what it sealed.
    """

    def sealed(self, cache: LayerCache, chunk: SealedChunk, keys: Tensor, values: Tensor) -> None:
        """A unit was sealed; ``keys`` and ``values`` ``[B, H, N, D]`` are its exact tokens ``chunk.start`` to ``chunk.stop``."""

    def attended(self, cache: LayerCache, queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> None:
        """Queries ``[B, Hq, T, D]`` attended to keys and values ``[B, H, n, D]`` as they were read.

        ``spans`` are the absolute tokens of the read, in its order.
        """

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        """The absolute tokens ``start`` to ``stop`` are gone."""


def checked_observers(observers: Iterable[Any]) -> tuple[CacheObserver, ...]:
    """Those who are to be told; what has the three methods is one of them.

    Raises:
        ParameterError: One could not be told, or no several came.

    >>> checked_observers([CacheObserver])
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: observer <class '...CacheObserver'>: need a quantwm_models.CacheObserver, not its class
    """
    if not isinstance(observers, Iterable):
        raise ParameterError(f"observers {observers!r}: need a sequence of them, as [observer]")
    listed = tuple(observers)
    for each in listed:
        told = all(callable(getattr(each, name, None)) for name in ("sealed", "attended", "evicted"))
        if not told or isinstance(each, type):
            wrong = ", not its class" if told else ""
            raise ParameterError(f"observer {each!r}: need a quantwm_models.CacheObserver{wrong}")
    return listed


class Shown(CacheObserver):
    """Tells another of sealed tokens as the host's attention sees them, where a cache keeps them in another frame.

    Args:
        observer: Who is told.
        show: The tokens of a span, keys and values ``[B, H, N, D]``, to what attention sees of them.
    """

    def __init__(self, observer: CacheObserver, show: Callable[[Span, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.observer, self.show = observer, show

    def sealed(self, cache: LayerCache, chunk: SealedChunk, keys: Tensor, values: Tensor) -> None:
        """A unit was sealed."""
        self.observer.sealed(cache, chunk, *self.show(Span(chunk.start, chunk.stop), keys, values))

    def attended(self, cache: LayerCache, queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> None:
        """Queries attended."""
        self.observer.attended(cache, queries, keys, values, spans)

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        """Tokens are gone."""
        self.observer.evicted(cache, start, stop)
