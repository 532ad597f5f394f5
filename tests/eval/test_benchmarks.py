"""Benchmarks say what they take on any machine."""

from pathlib import Path

import pytest
import torch

import benchmarks
from tests.programs import ended, hide_triton

FOLDER = Path(next(iter(benchmarks.__path__)))
PROGRAMS = sorted(
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts).removesuffix(".__main__")
    for path in FOLDER.rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


def test_programs_are_found() -> None:
    assert {"benchmarks.seal", "benchmarks.activations", "benchmarks.activations.anew"} <= set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_needs_neither_triton_nor_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide_triton(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ended(name, monkeypatch, "--help") == 0
    assert capsys.readouterr().out.startswith("usage: ")
