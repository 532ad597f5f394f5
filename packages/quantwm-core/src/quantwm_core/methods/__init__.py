"""The cache methods: a file of this folder is a method, and its name is the method's public name.

Such a file defines ``METHOD``, a frozen dataclass that fulfils :class:`quantwm_core.method.Method`. Another
distribution adds a method through the entry point group ``quantwm.methods``, whose value is the dataclass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast, get_args, get_type_hints

from quantwm_core.errors import ParameterError, UnknownNameError
from quantwm_core.plugin import Family

if TYPE_CHECKING:
    from quantwm_core.method import Method

ADDED = {"added": True}
"""Metadata of a field that files of the first release do not state; its default does what they did."""


def _is_dataclass(found: object) -> bool:
    return isinstance(found, type) and is_dataclass(found)


_FAMILY = Family("method", __name__, "a dataclass", _is_dataclass, "METHOD")


def names() -> tuple[str, ...]:
    """Public names of all methods, alphabetically; the project's own win over registered ones of the same name.

    >>> names()
    ('bf16', 'kivi', 'klt', 'kvtc', 'oscar', 'quantwm', 'qvg', 'rtn')
    """
    return _FAMILY.names()


def distributions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the other distributions that register some of these methods, by their names.

    >>> distributions(["qvg"])
    {}
    """
    return _FAMILY.distributions(names)


@cache
def implementation(name: str) -> type[Any]:
    """Class that implements a method.

    Raises:
        UnknownNameError: No method bears that name.
        PluginError: What registers it cannot be loaded, or several distributions register it.
    """
    bare, *settings_given = str(name).split(":")
    if settings_given and bare in names():
        raise UnknownNameError(
            f"unknown method {name!r}: name {bare!r} and give its settings apart, {', '.join(settings_given)}"
        )
    return cast("type[Any]", _FAMILY.get(name))


def parameter_names(name: str) -> tuple[str, ...]:
    """Names of a method's parameters.

    >>> parameter_names("kivi")
    ('group_size', 'residual_length')
    """
    return tuple(field.name for field in fields(implementation(name)))


def get(name: str, **parameters: Any) -> Method:
    """Make a method.

    Raises:
        UnknownNameError: No method bears that name.
        ParameterError: It has no such parameter, or a value is of another type or out of range.
        PluginError: As :func:`implementation`.

    >>> get("quantwm", rank=16).rank
    16
    >>> get("quantwm", rank=1.5)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: quantwm rank 1.5: need int
    """
    known = parameter_names(name)
    method: Any = implementation(name)
    hints = _hints(method)
    for parameter, value in parameters.items():
        if parameter not in known:
            raise ParameterError(f"{name} has no parameter {parameter!r}; known: {', '.join(known) or 'none'}")
        if not _fits(value, hints[parameter]):
            raise ParameterError(f"{name} {parameter} {value!r}: need {_words(hints[parameter])}")
    return cast("Method", method(**parameters))


def settings(method: Any) -> dict[str, Any]:
    """Parameters that a sealed tensor states: all but those :data:`ADDED` that have their default.

    So what the first release could write is written as it wrote it.

    >>> settings(get("qvg", stages=2))["stages"], "rounding" in settings(get("quantwm"))
    (2, False)
    """
    values = {each.name: (getattr(method, each.name), each) for each in fields(method)}
    return {
        name: value
        for name, (value, each) in values.items()
        if not (each.metadata.get("added") and value == each.default)
    }


@cache
def _hints(method: type[Any]) -> Mapping[str, Any]:
    """Types that a method's parameters declare; to find them takes longer than all else that a unit is read by."""
    return get_type_hints(method)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has the type that a parameter declares; an int is a float, a bool is neither."""
    allowed = _classes(hint)
    # A registered method may declare more than classes; its constructor judges.
    return not allowed or type(value) in allowed or (type(value) is int and float in allowed)


@cache
def _classes(hint: Any) -> tuple[type, ...]:
    """Classes that a parameter may be of; none where it declares more than classes."""
    allowed = get_args(hint) or (hint,)
    return allowed if all(isinstance(member, type) for member in allowed) else ()


def _words(hint: Any) -> str:
    """``int | None`` as ``int or None``."""
    return " or ".join("None" if member is type(None) else member.__name__ for member in get_args(hint) or (hint,))
