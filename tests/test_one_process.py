"""Plain ``pytest``: the tests of all packages in one process."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_annotations_are_checked_for_core_alone_between_others() -> None:
    before = "tests/eval/test_results.py::test_numbers_of_any_kind_are_written_as_such"
    after = "tests/models/test_all_or_nothing.py::test_arguments_of_a_wrong_type"
    given = [before, "tests/core/test_annotations.py", after]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_core_that_cannot_be_checked_is_told_at_once() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "quantwm_core",
        "tests/core/test_packing.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4  # of pytest: it was not used as it must be
    assert "run it apart" in done.stderr
