"""What holds for every adapter, by its name."""

import importlib
import pkgutil
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantwm_models
from quantwm_core.errors import ParameterError
from quantwm_models import adapters
from quantwm_models.adapters.causal_forcing import CausalForcing
from quantwm_models.adapters.hy_world import HyWorld
from quantwm_models.adapters.longcat_video import LongCatVideo
from quantwm_models.adapters.matrix_game import MatrixGame
from quantwm_models.errors import HostError, UnknownHostError

ROOT = Path(__file__).parents[2]
OWN = [path.stem for path in Path(adapters.__path__[0]).glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("name", OWN)
def test_an_adapter_is_known_by_the_name_of_its_file(name: str) -> None:
    assert name in adapters.names()
    module = importlib.import_module(f"quantwm_models.adapters.{name}")
    assert adapters.get(name) is module
    assert f"``{name}``" in (module.__doc__ or "").partition("\n")[0]


def test_what_adapters_are_made_of_is_public() -> None:
    page, readme = (
        (ROOT / path).read_text(encoding="utf-8")
        for path in ("docs/add-an-adapter.md", "packages/quantwm-models/README.md")
    )
    imported = re.findall(r"^from quantwm_models(?:\.(\w+))? import (.+)$", page, re.MULTILINE)
    used = set(re.findall(r"`(\w+)\.\w+`", page)) & {
        each.name for each in pkgutil.iter_modules(quantwm_models.__path__)
    }
    named = set(re.findall(r"`(\w+)`", readme.partition("Public are")[2]))
    exported = set(quantwm_models.__all__)
    for module, names in imported:
        assert module in named or set(names.split(", ")) <= exported, f"{module}: {names}"
    assert used <= named
    assert all(importlib.import_module(f"quantwm_models.{each}") for each in named - {"quantwm_models"})


@pytest.mark.parametrize("error", [HostError, UnknownHostError])
def test_errors_of_attach_can_be_caught_by_public_names(error: type[Exception]) -> None:
    assert getattr(quantwm_models, error.__name__) is error
    assert error.__name__ in quantwm_models.__all__


@pytest.mark.parametrize("name", [name for name in OWN if name != "demo"])
def test_an_adapter_has_an_extra_a_page_and_both_kinds_of_tests(name: str) -> None:
    project = tomllib.loads((ROOT / "packages/quantwm-models/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert name in project["optional-dependencies"]
    assert f"## {name}\n" in (ROOT / "docs/hosts.md").read_text(encoding="utf-8")
    assert (ROOT / f"tests/models/test_{name}.py").is_file()
    assert (ROOT / f"tests/hosts/test_{name}.py").is_file()
    assert name in (ROOT / "noxfile.py").read_text(encoding="utf-8")


COUNTS: tuple[Callable[[Any], Any], ...] = (
    lambda frames: CausalForcing(frames=frames).frames,
    lambda window: MatrixGame(window=window).window,
    lambda units: LongCatVideo(first_units=units).first_units,
)


@pytest.mark.parametrize("told", COUNTS)
def test_an_option_that_counts_is_checked_when_it_is_said(told: Callable[[Any], Any]) -> None:
    for count in ("4", 24.5, 2.0, True, 0, -1, float("nan"), [4]):
        with pytest.raises(ParameterError, match=r"^(frames|window|first_units)=.*: need a whole number of at least 1"):
            told(count)
    assert told(np.int64(4)) == 4


def test_an_option_that_may_be_left_out_is_none() -> None:
    assert CausalForcing(frames=None).frames is MatrixGame(window=None).window is None
    with pytest.raises(ParameterError, match=r"^first_units=None: need a whole number of at least 1$"):
        LongCatVideo(first_units=None)  # type: ignore[arg-type]  # the point of it


@pytest.mark.parametrize("once", ["yes", 1, None])
def test_an_option_that_is_on_or_off_is_a_bool(once: Any) -> None:
    with pytest.raises(ParameterError, match=r"^once=.*: need True or False$"):
        HyWorld(once=once)
