"""What benchmarks say where something is missing that they need."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without Triton."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"] or ["triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


def run(name: str, patch: pytest.MonkeyPatch, *words: str) -> object:
    """How a benchmark ends as a program."""
    patch.setattr(sys, "argv", [name, *words])
    patch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    return end.value.code


def test_sealing_says_that_triton_is_missing(without: pytest.MonkeyPatch) -> None:
    assert str(run("benchmarks.seal", without)).startswith("benchmarks.seal: the package triton is not installed")


def test_counters_look_at_the_arguments_then_for_ncu_then_for_triton(
    without: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where: dict[str, str | None] = {"ncu": None}
    without.setattr(shutil, "which", where.get)
    for words, said in (
        (("x",), "invalid choice: 'x'"),
        (("read",), "ncu is not on the PATH"),
        (("seal",), "ncu is not"),
    ):
        assert run("benchmarks.counters", without, *words) == 2
        assert said in capsys.readouterr().err
    where["ncu"] = str(tmp_path / "ncu")
    assert run("benchmarks.counters", without, "seal") == 2
    assert "the package triton is not installed" in capsys.readouterr().err
