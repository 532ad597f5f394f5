"""What adapters and :func:`quantwm_models.attach` can be told, checked when it is said: a host would stumble over it in mid-video."""

from __future__ import annotations

from quantwm_core.errors import ParameterError
from quantwm_core.stream import is_whole


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """Raise :class:`ParameterError` unless an option is a whole number of at least 1, or None where it is ``optional``.

    >>> check_count("frames", 24.5, optional=True)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: frames=24.5: need a whole number of at least 1, or None
    """
    if value is None and optional:
        return
    if not is_whole(value) or value < 1:
        raise ParameterError(f"{name}={value!r}: need a whole number of at least 1{', or None' if optional else ''}")


def check_flag(name: str, value: object) -> None:
    """Raise :class:`ParameterError` unless an option is True or False.

    >>> check_flag("once", "yes")
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: once='yes': need True or False
    """
    if not isinstance(value, bool):
        raise ParameterError(f"{name}={value!r}: need True or False")
