"""Importing modules of a host's checkout, and forgetting them again.

Hosts share top-level names (``wan``, ``pipeline``, ``utils``), so one is imported at a time. Their packages' own
``__init__`` files pull in training code and CUDA-only libraries; a package can be entered past its ``__init__``.
"""

import importlib
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


def checkouts(config: pytest.Config) -> dict[str, Path]:
    """Checkouts that the command line or the environment names, ``NAME=PATH``; the former win."""
    named = [*os.environ.get(VARIABLE, "").split(), *config.getoption("checkout", default=[])]
    return {name: Path(path).resolve() for name, _, path in (each.partition("=") for each in named)}


@contextmanager
def importing(
    root: Path,
    *,
    bare: Sequence[str] = (),
    stubs: Mapping[str, Mapping[str, object]] | None = None,
    device: object = 0,
) -> Iterator[Callable[[str], Any]]:
    """Import modules of a checkout by name while inside.

    Args:
        root: The checkout.
        bare: Packages to enter past their ``__init__``.
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
                name for name in loaded if name in (stubs or {}) or _place(sys.modules[name]).is_relative_to(root)
            ]:
                del sys.modules[name]


def _place(module: ModuleType) -> Path:
    """Where a module was loaded from; a package without ``__init__`` has folders only."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return next((Path(place) for place in places if place), Path("/"))
