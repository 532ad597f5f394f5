"""What a result says that it was made with."""

import shutil
import subprocess
from pathlib import Path

import pytest

from quantwm_eval import provenance

GIT = shutil.which("git")


def git(folder: Path, *arguments: str) -> str:
    assert GIT is not None
    who = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run([GIT, "-C", folder, *who, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package seems to be imported from."""
    path = tmp_path / "package" / "provenance.py"
    path.parent.mkdir()
    path.write_text("a")
    monkeypatch.setattr(provenance, "__file__", str(path))
    return path


@pytest.mark.skipif(GIT is None, reason="needs git")
def test_a_checkout_is_named_by_its_commit_and_whether_it_was_changed(module: Path) -> None:
    git(module.parent, "init", "--quiet")
    git(module.parent, "add", module.name)
    git(module.parent, "commit", "--quiet", "--message=any")
    git(module.parent, "tag", "--annotate", "v1", "--message=any")
    whole = git(module.parent, "rev-parse", "HEAD").strip()
    assert provenance.commit() == whole[:7]
    (module.parent / "untracked").touch()
    assert provenance.commit() == whole[:7]
    module.write_text("b")
    assert provenance.commit() == f"{whole[:7]}+"
    assert provenance.collect(()).commit == provenance.commit()


@pytest.mark.skipif(GIT is None, reason="needs git")
def test_a_checkout_of_something_else_around_an_environment_is_not_taken_for_it(module: Path) -> None:
    other = module.parents[1]
    (other / "theirs").touch()
    git(other, "init", "--quiet")
    git(other, "add", "theirs")
    git(other, "commit", "--quiet", "--message=any")
    assert provenance.commit() == ""


def test_elsewhere_there_is_no_commit(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance.commit() == ""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert provenance.commit() == ""
