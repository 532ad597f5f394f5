"""What benchmarks of caches say where something is missing that they need."""

from pathlib import Path

import pytest
import torch

from tests.programs import ended

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is what they need")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("snapshot --folder . --layers -1", "argument --layers: '-1': need a whole number of at least 1"),
        pytest.param("snapshot --folder . --device cuda", "error: needs a CUDA device", marks=without_gpu),
        ("snapshot --folder absent", "argument --folder: 'absent': there is no such folder"),
        ("longcat_history --checkout absent", "argument --checkout: 'absent': there is no such folder"),
        ("hosts longcat_video --checkout absent", "argument --checkout: 'absent': there is no such folder"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = words.split()
    assert ended(f"benchmarks.{name}", monkeypatch, *more) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", ["longcat_history", "hosts longcat_video --small --device cpu"])
def test_a_folder_without_the_hosts_code_is_named(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name, *more = words.split()
    told = str(ended(f"benchmarks.{name}", monkeypatch, *more, "--checkout", str(tmp_path)))
    assert told.startswith(f"--checkout {tmp_path}: No module named 'longcat_video'")
