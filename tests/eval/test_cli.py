"""The command's arguments: what is refused, how, and what that leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantwm_eval import __version__, cli
from quantwm_eval.commands import demo


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "bf16,qgv"], "did you mean 'qvg'"),
        (["--methods", ""], "unknown method"),
        (["--methods", "kivi,rtn,kivi"], "got 'kivi' twice, need each method once"),
        (["--methods", "quantwm:rank=0.5"], "rank"),
        (["--scenes", "0"], "at least 1"),
        (["--scenes", "many"], "whole number"),
        (["--scenes", "999999999"], "the demo world has 1000 scenes"),
        (["--frames", "-4"], "at least 1"),
        (["--frames", "6"], "multiple of 4"),
        (["--frames", "4000"], "up to 1020"),
        (["--degrees", "45"], "multiple of 10"),
        (["--chunks-per-seal", "0"], "at least 1"),
        (["--threads", "0"], "at least 1"),
        (["--threads", "999999999999"], "need at most 4096"),
        (["--seed", "-1"], "at least 0"),
        (["--speed", "9"], "unrecognized arguments"),
    ],
)
def test_bad_options_get_a_message_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status: object = cli.main(["demo", *arguments])
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr()
    assert status == 2
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, wanted in (
        (["--version"], f"quantwm {__version__}\n"),
        (["--help"], "demo"),
        (["demo", "--help"], "--methods"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        assert wanted in capsys.readouterr().out


def test_no_command_is_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "produce", interrupted)
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_full_disk_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "produce", full)
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 1
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "seed"),
    [(("demo", "--seed"), str(10**23)), (("eval", "--methods", "rtn", "--scenes", "0", "--seeds"), str(2**63))],
)
def test_a_seed_that_no_generator_takes_is_bad_options(
    command: tuple[str, ...], seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, seed, "--out", str(tmp_path / "out")]) == 2
    assert f"seeds {seed}: need numbers from 0 to {2**63 - 1}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_reader_that_has_enough_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        command = [sys.executable, "-m", "quantwm_eval", "eval", "--list"]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert "BrokenPipeError" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_standard_output_is_said_in_a_line() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "quantwm_eval", "eval", "--list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "quantwm: [Errno 28] No space left on device\n")
