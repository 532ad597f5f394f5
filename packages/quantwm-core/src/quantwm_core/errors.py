"""What can go wrong, as types: every error says what came and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantWMError(Exception):
    """Base of every error that quantwm raises on purpose."""


class ShapeError(QuantWMError, ValueError):
    """An array has the wrong rank, or two arrays do not fit together."""


class DtypeError(QuantWMError, TypeError):
    """An array holds a number format that the operation does not take."""


class DomainError(QuantWMError, ValueError):
    """A value is NaN, infinite or beyond the supported magnitude (2**60)."""


class ParameterError(QuantWMError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class RangeError(QuantWMError, IndexError):
    """A token range does not exist: past the end, evicted, or no longer writable."""


class StateError(QuantWMError, RuntimeError):
    """The call does not fit the state of the object, such as a tensor that records gradients."""


class DeviceError(QuantWMError, RuntimeError):
    """No implementation serves the device that the tensors live on."""


class FormatError(QuantWMError, ValueError):
    """A file is foreign, truncated, or written by a newer version."""


class PluginError(QuantWMError, ImportError):
    """What another distribution registers cannot be loaded, is not what it stands for, or shares its name with something else."""


class UnknownNameError(QuantWMError, LookupError):
    """No member of a family (method, adapter, metric) bears that name."""


def lookup(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is among ``known``, else say what is.

    Args:
        kind: What the name names, for the message: ``"method"``, ``"adapter"``.
        name: The name that came.
        known: Every legal name.

    Raises:
        UnknownNameError: ``name`` is not known; the message proposes the nearest name and lists all.

    >>> lookup("method", "qvg", ["kivi", "qvg"])
    'qvg'
    >>> lookup("method", "qgv", ["kivi", "qvg"])
    Traceback (most recent call last):
    ...
    quantwm_core.errors.UnknownNameError: unknown method 'qgv'; did you mean 'qvg'? known: kivi, qvg
    """
    names = sorted(known)
    if name in names:
        return name
    raise UnknownNameError(f"unknown {kind} {name!r};{meant(name, names)} known: {', '.join(names)}")


def meant(name: object, known: Iterable[str]) -> str:
    """A question after the nearest of some names, with a space before it; empty where none is near.

    >>> meant("qgv", ["kivi", "qvg"]), meant("x", ["kivi", "qvg"])
    (" did you mean 'qvg'?", '')
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" did you mean {near[0]!r}?" if near else ""
