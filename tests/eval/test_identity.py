"""What a host was made from is known by its content, and results of two do not mix."""

import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantwm_core import methods
from quantwm_core.errors import StateError
from quantwm_eval import cli, merge, results
from quantwm_eval.hosts import Setup
from quantwm_eval.identity import PIECE, PIECES, identify
from tests.distributions import install
from tests.eval.test_provenance import GIT, git

SCENES = {"0/prompt.txt": "a room", "0/video/0.png": "pixels", "1/prompt.txt": "a lake"}
HOST = """
from tests.eval.fake_host import FakeHost

def load(setup):
    setup.need("mine", "inputs")
    return FakeHost(name="mine")
"""


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def of(part: str, path: Path) -> dict[str, str]:
    given: Any = {part: path}
    return identify(Setup(**given))


def test_paths_do_not_count_and_neither_does_the_order_of_writing(tmp_path: Path) -> None:
    here = written(tmp_path / "here", SCENES)
    there = written(tmp_path / "there" / "elsewhere", dict(reversed(SCENES.items())))
    for part in ("checkout", "weights", "inputs"):
        assert of(part, here) == of(part, there)
    (tmp_path / "a.txt").write_text("a prompt")
    (tmp_path / "b.txt").write_text("a prompt")
    for part in ("weights", "inputs", "config"):
        assert of(part, tmp_path / "a.txt") == of(part, tmp_path / "b.txt")


@pytest.mark.parametrize("part", ["weights", "inputs"])
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "0/video/0.png").write_text("Pixels"),
        lambda folder: (folder / "0/prompt.txt").rename(folder / "0/prompts.txt"),
        lambda folder: (folder / "1/image.png").touch(),
        lambda folder: (folder / "1/prompt.txt").unlink(),
    ],
    ids=["content", "name", "added", "removed"],
)
def test_whatever_changes_in_a_folder_is_noticed(part: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = written(tmp_path / "scenes", SCENES)
    before = of(part, folder)
    written(folder, {".cache/x": "1", "0/.DS_Store": "2"})  # hidden: no host reads it
    assert of(part, folder) == before
    change(folder)
    assert of(part, folder) != before


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    plain, linked = written(tmp_path / "plain", SCENES), tmp_path / "linked"
    linked.mkdir()
    for scene in ("0", "1"):
        (linked / scene).symlink_to(plain / scene)
    assert identify(Setup(inputs=linked)) == identify(Setup(inputs=plain))
    before = identify(Setup(inputs=plain))
    (plain / "1" / "back").symlink_to(plain)
    (plain / "0" / "gone").symlink_to(tmp_path / "nowhere")
    assert identify(Setup(inputs=plain)) == before


def test_large_weights_are_known_by_pieces_of_them(tmp_path: Path) -> None:
    path, share = tmp_path / "model.safetensors", 2 * PIECE
    path.write_bytes(bytes(PIECES * share))

    def changed(start: int, count: int) -> dict[str, str]:
        path.write_bytes(bytes(start) + b"\1" * count + bytes(PIECES * share - start - count))
        return identify(Setup(weights=path))

    same = changed(0, 0)
    assert same["weights"].startswith("pieces:")
    for start in (0, 1000, 100 * share + 77, (PIECES - 1) * share):
        assert changed(start, share) != same  # a 1024th of the file, wherever it begins
    assert changed(PIECE, PIECE) == same  # what lies between pieces is not read
    path.write_bytes(bytes(PIECES * share + 1))
    assert identify(Setup(weights=path)) != same


def test_small_weights_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    found = set()
    for last in b"\0\1":
        path.write_bytes(bytes(PIECES * PIECE - 1) + bytes([last]))
        found.add(identify(Setup(weights=path))["weights"])
    assert len(found) == 2


@pytest.mark.skipif(GIT is None, reason="needs git")
def test_a_checkout_is_its_commit_and_what_was_changed_in_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "host", {"model.py": "a", "config.yaml": "b", "README.md": "c"})
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=any")
    commit = f"commit:{git(folder, 'rev-parse', 'HEAD').strip()}"
    (folder / "untracked.py").touch()
    assert identify(Setup(checkout=folder)) == {"checkout": commit}
    found = set()
    for text in ("d", "e"):
        (folder / "model.py").write_text(text)
        found.add(identify(Setup(checkout=folder))["checkout"])
    assert len(found) == 2
    assert all(told.startswith(f"{commit}+ sha256:") for told in found)


@pytest.mark.parametrize("installed", [False, True])
def test_a_checkout_that_git_does_not_know_is_its_code(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed:
        monkeypatch.setattr(shutil, "which", lambda _: None)
    folder = written(tmp_path / "host", {"utils/model.py": "a", "config.yaml": "b", "README.md": "c"})
    before = identify(Setup(checkout=folder))["checkout"]
    assert before.startswith("sha256:")
    written(folder, {"README.md": "d", "assets/demo.png": "e"})
    assert identify(Setup(checkout=folder))["checkout"] == before
    for name in ("utils/model.py", "config.yaml"):
        after = identify(Setup(checkout=written(folder, {name: "f"})))["checkout"]
        assert after != before
        before = after
    written(folder, {"out/results.jsonl": "g", "out/vbench.json": "h"})
    assert identify(Setup(checkout=folder))["checkout"] == before


def test_a_configuration_of_the_checkout_comes_before_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written(tmp_path, {"own.yaml": "outside", "host/own.yaml": "inside", "host/model.py": ""}))
    inside = identify(Setup(checkout=Path("host"), config=Path("own.yaml")))["config"]
    assert inside == identify(Setup(config=Path("host/own.yaml")))["config"]
    assert inside != identify(Setup(config=Path("own.yaml")))["config"]


