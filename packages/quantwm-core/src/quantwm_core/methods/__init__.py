"""The cache methods: a file of this folder is a method, and its name is the method's public name.

Such a file defines ``METHOD``, a frozen dataclass that fulfils :class:`quantwm_core.method.Method`. Another
distribution adds a method through the entry point group ``quantwm.methods``, whose value is the dataclass.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from quantwm_core.errors import ParameterError, lookup

if TYPE_CHECKING:
    from quantwm_core.method import Method

ENTRY_POINTS = "quantwm.methods"


def names() -> tuple[str, ...]:
    """Public names of all methods, alphabetically; the project's own win over registered ones of the same name.

    >>> names()
    ('bf16', 'kivi', 'quantwm', 'qvg', 'rtn')
    """
    own = [module.name for module in pkgutil.iter_modules(__path__)]
    return tuple(sorted({*own, *entry_points(group=ENTRY_POINTS).names}))


@cache
def implementation(name: str) -> type[Any]:
    """Class that implements a method.

    Raises:
        UnknownNameError: No method bears that name.
    """
    lookup("method", name, names())
    if any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return cast("type[Any]", importlib.import_module(f"{__name__}.{name}").METHOD)
    (entry,) = entry_points(group=ENTRY_POINTS, name=name)
    return cast("type[Any]", entry.load())


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
        ParameterError: It has no such parameter, or a value is out of range.

    >>> get("quantwm", rank=16).rank
    16
    """
    known = parameter_names(name)
    for parameter in parameters:
        if parameter not in known:
            raise ParameterError(f"{name} has no parameter {parameter!r}; known: {', '.join(known) or 'none'}")
    return cast("Method", implementation(name)(**parameters))
