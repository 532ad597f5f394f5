"""Nobody's files are lost to a run."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantwm_core.errors import StateError
from quantwm_eval import cli, ownership, provenance, results
from quantwm_eval.commands import demo
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.output import RESULTS, check_folder, prepare
from tests.eval.fake_host import FakeHost

WANTED = Experiment((MethodChoice("bf16"),), scenes=(0,))


def test_a_default_that_is_taken_gets_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wanted in ("demo", "demo-2", "demo-3"):
        made = prepare(None, "demo", overwrite=False)
        assert made == Path(wanted)
        (made / "file").write_text("mine")
    assert (tmp_path / "demo" / "file").read_text() == "mine"


def test_an_empty_or_new_folder_is_taken(tmp_path: Path) -> None:
    assert prepare(tmp_path, "demo", overwrite=False) == tmp_path
    assert prepare(tmp_path / "a" / "b", "demo", overwrite=False).is_dir()


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StateError, match=r"not empty.*--overwrite"):
        prepare(tmp_path, "demo", overwrite=False)
    with pytest.raises(StateError, match="no earlier run"):
        prepare(tmp_path, "demo", overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_an_earlier_run_is_replaced_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text("")
    with pytest.raises(StateError, match="not empty"):
        prepare(tmp_path, "demo", overwrite=False)
    assert prepare(tmp_path, "demo", overwrite=True) == tmp_path
    (tmp_path / RESULTS).write_text(results.header_line(WANTED, provenance.collect(["demo"])) + '{"kind": "wa')
    assert prepare(tmp_path, "demo", overwrite=True) == tmp_path


def test_results_of_another_command_or_of_nobody_known_are_never_replaced(tmp_path: Path) -> None:
    evaluated = results.header_line(WANTED, provenance.collect(["eval", "--out", "demo"]))
    for content, wanted in (
        (evaluated, "is of 'quantwm eval --out demo', not of quantwm demo"),
        ('{"my": "figures"}\n', "not a quantwm results file"),
        ("three years of work\n", "not JSON"),
    ):
        (tmp_path / RESULTS).write_text(content)
        with pytest.raises(StateError, match=wanted):
            prepare(tmp_path, "demo", overwrite=True)
        assert (tmp_path / RESULTS).read_text() == content


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(StateError, match="is a file"):
            prepare(path, "demo", overwrite=overwrite)


def is_a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file"


def is_in_a_file(folder: Path) -> Path:
    return is_a_file(folder) / "a" / "b"


def has_a_name_too_long(folder: Path) -> Path:
    return folder / "a" / ("x" * 300)


def is_a_link_to_nothing(folder: Path) -> Path:
    (folder / "link").symlink_to("nothing")
    return folder / "link"


def is_where_the_system_makes_nothing(_folder: Path) -> Path:
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    return Path("/proc/quantwm")


def is_in_a_folder_that_may_be_read_only(folder: Path) -> Path:
    if os.name != "posix" or os.geteuid() == 0:
        pytest.skip("a folder that this user may not write")
    (folder / "shelf").mkdir(mode=0o500)
    return folder / "shelf" / "out"


def holds_a_folder_where_results_belong(folder: Path) -> Path:
    (folder / "out" / RESULTS).mkdir(parents=True)
    return folder / "out"


def holds_a_folder_where_the_lock_belongs(folder: Path) -> Path:
    (folder / "out" / ownership.LOCK).mkdir(parents=True)
    return folder / "out"


UNWRITABLE = (
    (is_a_file, "is a file; name a folder"),
    (is_in_a_file, "cannot be written: Not a directory; name another folder"),
    (has_a_name_too_long, "cannot be written: File name too long; name another folder"),
    (is_a_link_to_nothing, "is a link to nothing; name a folder"),
    (is_where_the_system_makes_nothing, "cannot be written: "),
    (is_in_a_folder_that_may_be_read_only, "cannot be written: Permission denied"),
)


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(("place", "message"), UNWRITABLE)
@pytest.mark.parametrize("command", ["demo", "eval"])
def test_what_cannot_be_written_into_is_refused_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    place: Callable[[Path], Path],
    message: str,
) -> None:
    def worked(*_: object) -> None:
        pytest.fail("a host was loaded, or something made")

    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", worked)
    monkeypatch.setattr(demo, "produce", worked)
    out = place(tmp_path)
    before = listing(tmp_path)
    given = ["--methods", "rtn", "--out", str(out), *(["--scenes", "0"] if command == "eval" else [])]
    assert cli.main([command, *given]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"quantwm {command}: --out {out}: ")
    assert message in told.err
    assert "Errno" not in told.err
    assert listing(tmp_path) == before


@pytest.mark.parametrize("place", [holds_a_folder_where_results_belong, holds_a_folder_where_the_lock_belongs])
def test_a_folder_in_the_place_of_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", lambda _setup: FakeHost())
    out = place(tmp_path)
    assert cli.main(["eval", "--methods", "rtn", "--scenes", "0", "--frames", "4", "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert "cannot be written: Is a directory" in told
    assert str(out) in told
    assert "Errno" not in told


def test_a_way_up_through_what_is_not_there_is_rehearsed_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    check_folder(tmp_path / "here" / "a" / ".." / ".." / "b")
    check_folder(tmp_path)
    assert listing(tmp_path) == ["here"]
