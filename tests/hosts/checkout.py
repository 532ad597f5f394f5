"""Importing modules of a host's checkout, and forgetting them again.

Hosts share top-level names (``wan``, ``pipeline``, ``utils``), so one is imported at a time. Their packages' own
``__init__`` files pull in training code and CUDA-only libraries; a package can be entered past its ``__init__``.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

VARIABLE = "QUANTWM_CHECKOUTS"
# Hosts that are on the package index, too.
PACKAGES = ("diffsynth", "fastvideo")


def checkouts(config: pytest.Config) -> dict[str, Path]:
    """Checkouts by name: what the command line names, ``NAME=PATH``, else the environment, else what is installed."""
    named = [*os.environ.get(VARIABLE, "").split(), *config.getoption("checkout", default=[])]
    given = {name: Path(path).resolve() for name, _, path in (each.partition("=") for each in named)}
    return _installed() | given


def _installed() -> dict[str, Path]:
    """Where the packages lie that are installed; none of them is imported."""
    found = ((name, importlib.util.find_spec(name)) for name in PACKAGES if name not in sys.modules)
    return {name: Path(spec.origin).parents[1] for name, spec in found if spec and spec.origin}


@contextmanager
def importing(
    root: Path,
    *,
    bare: Sequence[str] = (),
    within: str = "",
    stubs: Mapping[str, Mapping[str, object]] | None = None,
    device: object = 0,
) -> Iterator[Callable[[str], Any]]:
    """Import modules of a checkout by name while inside.

    Args:
        root: The checkout.
        bare: Packages to enter past their ``__init__``.
        within: Folder of the checkout whose modules are forgotten on leaving; all of it, unless others lie beside it.
        stubs: Attributes of modules to put in the place of libraries that only serve CUDA or training.
        device: What stands for the current device where there is no GPU; hosts ask while they are imported.
    """
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(root))
    for name in bare:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
    for name, attributes in (stubs or {}).items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(sys.modules[name]).update(attributes)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the host's own
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "current_device", lambda: device)
        try:
            yield importlib.import_module
        finally:
            sys.path[:] = path
            loaded = set(sys.modules) - before
            for name in [
                name
                for name in loaded
                if name in (stubs or {}) or _place(sys.modules[name]).is_relative_to(root / within)
            ]:
                del sys.modules[name]


def _place(module: ModuleType) -> Path:
    """Where a module was loaded from; a package without ``__init__`` has folders only."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return next((Path(place) for place in places if place), Path("/"))
