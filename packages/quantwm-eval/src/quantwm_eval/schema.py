"""What values from a JSON file must be, told in words, and the entry that is not, by its place.

A check takes a value and finds nothing, or the first entry in it that does not fit.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from quantwm_core.errors import FormatError


class Misfit(NamedTuple):
    """An entry that does not fit: where it is, as in ``.scenes[2]``, what came, and what is needed."""

    place: str
    came: str
    need: str

    def inside(self, place: str) -> Misfit:
        """The same, seen from what holds it."""
        return self._replace(place=place + self.place)


Check: TypeAlias = Callable[[Any], Misfit | None]

NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON does not know, by the strings that stand for them."""


def hold(value: object, check: Check) -> None:
    """Hold a value against what it must be.

    Raises:
        FormatError: It does not fit; the message names the entry, what came and what is needed.

    >>> hold({"scenes": [0, 4]}, fields({"scenes": each(whole(0))}))
    >>> hold({"scenes": [0, -4]}, fields({"scenes": each(whole(0))}))
    Traceback (most recent call last):
    ...
    quantwm_core.errors.FormatError: scenes[1]: got -4, need a whole number of at least 0
    """
    misfit = check(value)
    if misfit:
        raise FormatError(f"{misfit.place.lstrip('.') or 'all of it'}: got {misfit.came}, need {misfit.need}")


def plain(need: str, fits: Callable[[Any], bool]) -> Check:
    """A single value, as told in words."""
    return lambda value: None if fits(value) else Misfit("", reprlib.repr(value), need)


def whole(least: int) -> Check:
    """A whole number of at least so much."""
    return plain(f"a whole number of at least {least}", lambda value: type(value) is int and value >= least)


text = plain("a text", lambda value: type(value) is str)
truth = plain("true or false", lambda value: type(value) is bool)
number = plain(
    f"a number or one of {', '.join(NAMED)}",
    lambda value: (
        type(value) is float
        or (type(value) is int and abs(value) <= sys.float_info.max)
        or (type(value) is str and value in NAMED)
    ),
)


def each(check: Check) -> Check:
    """A list whose entries all fit."""
    listed = plain("a list", lambda value: type(value) is list)

    def found(value: Any) -> Misfit | None:
        misfits = (
            misfit.inside(f"[{index}]") for index, entry in enumerate(value) if (misfit := check(entry)) is not None
        )
        return next(misfits, None)

    return lambda value: listed(value) or found(value)


def row(*checks: Check) -> Check:
    """A list of just as many entries, each of its own kind."""
    listed = plain(f"a list of {len(checks)}", lambda value: type(value) is list and len(value) == len(checks))

    def found(value: Any) -> Misfit | None:
        pairs = enumerate(zip(checks, value, strict=True))
        return next((misfit.inside(f"[{at}]") for at, (check, entry) in pairs if (misfit := check(entry))), None)

    return lambda value: listed(value) or found(value)


def grid(check: Check) -> Check:
    """A list of lists of one length, whose entries all fit."""
    rows = each(each(check))
    even = plain("rows of one length", lambda value: len({len(entries) for entries in value}) < 2)
    return lambda value: rows(value) or even(value)


def by_name(check: Check) -> Check:
    """An object whose entries all fit, whatever their names."""
    mapping = plain("an object", lambda value: type(value) is dict)

    def found(value: Any) -> Misfit | None:
        return next(
            (misfit.inside(f".{name}") for name, entry in value.items() if (misfit := check(entry)) is not None), None
        )

    return lambda value: mapping(value) or found(value)


def fields(needed: Mapping[str, Check], optional: Mapping[str, Check] | None = None, *, others: bool = False) -> Check:
    """An object with these entries.

    Args:
        needed: What must be there.
        optional: What may be.
        others: Whether there may be entries of other names, which are left aside.
    """
    known = {**needed, **(optional or {})}
    mapping = plain("an object", lambda value: type(value) is dict)

    def found(value: Any) -> Misfit | None:
        for name, check in known.items():
            misfit = check(value.get(name))
            if misfit and name in value:
                return misfit.inside(f".{name}")
            if name not in value and name in needed:
                return Misfit(f".{name}", "nothing", (misfit or Misfit("", "", "it")).need)
        strange = [] if others else [name for name in value if name not in known]
        return Misfit("", f"the unknown {strange[0]!r}", f"only {', '.join(known)}") if strange else None

    return lambda value: mapping(value) or found(value)
