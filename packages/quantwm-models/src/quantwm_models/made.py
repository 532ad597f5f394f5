"""The caches that a host was given, by the thread that asked for them."""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from quantwm_models.cache import LayerCache

Place = tuple[str, int]
"""Branch and layer."""


class Made:
    """Caches by branch and layer, a set for each thread: threads that run a host at once make a video each.

    The set that was added to last is kept alive; the others live as long as the host holds them.

    >>> made = Made()
    >>> cache, later = LayerCache("bf16"), LayerCache("bf16")
    >>> made.add(("", 0), cache)
    >>> thread = threading.Thread(target=made.add, args=(("", 0), later))
    >>> thread.start()
    >>> thread.join()
    >>> made.here()[("", 0)] is cache, len(made.everywhere())
    (True, 2)
    """

    def __init__(self) -> None:
        self._last: dict[Place, LayerCache] = {}
        self._thread = threading.get_ident()
        self._others: dict[int, WeakValueDictionary[Place, LayerCache]] = {}
        self._lock = threading.Lock()

    def add(self, place: Place, cache: LayerCache) -> None:
        """The calling thread asked for a cache; it takes the place of an earlier one."""
        here = threading.get_ident()
        with self._lock:
            if here != self._thread:
                self._others[self._thread] = WeakValueDictionary(self._last)
                self._last, self._thread = dict(self._others.pop(here, {})), here
            self._last[place] = cache

    def here(self) -> dict[Place, LayerCache]:
        """Caches that the calling thread asked for, or, if it has none, those of the thread that asked last."""
        with self._lock:
            own = self._others.get(threading.get_ident())
            return dict(own or {}) or dict(self._last)

    def everywhere(self) -> list[LayerCache]:
        """Caches of all threads."""
        with self._lock:
            return [*self._last.values(), *(cache for others in self._others.values() for cache in others.values())]
