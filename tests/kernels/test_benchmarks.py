"""What benchmarks say where something is missing that they need."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.programs import ended, hide_triton


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without Triton."""
    hide_triton(monkeypatch)
    return monkeypatch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is what they need")
@pytest.mark.parametrize("name", ["decode", "attention"])
def test_measurements_of_a_gpu_say_that_there_is_none(
    name: str, without: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(f"benchmarks.{name}", without) == 2
    assert "error: needs a CUDA device" in capsys.readouterr().err


def test_sealing_says_that_triton_is_missing(without: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("benchmarks.seal", without) == 2
    assert "error: the package triton is not installed" in capsys.readouterr().err


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
        assert ended("benchmarks.counters", without, *words) == 2
        assert said in capsys.readouterr().err
    where["ncu"] = str(tmp_path / "ncu")
    assert ended("benchmarks.counters", without, "seal") == 2
    assert "the package triton is not installed" in capsys.readouterr().err
