"""``quantwm demo`` from the command line to the page, on the bundled model."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantwm_eval import results


@pytest.mark.slow
def test_one_scene_from_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantwm_eval", "demo", "--scenes", "1", "--frames", "16"]
    options = ["--methods", "bf16,quantwm", "--threads", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Balls redrawn after looking 100° away and back: bf16" in done.stdout
    assert "100%" in done.stderr

    found = results.load(tmp_path / "out" / "results.jsonl")
    assert found.valid
    assert [(cell.kind, cell.method) for cell in found.cells] == [
        ("walk", "bf16"), ("walk", "quantwm"), ("look-away", "bf16"), ("look-away", "quantwm"),
    ]  # fmt: skip
    for cell in found.cells:
        values = cell.measurement.values
        if cell.method == "bf16":
            assert values["psnr"] == float("inf")
            assert values["bits_per_element"] == 16
        else:
            assert 20 < values["psnr"] < 60
            assert 2 < values["bits_per_element"] < 4.5
            assert 0 < values["selection_shift"] < 1
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Is the ball still there?" in page
    assert len(list((tmp_path / "out" / "videos").iterdir())) == 6
