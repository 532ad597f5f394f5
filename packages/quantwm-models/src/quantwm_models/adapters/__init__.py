"""Adapters to hosts: a file of this folder is an adapter, and its name is the adapter's public name.

Such a file defines two functions, ``matches(pipeline) -> bool`` and ``attach(pipeline, make_cache) -> undo``. It
imports nothing of a host: what it needs it takes from the live object. One with options is a frozen dataclass with these
two as methods, of which the file's functions are those without options: ``attach(..., adapter=CausalForcing(frames=24))``.
Another distribution adds an adapter through the entry point group ``quantwm.adapters``, whose value is a module or an
object with these two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol, cast

from quantwm_core.errors import ParameterError, PluginError
from quantwm_core.plugin import Family
from quantwm_models.errors import UnknownHostError
from quantwm_models.rolling_dict import MakeCache


class Adapter(Protocol):
    """What an adapter can do; a module with these two functions is one."""

    def matches(self, pipeline: object) -> bool:
        """Whether ``pipeline`` is this adapter's host, judged by what the object is."""

    def attach(self, pipeline: object, make_cache: MakeCache) -> Callable[[], None]:
        """Put caches under the host.

        Returns:
            What restores the host exactly.

        Raises:
            HostError: The host is not of the version or shape that is supported; nothing was changed.
        """


def _is_adapter(found: object) -> bool:
    able = all(callable(getattr(found, name, None)) for name in ("matches", "attach"))
    return able and not isinstance(found, type)


_FAMILY = Family("adapter", __name__, "a module or object with matches() and attach()", _is_adapter)


def names() -> tuple[str, ...]:
    """Public names of all adapters, alphabetically; the project's own win over registered ones of the same name.

    >>> "demo" in names()
    True
    """
    return _FAMILY.names()


def get(name: str) -> Adapter:
    """Load an adapter.

    Raises:
        UnknownNameError: No adapter bears that name.
        PluginError: What registers it cannot be loaded or is no adapter, or several distributions register it.
    """
    return cast("Adapter", _FAMILY.get(name))


def chosen(adapter: object) -> Adapter:
    """The adapter of a name, or what came as one.

    Raises:
        UnknownNameError: No adapter bears that name.
        ParameterError: It is neither a name nor an adapter.

    >>> chosen(3)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: adapter 3: need the name of one, or a module or object with matches() and attach()
    """
    if isinstance(adapter, str):
        return get(adapter)
    if not _is_adapter(adapter):
        raise ParameterError(f"adapter {adapter!r}: need the name of one, or {_FAMILY.need}")
    return cast("Adapter", adapter)


def find(pipeline: object) -> Adapter:
    """The adapter that recognises a live object; one that :func:`get` refuses is left out with a warning.

    Raises:
        UnknownHostError: None does; the message lists the known ones and how to name one.
    """
    for name in names():
        try:
            adapter = get(name)
        except PluginError as error:
            warnings.warn(f"adapter {name!r} is left out: {error}", stacklevel=2)
            continue
        if adapter.matches(pipeline):
            return adapter
    kind = type(pipeline)
    raise UnknownHostError(
        f"no adapter recognises a {kind.__module__}.{kind.__qualname__}; known: {', '.join(names())}. "
        "If the host is one of these under another name, pass adapter=NAME; otherwise pass an adapter of your own"
    )
