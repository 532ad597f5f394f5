"""Scenes from a user's path: a file of prompts, a folder of pictures, a folder of scenes."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval import suite


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (4, 3)).save(path)
    return path


def test_a_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "suite.txt").write_text("a door\n\n  a window é \n", encoding="utf-8")
    found = suite.read(tmp_path / "suite.txt")
    assert [scene.prompt for scene in found] == ["a door", "a window é"]
    assert found[1].place == f"{tmp_path / 'suite.txt'}: line 3"
    with pytest.raises(ParameterError, match=r"suite.txt: line 1: host 'x' needs image there \(a picture\)"):
        found[0].need("x", "image", "a picture")


def test_pictures_are_scenes_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    pictures = [image(tmp_path / name) for name in ("2.png", "10.png", "0[1].png")]
    np.savez(tmp_path / "10.npz", keyboard=np.zeros((3, 4)))
    (tmp_path / "0[1].txt").write_text("a corridor")
    (tmp_path / "notes.md").touch()
    found = suite.read(tmp_path)
    assert [scene.parts["image"] for scene in found] == [pictures[2], pictures[0], pictures[1]]
    assert [scene.prompt for scene in found] == ["a corridor", "", ""]
    assert found[2].need("x", "actions", "an .npz") == tmp_path / "10.npz"
    with pytest.raises(ParameterError, match=r"2.png: host 'x' needs a prompt there \(prompt.txt\)"):
        found[1].need_prompt("x")


def test_folders_are_scenes_and_their_files_go_by_their_names(tmp_path: Path) -> None:
    for number in (0, 1):
        image(tmp_path / f"{number:02d}" / "image.jpg")
        image(tmp_path / f"{number:02d}" / "video" / "0.png")
        (tmp_path / f"{number:02d}" / "prompt.txt").write_text(f"room {number}\n")
        np.save(tmp_path / f"{number:02d}" / "poses.npy", np.eye(4)[None])
    (tmp_path / ".git").mkdir()
    found = suite.read(tmp_path)
    assert [scene.prompt for scene in found] == ["room 0", "room 1"]
    assert sorted(found[1].parts) == ["image", "poses", "video"]
    assert found[1].parts["video"] == tmp_path / "01" / "video"


def test_what_is_no_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no scene"):
        suite.read(tmp_path)
    image(tmp_path / "both" / "0.png")
    (tmp_path / "both" / "scene").mkdir()
    with pytest.raises(FormatError, match=r"holds pictures and folders \(scene\)"):
        suite.read(tmp_path / "both")
    image(tmp_path / "twice" / "00" / "image.png")
    image(tmp_path / "twice" / "00" / "image.jpg")
    with pytest.raises(FormatError, match=r"image\.jpg and image.png are both its image"):
        suite.read(tmp_path / "twice")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not UTF-8"):
        suite.read(tmp_path / "bytes.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(FormatError, match="holds no prompt"):
        suite.read(tmp_path / "empty.txt")
