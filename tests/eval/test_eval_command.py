"""``quantwm eval`` and ``quantwm report`` on the fake host, from the words typed to the files and tables."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from quantwm_core.errors import StateError, UnknownNameError
from quantwm_eval import cli, merge, paired, results, summary, tables
from quantwm_eval.results import Results
from tests.eval.fake_host import FakeHost
from tests.eval.test_report import Page, content

FILE = """
methods = ["rtn", { name = "quantwm", rank = 2 }]
scenes = 3
frames = 10
chunks_per_seal = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    (folder / "ours.toml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantwm_eval.hosts.demo.LOAD", lambda _setup: FakeHost())
        given = ["eval", str(folder / "ours.toml"), "--out", str(folder / "run"), "--videos", "1", "--seeds", "0,3"]
        assert cli.main(given) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def found(folder: Path) -> Results:
    return results.load(folder / "results.jsonl")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", lambda _setup: FakeHost())


def test_options_and_file_make_the_experiment(found: Results) -> None:
    wanted = found.experiment
    assert [method.label for method in wanted.methods] == ["bf16", "rtn", "quantwm:rank=2"]
    assert (wanted.scenes, wanted.seeds, wanted.frames, wanted.batch) == ((0, 1, 2), (0, 3), 10, 1)
    assert found.missing == 0
    assert all(cell.reference for cell in found.cells)


def test_the_same_command_again_says_that_all_is_there(
    folder: Path, fake: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "results.jsonl").read_bytes()
    given = ["eval", str(folder.parent / "ours.toml"), "--out", str(folder), "--seeds", "0,3"]
    assert cli.main(given) == 0
    told = capsys.readouterr()
    assert "36 of 36 cells are there" in told.err
    assert "walk: PSNR, dB ↑" in told.out
    assert (folder / "results.jsonl").read_bytes() == before
    assert cli.main([*given, "--frames", "12"]) == 2
    assert "frames 10 there, 12 here" in capsys.readouterr().err
    assert (folder / "results.jsonl").read_bytes() == before


