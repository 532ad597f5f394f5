"""VBench as a program of another environment: a stand-in that answers as version 0.1.5 does, and ones that fail."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from quantwm_core.errors import FormatError, StateError, UnknownNameError
from quantwm_eval import cli, film, vbench
from quantwm_eval.hosts import Setup
from quantwm_eval.metrics.temporal_flickering import temporal_flickering
from quantwm_eval.vbench import Scores
from tests.eval.fake_host import FakeHost

# Scores a video by the bytes of its file, as a share; imaging quality in percent, as VBench does.
STAND_IN = f"""#!{sys.executable}
import argparse, json, os, pathlib, sys
parser = argparse.ArgumentParser()
commands = parser.add_subparsers(dest="command", required=True)
one = commands.add_parser("evaluate")
for name in ("videos_path", "dimension", "mode", "output_path"):
    one.add_argument("--" + name, required=True)
options = parser.parse_args()
assert options.mode == "custom_input"
assert "PYTHONPATH" not in os.environ
assert os.environ["PATH"].split(os.pathsep)[0] == str(pathlib.Path(__file__).parent)
scale = 100 if options.dimension == "imaging_quality" else 1
listed = [
    {{"video_path": str(path), "video_results": scale * (path.stat().st_size % 1000) / 1000}}
    for path in sorted(pathlib.Path(options.videos_path).iterdir())
]
mean = sum(one["video_results"] for one in listed) / len(listed) / scale
folder = pathlib.Path(options.output_path)
folder.mkdir(parents=True)
(folder / "results_now_eval_results.json").write_text(json.dumps({{options.dimension: [mean, listed]}}))
"""
SILENT = f"#!{sys.executable}\nimport sys\nsys.stderr.write('CUDA is not there')\n"
CUT_OFF = STAND_IN.replace(".write_text(", ".write_bytes(").replace(
    "[mean, listed]}))", "[mean, listed]}).encode()[:-9])"
)
FOREIGN = STAND_IN.replace("[mean, listed]", "mean")


def program(folder: Path, text: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    path = folder / "bin" / "vbench"
    path.write_text(text)
    path.chmod(0o755)
    return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", lambda _setup: FakeHost())
    monkeypatch.setenv("PYTHONPATH", "/nowhere")


GIVEN = ["eval", "--methods", "rtn", "--scenes", "0,2", "--frames", "4", "--kinds", "walk", "--metrics", "psnr,memory"]


def test_scores_come_from_the_program_and_stand_in_every_report(
    tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str]
) -> None:
    environment, out = program(tmp_path / "env", STAND_IN), tmp_path / "out"
    chosen = ["--vbench-dimensions", "motion_smoothness,imaging_quality"]
    assert cli.main([*GIVEN, "--out", str(out), "--vbench", str(environment), *chosen]) == 0
    told = capsys.readouterr()
    assert "VBench: imaging_quality" in told.err
    scores = vbench.load(out / vbench.FILE)
    assert scores is not None
    wanted = {
        ("walk", scene, label): (out / "videos" / f"walk-{scene}-{label}.mp4").stat().st_size % 1000 / 1000
        for label in ("bf16", "rtn")
        for scene in (0, 2)
    }
    assert scores.dimensions["motion_smoothness"] == wanted
    assert scores.dimensions["imaging_quality"] == pytest.approx(wanted)
    mean = sum(value for (_, _, label), value in wanted.items() if label == "rtn") / 2
    row = next(line for line in told.out.splitlines() if line.startswith("rtn"))
    assert row.count(f"{mean:.4f}") == 3  # both dimensions and their mean
    assert cli.main(["report", str(out), "--format", "markdown"]) == 0
    assert "## VBench, walk scenes" in capsys.readouterr().out
    assert cli.main(["report", str(out)]) == 0
    assert "Scored by VBench" in (out / "report.html").read_text(encoding="utf-8")
    assert cli.main(["report", str(out), "--format", "table"]) == 0
    assert f"{mean:.4f}" in capsys.readouterr().out


def test_where_it_is_not_installed_the_message_says_how_to_and_nothing_is_begun(
    tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for environment in (tmp_path / "empty", tmp_path / "absent"):
        assert cli.main([*GIVEN, "--out", str(tmp_path / "out"), "--vbench", str(environment)]) == 2
        assert "pip install vbench" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SILENT, "CUDA is not there"),
        (FOREIGN, "not of the form"),
        (CUT_OFF, "VBench's result for subject_consistency"),
        (CUT_OFF, "run the same command again"),
    ],
)
def test_where_it_fails_the_rest_stands(
    tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    environment, out = program(tmp_path / "env", text), tmp_path / "out"
    assert cli.main([*GIVEN, "--out", str(out), "--vbench", str(environment)]) == 1
    told = capsys.readouterr()
    assert message in told.err
    assert "walk: PSNR" in told.out
    assert not (out / vbench.FILE).exists()
    assert cli.main(["report", str(out), "--format", "table"]) == 0


def test_the_host_is_let_go_of_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[FakeHost]] = []

    def load(_setup: Setup) -> FakeHost:
        host = FakeHost()
        made.append(weakref.ref(host))
        return host

    def score(*_given: object) -> Scores:
        assert [each() for each in made] == [None]
        return Scores({})

    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", load)
    monkeypatch.setattr(vbench, "score", score)
    given = [*GIVEN, "--out", str(tmp_path / "out"), "--vbench", str(program(tmp_path / "env", STAND_IN))]
    assert cli.main(given) == 0


def test_videos_that_were_not_kept_are_asked_for(
    tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*GIVEN, "--out", str(tmp_path / "out")]
    assert cli.main(given) == 0
    assert cli.main([*given, "--vbench", str(program(tmp_path / "env", STAND_IN))]) == 1
    assert "was not kept" in capsys.readouterr().err


def test_dimensions_that_need_a_prompt_are_no_dimensions(tmp_path: Path, fake: None) -> None:
    with pytest.raises(UnknownNameError, match="unknown VBench dimension 'object_class'"):
        vbench.check_dimensions(["object_class"])


def test_files_are_read_back_and_foreign_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "vbench.json"
    assert vbench.load(path) is None
    scores = Scores({"motion_smoothness": {("walk", 3, "quantwm:rank=2"): 0.5}})
    vbench.save(path, scores)
    assert vbench.load(path) == scores
    known = {"format": vbench.FORMAT, "version": 1}
    for plain, message in (
        ({"format": "x", "version": 1, "dimensions": {}}, "format 'x' 1, need 'quantwm-vbench' 1"),
        ({"a": 1}, "format: got nothing, need a text"),
        ([], r"got \[\], need an object"),
        (
            known | {"dimensions": {"a": [["walk", -3, "rtn", 0.5]]}},
            r"dimensions.a\[0\]\[1\]: got -3, need a whole number",
        ),
        (known | {"dimensions": {"a": [["walk", 3, "rtn"]]}}, r"dimensions.a\[0\]: got .*, need a list of 4"),
        (
            known | {"dimensions": {"a": [["walk", 3, "rtn", 0.5]], "b": []}},
            "b: of other videos than the first dimension",
        ),
    ):
        path.write_text(json.dumps(plain))
        with pytest.raises(FormatError, match=rf"vbench\.json: .*{message}"):
            vbench.load(path)
    path.write_text("{")
    with pytest.raises(FormatError, match=r"vbench\.json: no scores of VBench"):
        vbench.load(path)


def test_a_program_that_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vbench").write_text("not executable")
    with pytest.raises(StateError, match="holds no command"):
        vbench.find(tmp_path / "vbench")


IN_ITS_ENVIRONMENT = """
import sys
import numpy as np
from vbench.temporal_flickering import cal_score, get_frames
np.save(sys.argv[2], np.stack(get_frames(sys.argv[1])))
print(repr(cal_score(sys.argv[1])))
"""


@pytest.mark.skipif("QUANTWM_VBENCH" not in os.environ, reason="QUANTWM_VBENCH names no environment of VBench")
def test_temporal_flickering_is_vbenchs_own_to_the_last_bit(tmp_path: Path) -> None:
    python = Path(os.environ["QUANTWM_VBENCH"]) / "bin" / "python"
    draw = np.random.default_rng(0)
    frames = draw.integers(0, 256, (9, 48, 64, 3), dtype=np.uint8)
    (tmp_path / "noise.mp4").write_bytes(film.encode(frames, 8))
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = [str(python), "-c", IN_ITS_ENVIRONMENT, str(tmp_path / "noise.mp4"), str(tmp_path / "read.npy")]
    ended = subprocess.run(asked, capture_output=True, text=True, check=True, env=plain)  # the user's own
    read = np.load(tmp_path / "read.npy")
    assert read.shape == frames.shape
    assert temporal_flickering(read) == float(ended.stdout.splitlines()[-1])
