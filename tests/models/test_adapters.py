"""What holds for every adapter, by its name."""

import importlib
import tomllib
from pathlib import Path

import pytest

from quantwm_models import adapters

ROOT = Path(__file__).parents[2]
OWN = [path.stem for path in Path(adapters.__path__[0]).glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("name", OWN)
def test_an_adapter_is_known_by_the_name_of_its_file(name: str) -> None:
    assert name in adapters.names()
    module = importlib.import_module(f"quantwm_models.adapters.{name}")
    assert adapters.get(name) is module
    assert f"``{name}``" in (module.__doc__ or "").partition("\n")[0]


@pytest.mark.parametrize("name", [name for name in OWN if name != "demo"])
def test_an_adapter_has_an_extra_a_page_and_both_kinds_of_tests(name: str) -> None:
    project = tomllib.loads((ROOT / "packages/quantwm-models/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert name in project["optional-dependencies"]
    assert f"## {name}\n" in (ROOT / "docs/hosts.md").read_text(encoding="utf-8")
    assert (ROOT / f"tests/models/test_{name}.py").is_file()
    assert (ROOT / f"tests/hosts/test_{name}.py").is_file()
    assert name in (ROOT / "noxfile.py").read_text(encoding="utf-8")
