"""Code of a user's checkout, imported where it stands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from quantwm_core.errors import ParameterError


@contextmanager
def inside(folder: Path, *within: str) -> Iterator[None]:
    """Import from a checkout, and read the files that it names relative to itself; what it prints goes to standard error.

    The checkout stays importable afterwards: its code imports on as it runs.

    Args:
        folder: The checkout.
        within: Folders of it that its modules are imported from, too.
    """
    root = str(folder.resolve())
    for place in (*(str(Path(root, name)) for name in within), root):
        if place not in sys.path:
            sys.path.insert(0, place)
    with chdir(root), redirect_stdout(sys.stderr):
        yield


def library(folder: Path, name: str) -> ModuleType:
    """Import a library that a checkout requires.

    Raises:
        ParameterError: It is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ParameterError(
            f"--checkout {folder}: {name!r} cannot be imported ({error}); install what the host requires into this environment"
        ) from error


def module(folder: Path, name: str) -> ModuleType:
    """Import a module of a checkout; call it inside of :func:`inside`.

    Raises:
        ParameterError: The checkout has no such module, a library is missing, or another package of that name was
            imported before.
    """
    found = library(folder, name)
    places = [getattr(found, "__file__", None), *getattr(found, "__path__", ())]
    if not any(Path(place).resolve().is_relative_to(folder.resolve()) for place in places if place):
        raise ParameterError(
            f"--checkout {folder}: {name!r} was imported from {places[0]}; the checkout has no such module"
        )
    return found


def config(folder: Path, *paths: str | Path) -> Any:
    """Read configurations of a checkout as its own scripts do, later ones over earlier ones; call it inside.

    Raises:
        ParameterError: A file is not there, or OmegaConf, which hosts read theirs with, is missing.
    """
    for path in paths:
        if not Path(path).is_file():
            raise ParameterError(f"--config {path}: there is no such file in {folder}; name one with --config")
    reader = library(folder, "omegaconf").OmegaConf
    return reader.merge(*(reader.load(path) for path in paths))
