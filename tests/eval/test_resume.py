"""A run that is killed, a file that is cut off, a file that is another's: nothing is lost and nothing is mixed."""

import dataclasses
import errno
import fcntl
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantwm_core.errors import FormatError, ParameterError, StateError
from quantwm_eval import cli, ownership, provenance, results, resume
from quantwm_eval.evaluate import evaluate
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.results import Results
from quantwm_eval.run import count_chunks
from tests.eval.fake_host import CHUNK, FakeHost

METHODS = (MethodChoice("bf16"), MethodChoice("rtn"), MethodChoice("quantwm"))
WANTED = Experiment(METHODS, scenes=(0, 1), frames=6, batch=1, chunks_per_seal=1)
TIMED = {"seconds", "seal_seconds", "decode_seconds"}
SOURCE = provenance.collect(["eval"])

KILLED = """
import os, signal, sys
from pathlib import Path
from quantwm_eval import resume
from quantwm_eval.evaluate import evaluate
from tests.eval.fake_host import FakeHost
from tests.eval.test_resume import SOURCE, WANTED

def progress(title):
    if title == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

path = Path(sys.argv[1])
evaluate(WANTED, FakeHost(), resume.begin(path, WANTED, SOURCE), path, progress)
"""


def measured(path: Path, experiment: Experiment = WANTED, told: list[str] | None = None) -> Results:
    titles: list[str] = []
    host = FakeHost()
    begun = resume.begin(path, experiment, SOURCE)
    found = evaluate(experiment, host, begun, path, titles.append)
    assert len(titles) == count_chunks(experiment, FakeHost(), begun.cells)
    if told is not None:
        told += titles
    return found


def untimed(path: Path) -> list[dict[str, Any]]:
    """Cells of a file without the times, which no two runs share."""
    cells = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    for cell in cells:
        cell["values"] = {name: value for name, value in cell["values"].items() if name not in TIMED}
    return cells


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "results.jsonl"
    found = measured(path)
    assert found.missing == 0
    assert found.valid
    assert len(untimed(path)) == 2 * 2 * 3
    return path


def test_a_killed_run_goes_on_and_ends_like_one_that_was_not(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "-c", KILLED, str(path), "look-away 0, rtn"]
    ended = subprocess.run(command, check=False, timeout=120, cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL
    assert untimed(path) == untimed(whole)[:4]  # a walk under three methods, and the control of the look-away
    told: list[str] = []
    found = measured(path, told=told)
    assert not any(title.startswith("walk 0") or title == "look-away 0, bf16" for title in told)
    assert untimed(path) == untimed(whole)
    assert found.missing == 0
    assert found.provenance.command == SOURCE.command


def test_nothing_is_done_twice(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(whole.read_bytes())
    host = FakeHost()
    assert evaluate(WANTED, host, resume.begin(path, WANTED, SOURCE), path).missing == 0
    assert host.batches == []
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("share", [0.02, 0.37, 0.63, 0.999])
def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path, whole: Path, share: float) -> None:
    content = whole.read_bytes()
    first = content.index(b"\n") + 1
    path = tmp_path / "results.jsonl"
    path.write_bytes(content[: first + int(share * (len(content) - first))])
    measured(path)
    assert untimed(path) == untimed(whole)


def test_a_batch_that_is_there_in_part_gives_the_figures_of_the_whole_batch(tmp_path: Path) -> None:
    pairs = dataclasses.replace(WANTED, batch=2)
    path, other = tmp_path / "results.jsonl", tmp_path / "other.jsonl"
    measured(path, pairs)
    lines = path.read_text().splitlines(keepends=True)
    other.write_text("".join(lines[:4]))  # the control of both scenes, rtn of the first
    measured(other, pairs)
    assert untimed(other) == untimed(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": 8}, "frames 6 there, 8 here"),
        ({"methods": METHODS[:2]}, r"methods \['bf16', 'rtn', 'quantwm'\] there, \['bf16', 'rtn'\] here"),
        ({"batch": 2}, "batch 1 there, 2 here"),
    ],
)
def test_another_experiment_is_refused_and_its_file_left_alone(
    tmp_path: Path, whole: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "results.jsonl"
    content = whole.read_bytes()[:-5]
    path.write_bytes(content)
    with pytest.raises(StateError, match=message):
        resume.begin(path, dataclasses.replace(WANTED, **change), SOURCE)
    assert path.read_bytes() == content


def test_another_version_or_machine_is_refused(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(whole.read_bytes())
    newer = dataclasses.replace(SOURCE, versions={**SOURCE.versions, "torch": "99.0"})
    with pytest.raises(StateError, match=r"torch .* there, 99\.0 here"):
        resume.begin(path, WANTED, newer)
    with pytest.raises(StateError, match=r"threads .* there, 999 here"):
        resume.begin(path, WANTED, dataclasses.replace(SOURCE, threads=999))
    with pytest.raises(StateError, match="name another folder"):
        resume.begin(path, WANTED, newer)


def test_another_commit_is_refused_where_both_are_known(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "results.jsonl"
    _, _, cells = whole.read_text().partition("\n")
    path.write_text(results.header_line(WANTED, dataclasses.replace(SOURCE, commit="1234567")) + cells)
    with pytest.raises(StateError, match=r"commit 1234567 there, 1234567\+ here"):
        resume.begin(path, WANTED, dataclasses.replace(SOURCE, commit="1234567+"))
    assert resume.begin(path, WANTED, dataclasses.replace(SOURCE, commit="")).cells


def test_a_model_that_changed_is_noticed(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = whole.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]).replace('"reference": "', '"reference": "0'))
    told = "walk 0, seed 0: the model's BF16 video is another one .*; its inputs, weights, configuration or code, the device"
    with pytest.raises(StateError, match=told):
        measured(path)


def test_the_validity_of_a_finished_control_is_kept(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = whole.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]).replace('"valid": true', '"valid": false'))
    found = measured(path)
    walk = [cell.valid for cell in found.cells if (cell.kind, cell.scene) == ("walk", 0)]
    assert walk == [False] * 3
    assert all(cell.valid for cell in found.cells if (cell.kind, cell.scene) != ("walk", 0))


