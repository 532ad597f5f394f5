"""Families whose members are found by name: files of a package, and what other distributions register by entry points."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from quantwm_core.errors import PluginError, lookup


@dataclass(frozen=True)
class Family:
    """Members of one kind; the group of their entry points is ``quantwm.`` and the kind in the plural.

    Attributes:
        kind: What a member is called: ``"method"``.
        package: Whose files are members, each of which bears its file's name.
        need: What is registered, in words.
        fits: Whether an object is that.
        attribute: Which of a file's objects is the member; empty for the module itself.

    >>> from quantwm_core import methods
    >>> family = Family("method", "quantwm_core.methods", "a class", lambda found: isinstance(found, type), "METHOD")
    >>> family.group, family.names() == methods.names(), family.get("qvg") is methods.implementation("qvg")
    ('quantwm.methods', True, True)
    """

    kind: str
    package: str
    need: str
    fits: Callable[[Any], bool]
    attribute: str = ""

    @property
    def group(self) -> str:
        """Group of entry points that other distributions use."""
        return f"quantwm.{self.kind}s"

    def names(self) -> tuple[str, ...]:
        """Public names of all members, alphabetically, whether they can be loaded or not."""
        return tuple(sorted({*self._own(), *entry_points(group=self.group).names}))

    def get(self, name: str) -> Any:
        """Load a member; the project's own wins over registered ones of the same name.

        Raises:
            UnknownNameError: No member bears that name.
            PluginError: What is registered under it cannot be loaded or is not what is needed, or distributions register
                several things under it.
        """
        lookup(self.kind, name, self.names())
        if name in self._own():
            module = importlib.import_module(f"{self.package}.{name}")
            return getattr(module, self.attribute) if self.attribute else module
        entry, *others = entry_points(group=self.group, name=name)
        if any(other.value != entry.value for other in others):
            told = ", ".join(sorted(f"{each.value}{_registered_by(each)}" for each in (entry, *others)))
            raise PluginError(
                f"{self.kind} {name!r} stands for several entry points of {self.group}: {told}; uninstall all but one"
            )
        found = load(entry)
        if not self.fits(found):
            raise PluginError(
                f"{_told(entry)}: got {type(found).__name__}, need {self.need}; mend what registers it, or uninstall that"
            )
        return found

    def distributions(self, names: Iterable[str]) -> dict[str, str]:
        """Versions of the distributions that register some of these members, by their names; the project's own have none."""
        registered = set(names) - set(self._own())
        entries = [entry for entry in entry_points(group=self.group) if entry.name in registered]
        return {entry.dist.name: str(entry.dist.version) for entry in entries if entry.dist is not None}

    def _own(self) -> list[str]:
        return [module.name for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__)]


def load(entry: EntryPoint) -> Any:
    """What an entry point names.

    Raises:
        PluginError: It cannot be imported, whatever :class:`Exception` it raises, or lacks what is named; the message says whose it is.

    >>> load(EntryPoint("mean", "statistics:mean", "quantwm.metrics"))([1, 3])
    2
    >>> load(EntryPoint("gone", "no_such_module:METRIC", "quantwm.metrics"))
    Traceback (most recent call last):
    ...
    quantwm_core.errors.PluginError: entry point gone = no_such_module:METRIC of quantwm.metrics cannot be loaded (ModuleNotFoundError: No module named 'no_such_module'); mend what registers it, or uninstall that
    """
    try:
        return entry.load()
    except Exception as error:
        raise PluginError(
            f"{_told(entry)} cannot be loaded ({type(error).__name__}: {error}); mend what registers it, or uninstall that"
        ) from error


def _told(entry: EntryPoint) -> str:
    return f"entry point {entry.name} = {entry.value} of {entry.group}{_registered_by(entry)}"


def _registered_by(entry: EntryPoint) -> str:
    return f" (registered by {entry.dist.name})" if entry.dist is not None else ""
