import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantwm_core import tensor_file
from quantwm_core.errors import DtypeError, FormatError
from quantwm_core.tensor_file import make_header, read_header, replaced


def test_places_are_those_of_the_bytes(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "b": np.arange(5, dtype=np.uint8),
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    }
    text, order = make_header({name: (array.dtype, array.shape) for name, array in arrays.items()}, {"x": "y"})
    with replaced(tmp_path / "file") as file:
        file.write(text + b"".join(arrays[name].tobytes() for name in order))
    places, metadata = read_header(tmp_path / "file")
    blob = (tmp_path / "file").read_bytes()
    assert metadata == {"x": "y"}
    assert list(places) == ["a", "b"]
    for name, place in places.items():
        assert blob[place.start : place.stop] == arrays[name].tobytes()
        assert (place.dtype, place.shape) == (arrays[name].dtype, arrays[name].shape)


def test_what_no_reader_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {f"array {number}": (np.dtype(np.uint8), (1,)) for number in range(100)}
    monkeypatch.setattr(tensor_file, "LARGEST_HEADER", 4096)
    with pytest.raises(FormatError, match=r"100 arrays need a header of \d+ bytes, readers take 4096; save fewer"):
        make_header(kinds)
    with pytest.raises(DtypeError, match="array 'x': got float64, files hold BF16"):
        make_header({"x": (np.dtype(np.float64), (1,))})


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    for call in (read_header, lambda path: replaced(path).__enter__()):
        with pytest.raises(FormatError, match="is a folder; name a file in it"):
            call(tmp_path)


def test_a_device_or_a_pipe_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FormatError, match="exists and is no regular file"):
        replaced(pipe).__enter__()
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names what is open by Linux's /proc")
@pytest.mark.parametrize("kind", ["pipe", "file that was removed"])
def test_what_is_open_without_a_name_is_no_file(kind: str, tmp_path: Path) -> None:
    opened = [*os.pipe()] if kind == "pipe" else [os.open(tmp_path / "gone", os.O_CREAT | os.O_WRONLY)]
    (tmp_path / "gone").unlink(missing_ok=True)
    link = tmp_path / "link"
    link.symlink_to(f"/proc/self/fd/{opened[-1]}")
    try:
        for path in (link, f"/proc/self/fd/{opened[-1]}"):
            with pytest.raises(FormatError, match=f"^{path}: exists and is no regular file that has a name"):
                replaced(path).__enter__()
    finally:
        for number in opened:
            os.close(number)
    assert list(tmp_path.iterdir()) == [link]


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    target.write_bytes(b"before")
    link.symlink_to(target)
    with replaced(link) as file:
        file.write(b"after")
    assert link.is_symlink()
    assert target.read_bytes() == b"after"
    assert list(target.parent.iterdir()) == [target]


def test_a_file_in_no_folder_is_refused_by_the_name_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    for folder in ("absent", "file"):
        with pytest.raises(FileNotFoundError, match="its folder is not there; make it first") as caught:
            replaced(tmp_path / folder / "x").__enter__()
        assert caught.value.filename == str(tmp_path / folder)
        assert "partial" not in str(caught.value)
    assert (tmp_path / "file").read_bytes() == b"before"


def _failing(*_: object) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("owner_and_name", [(os, "fsync"), (Path, "replace")])
def test_a_file_that_does_not_become_whole_replaces_nothing(
    owner_and_name: tuple[object, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"before")
    monkeypatch.setattr(*owner_and_name, _failing)
    with pytest.raises(OSError, match="no space left"), replaced(target) as file:
        file.write(b"after")
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]


def test_it_is_on_the_disk_before_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def told(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            done.append(name)
            return real(*args)

        return call

    monkeypatch.setattr(os, "fsync", told("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", told("replace", Path.replace))
    with replaced(tmp_path / "file") as file:
        file.write(b"x")
    assert done == ["fsync", "replace", "fsync"]
