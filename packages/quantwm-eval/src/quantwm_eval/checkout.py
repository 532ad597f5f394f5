"""Code of a user's checkout, imported where it stands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from quantwm_core.errors import FormatError, ParameterError


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


def configuration(folder: Path, given: Path | None, usual: Path) -> Path:
    """Where a configuration is.

    Args:
        folder: The checkout.
        given: What ``--config`` says: a file of the checkout, or else any path; None takes the usual one.
        usual: The host's own, in the checkout.

    Raises:
        ParameterError: There is no file.
    """
    places = (folder / usual,) if given is None else (folder / given, given)
    for place in places:
        if place.is_file():
            return place.resolve()
    looked = " and no ".join(dict.fromkeys(str(place.resolve()) for place in places))
    raise ParameterError(f"--config {given or usual}: there is no {looked}")


def config(folder: Path, *paths: Path) -> Any:
    """Read configurations as a checkout's own scripts do, later ones over earlier ones; call it inside.

    Args:
        folder: The checkout.
        paths: Files, as :func:`configuration` finds them.

    Raises:
        ParameterError: OmegaConf, which hosts read theirs with, is missing.
        FormatError: A file is no YAML, or holds something else than settings by name.
    """
    reader = library(folder, "omegaconf").OmegaConf
    return reader.merge(*(_settings(reader, path) for path in paths))


def _settings(reader: Any, path: Path) -> Mapping[str, Any]:
    try:
        found = reader.load(path)
    except Exception as error:  # PyYAML's and OmegaConf's own, whose classes only the checkout's requirements bring
        raise FormatError(f"--config {path}: no YAML that can be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise FormatError(f"--config {path}: need settings by name, got {type(found).__name__}")
    return found