def test_what_is_no_path_counts_by_its_name() -> None:
    assert identify(Setup(weights=Path("owner/model"), config=Path("small"))) == {
        "weights": "owner/model",
        "config": "small",
    }


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An evaluation of a host that another distribution registers, typed up to its scenes, inputs and folder."""
    (tmp_path / "my_world.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "my-world", "quantwm.hosts", {"mine": "my_world:load"})
    monkeypatch.chdir(tmp_path)
    for name in ("scenes", "other"):
        written(tmp_path / name, SCENES | {"1/prompt.txt": name})
    options = "--host mine --methods rtn --frames 4 --kinds walk --metrics psnr --samples 0"
    yield ["eval", *shlex.split(options)]
    methods.implementation.cache_clear()


def test_a_run_is_not_continued_on_other_inputs(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given += ["--scenes", "0,1", "--out", "out", "--inputs"]
    assert cli.main([*given, "scenes"]) == 0
    path = Path("out/results.jsonl")
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:3]))
    capsys.readouterr()
    assert cli.main([*given, "other"]) == 2
    told = [identify(Setup(inputs=Path(name)))["inputs"][: len("sha256:") + 12] for name in ("scenes", "other")]
    assert f"belongs to another run: --inputs {told[0]} there, {told[1]} here;" in capsys.readouterr().err
    assert path.read_text() == "".join(whole[:3])
    Path("scenes").rename("moved")
    assert cli.main([*given, "moved"]) == 0
    assert results.load(path).missing == 0


def test_results_are_not_written_into_inputs(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*given, "--scenes", "0", "--inputs", "scenes", "--out", "scenes/out"]) == 2
    assert "--out scenes/out: lies in --inputs scenes" in capsys.readouterr().err
    assert not Path("scenes/out").exists()


def test_parts_of_other_inputs_are_not_reported_together(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parts = []
    for scene, inputs in ((0, "scenes"), (1, "scenes"), (2, "other")):
        parts.append(f"part{scene}")
        assert cli.main([*given, "--scenes", str(scene), "--inputs", inputs, "--out", parts[-1]]) == 0
    capsys.readouterr()
    assert cli.main(["report", *parts[:2], "--format", "markdown"]) == 0
    told = identify(Setup(inputs=Path("scenes")))["inputs"][: len("sha256:") + 12]
    assert f"--inputs {told}" in capsys.readouterr().out
    assert cli.main(["report", *parts, "--format", "table"]) == 2
    assert "part2/results.jsonl does not fit part0/results.jsonl: --inputs sha256:" in capsys.readouterr().err


def test_a_file_that_does_not_say_compares_with_all(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for scene, inputs in ((0, "scenes"), (1, "scenes"), (2, "other")):
        assert cli.main([*given, "--scenes", str(scene), "--inputs", inputs, "--out", f"part{scene}"]) == 0
    path = Path("part0/results.jsonl")
    found = results.load(path)
    head, _, cells = path.read_text().partition("\n")
    recorded = f', "host": {{"inputs": "{(found.provenance.host or {})["inputs"]}"}}'
    assert head.count(recorded) == 1
    path.write_text(f"{head.replace(recorded, '')}\n{cells}")  # as files of early versions are
    assert results.load(path).provenance.host is None
    assert cli.main([*given, "--scenes", "0", "--inputs", "other", "--out", "part0"]) == 0
    capsys.readouterr()
    joined = [merge.load([Path(part, path.name) for part in parts]) for parts in (["part1"], ["part1", "part0"])]
    assert [one.provenance.host for one in joined] == [found.provenance.host, None]
    assert cli.main(["report", "part0", "part1", "part2", "--format", "table"]) == 2
    assert "part2/results.jsonl does not fit part1/results.jsonl: --inputs" in capsys.readouterr().err


def test_a_run_is_not_continued_with_another_version_of_its_host(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given += ["--scenes", "0", "--inputs", "scenes", "--out", "out"]
    assert cli.main(given) == 0
    assert results.load(tmp_path / "out/results.jsonl").provenance.versions["my-world"] == "1.0"
    shutil.rmtree(tmp_path / "my_world-1.0.dist-info")
    install(tmp_path, "my-world", "quantwm.hosts", {"mine": "my_world:load"}, version="2.0")
    capsys.readouterr()
    assert cli.main(given) == 2
    assert "belongs to another run: my-world 1.0 there, 2.0 here;" in capsys.readouterr().err


def test_parts_join_by_the_versions_of_what_both_use(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given += ["--inputs", "scenes"]
    for version in ("0.1", "0.2"):
        install(tmp_path, "my-method", "quantwm.methods", {"my": "quantwm_core.methods.rtn:METHOD"}, version)
        for scene, method in ((0, "my"), (1, "kivi:values=my"), (2, "kivi")):
            typed = ["--methods", method, "--scenes", str(scene), "--out", f"{version}/{scene}"]
            assert cli.main([*given, *typed]) == 0
        shutil.rmtree(tmp_path / f"my_method-{version}.dist-info")
    parts = [Path(version, str(scene), "results.jsonl") for version in ("0.1", "0.2") for scene in range(3)]
    stated = [results.load(part).provenance.versions.get("my-method") for part in parts]
    assert stated == ["0.1", "0.1", None, "0.2", "0.2", None]
    assert merge.load([parts[2], parts[0]]).provenance.versions["my-method"] == "0.1"
    with pytest.raises(
        StateError, match=r"0\.2/1/results.jsonl does not fit 0\.1/0/.*: my-method 0\.2 there, 0\.1 here"
    ):
        merge.load([parts[2], parts[0], parts[4]])
