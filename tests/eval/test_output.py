"""Nobody's files are lost to a run."""

from pathlib import Path

import pytest

from quantwm_core.errors import StateError
from quantwm_eval import provenance, results
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.output import RESULTS, prepare

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