def test_time_left_is_told_on_standard_error(
    tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantwm_eval.commands.evaluate.SECONDS_BETWEEN_LOG_LINES", 0)
    given = ["eval", "--methods", "rtn", "--scenes", "0", "--frames", "4", "--kinds", "walk", "--out", str(tmp_path)]
    assert cli.main(given) == 0
    told = capsys.readouterr()
    assert re.search(r"\d+/6 \[\d\d:\d\d<\d\d:\d\d", told.err)
    assert "chunk" not in told.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scenes = 2", "names no methods"),
        ("methods = ['rtn']", "names no scenes"),
        ("methods = ['rtn']\nscenes = 2\nframez = 4", "unknown setting 'framez'; did you mean 'frames'"),
        ("methods = ['rtn']\nscenes = 2\nframes = '4'", "frames = '4': need a whole number"),
        ("methods = ['rtn']\nscenes = 2\nframes = true", "frames = True: need a whole number"),
        ("methods = ['rtn']\nscenes = ['a']", "need a list of int"),
        ("methods = 'rtn'\nscenes = 2", "need a list of str or dict"),
        ("methods = [{ rank = 2 }]\nscenes = 2", "no table of a name"),
        ("methods = ['qgv']\nscenes = 2", "did you mean 'qvg'"),
        ("methods = ['rtn']\nscenes = 0", "scenes: got none"),
        ("methods = ['rtn']\nscenes = 2\nmetrics = ['pnsr']", "did you mean 'psnr'"),
        ("methods = ['rtn']\nscenes = 2\nmodel = 'demos'", "did you mean 'demo'"),
        ("methods = ['rtn']\nscenes = 2\nframes = 5", "frames 5"),
        ("methods = ['rtn']\nscenes = -1", "scenes: got none"),
        ("methods = ['rtn']\nscenes = [-1]", "scenes -1: need numbers of at least 0"),
        ("methods = ['rtn']\nscenes = 999999999999", "scenes = 999999999999: need at most 100000"),
        ("methods = ['rtn']\nscenes = 2\ndegrees = -10", "degrees -10: need at least 1"),
        ("methods = ['rtn'", "not TOML"),
        (f"scenes = {'9' * 5000}", "not TOML: Exceeds the limit"),
        (f"scenes = {'[' * 100_000}", "not TOML: "),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused_before_anything_is_written(
    tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "x.toml").write_text(text)
    assert cli.main(["eval", str(tmp_path / "x.toml"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.toml").mkdir()
    for name, message in (("absent.toml", "No such file or directory"), ("folder.toml", "Is a directory")):
        assert cli.main(["eval", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        assert f"quantwm eval: {tmp_path / name}: cannot be read: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unsteady_model_ends_in_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", lambda _setup: FakeHost(unsteady=True))
    given = ["--methods", "bf16", "--scenes", "0", "--frames", "4", "--kinds", "walk", "--out", str(tmp_path)]
    assert cli.main(["eval", *given]) == 1
    assert "INVALID" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "--format", "table"]) == 1
    assert "INVALID" in capsys.readouterr().err


def test_the_table_states_n_intervals_and_paired_differences(
    folder: Path, found: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(folder), "--format", "table", "--against", "rtn"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    (block,) = (block for block in blocks if block.startswith("walk: PSNR"))
    lines = block.splitlines()
    assert re.split(r" {2,}", lines[1]) == [
        "method",
        "n",
        "mean",
        "95 % interval",
        "minus rtn",
        "95 % interval",
        "pairs",
    ]
    row = re.split(r" {2,}", lines[-1])
    ours, theirs = (summary.values(found.cells, "walk", label, "psnr") for label in ("quantwm:rank=2", "rtn"))
    assert row[:3] == ["quantwm:rank=2", "3", f"{np.mean(ours):.2f}"]
    mean = np.mean(np.subtract(ours, theirs))
    assert row[4] == f"{mean:+.2f}"  # of three pairs, too few for a star
    low, high = (float(end) for end in row[5].split(" to "))
    assert low <= mean <= high
    assert row[6] == "3"
    assert len(re.split(r" {2,}", lines[-2])) == 4  # rtn has no difference from itself


def test_differences_are_paired_by_scene(found: Results) -> None:
    cells = tuple(cell for cell in found.cells if not (cell.method == "rtn" and cell.scene == 1))
    lacking = Results(found.experiment, found.provenance, cells)
    difference = paired.difference(lacking, "walk", "quantwm:rank=2", "rtn", "ssim")
    ours, theirs = (summary.by_scene(cells, "walk", label, "ssim") for label in ("quantwm:rank=2", "rtn"))
    assert sorted(theirs) == [0, 2]
    assert difference.n == 2
    assert difference.mean == pytest.approx((ours[0] - theirs[0] + ours[2] - theirs[2]) / 2)
    # All scenes share a large spread, which pairing takes out.
    assert difference.high - difference.low <= max(ours.values()) - min(theirs.values())
    with pytest.raises(UnknownNameError, match="unknown method of these results"):
        paired.opponent(found, "kivi")
    assert paired.opponent(found, None) == "rtn"


def test_csv_holds_the_numbers_in_full(found: Results) -> None:
    lines = list(csv.DictReader(io.StringIO(tables.comma_separated(found, "rtn"))))
    (line,) = (x for x in lines if (x["kind"], x["quantity"], x["method"]) == ("walk", "psnr", "quantwm:rank=2"))
    estimate = summary.estimate(found, "walk", "quantwm:rank=2", "psnr")
    assert (float(line["mean"]), float(line["low"]), int(line["n"])) == (estimate.mean, estimate.low, 3)
    assert float(line["difference"]) == paired.difference(found, "walk", "quantwm:rank=2", "rtn", "psnr").mean
    (exact,) = (x for x in lines if (x["kind"], x["quantity"], x["method"]) == ("walk", "psnr", "bf16"))
    assert exact["mean"] == "inf"


def test_the_page_is_made_from_what_is_stored(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder), "--out", str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    films = [content(video["src"]) for video in page.all("video")]
    kept = [path.read_bytes() for path in (folder / "videos").iterdir()]
    assert len(kept) == 2 * (1 + 3 + 2)  # truth, methods, differences of those that compress
    assert sorted(films) == sorted(kept)
    words = " ".join(page.words)
    assert "quantwm:rank=2" in "".join(page.words)
    assert "Incomplete" not in words
    assert "PSNR" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert cli.main(["report", str(folder), "--out", str(tmp_path)]) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert cli.main(["report", str(folder), "--out", str(tmp_path), "--overwrite"]) == 0


@pytest.mark.parametrize("form", ["csv", "jsonl", "markdown", "table"])
def test_every_format_but_the_page_is_written_to_a_file_that_is_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    given = ["report", str(folder), "--format", form]
    assert cli.main(given) == 0
    printed = capsys.readouterr().out
    out = tmp_path / f"scores.{form}"
    assert cli.main([*given, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text(encoding="utf-8") == printed
    out.write_text("mine")
    assert cli.main([*given, "--out", str(out)]) == 2
    assert "exists; name another file, or add --overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert cli.main([*given, "--out", str(out), "--overwrite"]) == 0
    assert out.read_text(encoding="utf-8") == printed
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_report_is_never_written_over_what_it_is_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(before := (folder / "results.jsonl").read_bytes())
    for name in (path, tmp_path):
        assert cli.main(["report", str(name), "--format", "csv", "--out", str(path), "--overwrite"]) == 2
        assert "that is an input itself" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_what_could_not_be_written_after_all_is_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantwm_eval.output.replaced", full)
    assert cli.main(["report", str(folder), "--format", "csv", "--out", str(tmp_path / "scores.csv")]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("kind,quantity,")
    assert f"quantwm report: --out {tmp_path / 'scores.csv'}: cannot be written: No space left" in told.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--format", "csv", "--out", "{tmp}"], "is a folder; name a file"),
        (["--format", "csv", "--out", "{tmp}/absent/scores.csv"], "need a file in a folder that exists"),
        (["--format", "table", "--out", "{tmp}/" + "x" * 300], "cannot be written: File name too long"),
        (["--out", "{tmp}/file"], "is a file; name a folder"),
        (["--out", "{tmp}/file/page"], "cannot be written: Not a directory"),
        (["--format", "jsonl", "--against", "rtn"], "--against: not for --format jsonl, only for table and csv"),
        (["--against", "rtn"], "--against: not for --format html"),
        (["--format", "markdown", "--all"], "--all: not for --format markdown"),
        (["--format", "csv", "--videos", "{tmp}"], "--videos: not for --format csv, only for html"),
    ],
)
def test_what_a_format_cannot_do_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    (tmp_path / "file").write_text("mine")
    assert cli.main(["report", str(folder), *(word.format(tmp=tmp_path) for word in given)]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "Errno" not in told.err
    assert told.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_results_that_are_not_there_are_bad_options(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for absent in (tmp_path / "absent.jsonl", tmp_path):
        assert cli.main(["report", str(folder), str(absent)]) == 2
        assert f"quantwm report: {tmp_path}" in (told := capsys.readouterr().err)
        assert "there is no such results file" in told


def test_a_killed_runs_page_says_so(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (folder / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(whole[: len(whole) * 2 // 3])
    left = whole[: len(whole) * 2 // 3].count(b"\n") - 1
    assert cli.main(["report", str(tmp_path)]) == 0
    assert f"incomplete: {left} of 36 cells" in capsys.readouterr().err
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Incomplete run." in text
    assert f"{36 - left} of 36 cells" in text
    assert Page(text).all("video") == []


def test_parts_of_an_experiment_are_joined_and_others_refused(
    folder: Path, found: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    parts = []
    for scene in (0, 1, 2):
        plain = json.loads(head)
        plain["experiment"]["scenes"] = [scene]
        path = tmp_path / f"{scene}.jsonl"
        path.write_text(json.dumps(plain) + "\n" + "".join(x for x in lines if json.loads(x)["scene"] == scene))
        parts.append(path)
    joined = merge.load(parts)
    assert joined.experiment == found.experiment
    assert joined.missing == 0
    for kind, label, quantity in (("walk", "rtn", "psnr"), ("look-away", "quantwm:rank=2", "ssim")):
        assert summary.estimate(joined, kind, label, quantity) == summary.estimate(found, kind, label, quantity)
    capsys.readouterr()
    assert cli.main(["report", *map(str, parts), "--format", "jsonl"]) == 0
    whole = results.parse(Path("joined"), capsys.readouterr().out)
    assert whole.experiment == found.experiment
    assert {cell.key for cell in whole.cells} == {cell.key for cell in found.cells}
    with pytest.raises(StateError, match="both hold the cell walk 0 0 bf16"):
        merge.load([parts[0], parts[0]])
    plain = json.loads(head)
    plain["experiment"]["frames"] = 12
    parts[2].write_text(json.dumps(plain) + "\n")
    with pytest.raises(StateError, match="frames 12 there, 10 here"):
        merge.load(parts)
    assert cli.main(["report", *map(str, parts)]) == 2