def test_foreign_and_mixed_files_are_refused(tmp_path: Path, whole: Path) -> None:
    lines = whole.read_text().splitlines(keepends=True)
    path = tmp_path / "results.jsonl"
    for text, message in (
        ("mine", "not a quantwm results file"),
        ("".join([*lines, lines[1]]), "walk 0 0 bf16 is there twice"),
        ("".join([*lines[:-1], lines[1].replace('"scene": 0', '"scene": 7')]), "walk 7 0 bf16 is none of"),
        ("".join([lines[0], lines[1][:50] + "\n", lines[2]]), "line 2 is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=message):
            resume.begin(path, WANTED, SOURCE)
        assert path.read_text() == text
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(FormatError, match="not a quantwm results file"):
        resume.begin(path, WANTED, SOURCE)


def test_progress_counts_what_is_left(whole: Path) -> None:
    cells = results.load(whole).cells
    chunks = WANTED.frames // CHUNK
    assert count_chunks(WANTED, FakeHost()) == 4 * 4 * chunks
    assert count_chunks(WANTED, FakeHost(), cells[:4]) == (3 + 2 * 4) * chunks  # reference and two methods, two batches
    assert count_chunks(WANTED, FakeHost(), cells) == 0


def test_a_file_without_a_cell_blocks_nobody(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(whole.read_bytes().splitlines(keepends=True)[0])
    other = dataclasses.replace(WANTED, frames=8)
    assert resume.begin(path, other, SOURCE).missing == 12
    assert results.load(path).experiment == other
    path.write_bytes(b"")
    assert resume.begin(path, WANTED, SOURCE).missing == 12
    assert results.load(path).experiment == WANTED


@pytest.mark.parametrize(
    ("change", "message"),
    [({"metrics": ()}, "metrics: got none"), ({"seeds": (-1,)}, "seeds -1"), ({"samples": -1}, "samples -1")],
)
def test_what_measures_nothing_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        dataclasses.replace(WANTED, **change)


def test_without_samples_nobody_looks_on(tmp_path: Path) -> None:
    found = measured(tmp_path / "results.jsonl", dataclasses.replace(WANTED, samples=0, scenes=(0,), kinds=("walk",)))
    for cell in found.cells:
        assert "selection_shift" not in cell.measurement.values
        assert {"psnr", "seconds", "bits_per_element"} <= cell.measurement.values.keys()


SECOND = """
import sys
from pathlib import Path
from quantwm_eval import ownership
with ownership.owned(Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


def second_run(folder: Path) -> subprocess.Popen[str]:
    """A process that owns the folder until it is told to end."""
    piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = subprocess.Popen([sys.executable, "-c", SECOND, str(folder)], cwd=Path(__file__).parents[2], **piped)
    assert started.stdout is not None
    assert started.stdout.readline() == "mine\n"
    return started


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_run_waits_for_the_first_however_that_ends(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", lambda _setup: FakeHost())
    given = ["eval", "--methods", "rtn", "--scenes", "0", "--frames", "6", "--kinds", "walk", "--out", str(tmp_path)]
    with second_run(tmp_path) as first:
        path = tmp_path / "results.jsonl"
        path.write_text(results.header_line(WANTED, SOURCE))  # what a run has written before its first cell
        before = path.stat().st_ino
        assert cli.main(given) == 2
        assert f"process {first.pid} on " in capsys.readouterr().err
        assert path.stat().st_ino == before
        if killed:
            first.kill()
    assert (tmp_path / ownership.LOCK).exists() is killed
    assert cli.main(given) == 0
    assert not (tmp_path / ownership.LOCK).exists()
    assert results.load(path).missing == 0


def test_a_lock_that_another_run_removed_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def late(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / ownership.LOCK).unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with ownership.owned(tmp_path), pytest.raises(StateError, match="process"), ownership.owned(tmp_path):
        pytest.fail("two runs own one folder")


@pytest.mark.parametrize("lost", ["replaced", "removed"])
def test_no_cell_goes_to_a_file_that_is_no_longer_there(tmp_path: Path, lost: str) -> None:
    path = tmp_path / "results.jsonl"
    begun = resume.begin(path, WANTED, SOURCE)

    def steal(title: str) -> None:
        if title == "walk 0, bf16":
            path.unlink(missing_ok=True)
            if lost == "replaced":
                resume.begin(path, WANTED, SOURCE)

    with pytest.raises(StateError, match="was removed or replaced"):
        evaluate(WANTED, FakeHost(), begun, path, steal)


def test_where_locks_are_not_offered_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with ownership.owned(tmp_path):
        pass
