"""Experiments that come with the package, by name: every table of the paper as one command.

Each is a TOML file in ``experiments/``, as a user could write it; its path is its name. ``about`` says in a sentence what
it asks, ``sources`` which of the paper's tables it belongs to.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from quantwm_core.errors import lookup
from quantwm_eval import experiment_file


@dataclass(frozen=True)
class Named:
    """A bundled experiment.

    Attributes:
        name: ``"paper/table3"``.
        about: What it asks.
        sources: Tables and figures of the paper, as ``paper-targets.toml`` calls them.
        settings: What :func:`quantwm_eval.experiment_file.build` takes.
    """

    name: str
    about: str
    sources: tuple[str, ...]
    settings: dict[str, Any]


def names() -> tuple[str, ...]:
    """Return the names of all bundled experiments, in the order of the paper's tables.

    >>> "paper/table3" in names()
    True
    """
    return tuple(sorted(_files(), key=lambda name: (len(name), name)))


def get(name: str) -> Named:
    """Return the experiment of that name.

    Raises:
        UnknownNameError: There is none.

    >>> get("paper/table4").settings["methods"][0].label
    'kivi'
    """
    found = _files()
    plain = tomllib.loads(found[lookup("experiment", name, names())].read_text(encoding="utf-8"))
    settings = experiment_file.settings(plain) | {"name": name}
    return Named(name, plain["about"], tuple(plain["sources"]), settings)


def _files() -> dict[str, Traversable]:
    return dict(_below(resources.files("quantwm_eval") / "experiments", ""))


def _below(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _below(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".toml"):
            yield prefix + entry.name.removesuffix(".toml"), entry
