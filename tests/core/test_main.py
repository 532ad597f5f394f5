"""``python -m quantwm_core`` as its user meets it: files in, files out, messages, exit codes."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantwm_core import archive, load, method, methods, save
from quantwm_core.__main__ import main
from quantwm_core.archive import Dump
from quantwm_core.chunk import read_arrays, stored_nbytes, write_arrays
from tests.core import strategies
from tests.core.compare import assert_bits


def _arrays(layers: tuple[str, ...] = ("",), tokens: int = 40) -> dict[str, np.ndarray]:
    arrays = {}
    for number, prefix in enumerate(layers):
        for offset, name in enumerate(("keys", "values", "queries")):
            heads = 4 if name == "queries" else 2
            arrays[prefix + name] = strategies.unit(("channels",) * heads, 3 * number + offset, tokens, 32)
    return arrays


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A recording of one layer."""
    write_arrays(tmp_path / "run.v1.safetensors", _arrays())
    return tmp_path / "run.v1.safetensors"


def _run(*arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "quantwm_core", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_there_and_back_as_a_command(tmp_path: Path) -> None:
    write_arrays(tmp_path / "run.safetensors", _arrays(("layer.3.", "layer.12.")))
    done = _run("compress", "run.safetensors", "--chunk", 16, "--set", "rank=4", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run.qwm.safetensors: 6 chunks, ")
    layers, _ = load(tmp_path / "run.qwm.safetensors")
    assert list(layers) == [3, 12]
    assert [(sealed.start, sealed.stop) for sealed in layers[3]] == [(0, 16), (16, 32), (32, 40)]
    assert [sealed.keys.arrays.get("basis", np.zeros(0)).shape[-1:] for sealed in layers[12]] == [(0,), (4,), (4,)]

    done = _run("restore", "run.qwm.safetensors", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    restored, _ = read_arrays(tmp_path / "run.restored.safetensors")
    assert sorted(restored) == ["layer.12.keys", "layer.12.values", "layer.3.keys", "layer.3.values"]
    for number, chunks in layers.items():
        assert_bits("keys", restored[f"layer.{number}.keys"], archive.restore(chunks).keys)

    done = _run("inspect", "run.qwm.safetensors", "--json", folder=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["layer"], row["start"]) for row in rows] == [(3, 0), (3, 16), (3, 32), (12, 0), (12, 16), (12, 32)]
    assert sum(row["bytes"] for row in rows) == sum(sealed.nbytes for chunks in layers.values() for sealed in chunks)


def test_nothing_is_written_over_unless_told_to(dump: Path) -> None:
    for command in (("compress", dump, "--chunk", 16), ("restore", dump.with_name("run.v1.qwm.safetensors"))):
        given = [str(word) for word in command]
        assert main(given) == 0
        before = {path: path.read_bytes() for path in dump.parent.iterdir()}
        done = _run(*given)
        assert done.returncode == 2
        assert "add --overwrite" in done.stderr
        assert before == {path: path.read_bytes() for path in dump.parent.iterdir()}
        assert main([*given, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compress", "absent.safetensors", "--chunk", 4), "absent.safetensors"),
        (("compress", "text.txt", "--chunk", 4), "text.txt: truncated, or not a safetensors file"),
        (("compress", "run.v1.safetensors", "--chunk", 0), "chunk of 0 tokens: need at least 1"),
        (("compress", "run.v1.safetensors", "--chunk", 4, "--method", "qgv"), "did you mean 'qvg'?"),
        (("compress", "run.v1.safetensors", "--chunk", 4, "--set", "rang=4"), "no parameter 'rang'"),
        (
            ("compress", "run.v1.safetensors", "--chunk", 4, "--out", "no/x"),
            "no/x: the folder no is not there; make it first",
        ),
        (("inspect", "run.v1.safetensors"), "not a quantwm file"),
        (("restore", "absent.safetensors"), "absent.safetensors"),
        (("compress", "run.v1.safetensors"), "--chunk"),
    ],
)
def test_bad_input_ends_a_command_with_two_and_a_message(
    arguments: tuple[object, ...], message: str, dump: Path
) -> None:
    (dump.parent / "text.txt").write_text("keys and values\n")
    files = sorted(dump.parent.iterdir())
    done = _run(*arguments, folder=dump.parent)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(dump.parent.iterdir()) == files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chunk", "-3"], "chunk of -3 tokens"),
        (["--chunk", "4", "--chunks-per-seal", "0"], "chunks_per_seal 0"),
        (["--chunk", "4", "--keys", "bf61"], "unknown method 'bf61'; did you mean 'bf16'?"),
        (["--chunk", "4", "--values", "x"], "unknown method 'x'; known: bf16, kivi"),
        (["--chunk", "4", "--preset", "x"], "unknown preset 'x'; known: fast, paper, sharp"),
        (["--chunk", "4", "--set", "rank"], "--set rank: need NAME=VALUE"),
        (["--chunk", "4", "--set", "rank="], "rank '': need int"),
        (["--chunk", "4", "--set", "=4"], "no parameter ''"),
        (["--chunk", "4", "--set", "rank=four"], "rank 'four': need int"),
        (["--chunk", "4", "--set", "rank=1.5"], "rank 1.5: need int"),
        (["--chunk", "4", "--set", "rank=true"], "rank True: need int"),
        (["--chunk", "4", "--set", "rank=[4]"], "rank [4]: need int"),
        (["--chunk", "4", "--set", f"rank={'1' * 5000}"], "rank '111"),
        (["--chunk", "4", "--set", f"rank={'[' * 100_000}"], "rank '[[["),
        (["--chunk", "4", "--set", "rank=33"], "rank 33: need at most 32"),
        (["--chunk", "4", "--set", "centroids=0"], "0 centroids"),
        (["--chunk", "4", "--set", "threshold=NaN"], "threshold nan"),
        (["--chunk", "4", "--set", "group_size=12"], "group size 12"),
        (["--chunk", "4", "--set", "keys=bf16"], "use --keys"),
        (["--chunk", "4", "--set", "rank=3", "--set", "rank=4"], "--set rank: given more than once"),
        (["--chunk", "4", "--set", "group_size=4", "--set", "group-size=4"], "--set group_size: given more than once"),
        (["--chunk", "4", "--set", "chunks-per-seal=2"], "use --chunks-per-seal"),
        (["--chunk", "4", "--set", "decay=2"], "decay 2"),
        (["--chunk", "4", "--set", 'decay="x"'], "decay 'x'"),
        (["--chunk", "4", "--out", "absent/x"], "absent"),
        (["--chunk", "4", "--out", "."], "no regular file"),
    ],
)
def test_bad_options_are_explained(
    options: list[str],
    message: str,
    dump: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unchecked: None,
) -> None:
    monkeypatch.chdir(dump.parent)
    assert main(["compress", dump.name, *options]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("quantwm_core: ")
    assert output.out == ""
    assert list(dump.parent.iterdir()) == [dump]


def _bad_dumps() -> dict[str, dict[str, np.ndarray]]:
    good = _arrays()
    spoilt = good["keys"].copy()
    spoilt[0, 1, 21, 3] = np.nan
    return {
        "layer 0, chunk 5, keys: 1 of 256 values": {**good, "keys": spoilt},
        "array 'weight'": {**good, "weight": good["keys"]},
        "layer 0 lacks values": {"keys": good["keys"]},
        "the file holds no arrays": {},
        "layer 0, keys: got uint8": {**good, "keys": good["keys"].view(np.uint8)},
        "layer 0, values: got shape (2, 40, 32)": {**good, "values": good["values"][0]},
        "hold different tokens": {**good, "values": good["values"][:, :, :7]},
        "do not fit keys": {**good, "queries": good["queries"][:, :3]},
        "holds no element": {"keys": good["keys"][:, :, :0], "values": good["values"][:, :, :0]},
        "head dimension 30": {name: array[..., :30] for name, array in good.items()},
    }


@pytest.mark.parametrize("message", list(_bad_dumps()))
def test_a_bad_recording_is_explained(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_arrays(tmp_path / "bad.safetensors", _bad_dumps()[message])
    assert main(["compress", str(tmp_path / "bad.safetensors"), "--chunk", "4"]) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["bad.safetensors"]


def test_a_damaged_file_is_explained(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = dump.parent / "run.v1.qwm.safetensors"
    assert main(["compress", str(dump), "--chunk", "16"]) == 0
    arrays, metadata = read_arrays(target)
    del arrays["layer.0.chunk.1.keys.codes"]
    write_arrays(target, arrays, metadata)
    assert main(["restore", str(target)]) == 2
    assert "a unit sealed with quantwm lacks its array 'codes'" in capsys.readouterr().err
    assert main(["inspect", str(target)]) == 0
    target.write_bytes(target.read_bytes()[:-1])
    for command in ("restore", "inspect"):
        assert main([command, str(target)]) == 2
        assert "truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "foo"}, "unknown method 'foo'; known: bf16"),
        ({"parameters": {"rank": None}}, "a unit cannot have been sealed as it says: quantwm rank None: need int"),
        ({"shape": [1, 2, 16, 64]}, "a unit sealed with quantwm"),
    ],
)
def test_what_cannot_be_restored_is_named_with_its_file(
    change: dict[str, Any], message: str, dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = dump.parent / "run.v1.qwm.safetensors"
    assert main(["compress", str(dump), "--chunk", "16"]) == 0
    arrays, metadata = read_arrays(target)
    table = json.loads(metadata["chunks"])
    table[1]["keys"] |= change
    write_arrays(target, arrays, metadata | {"chunks": json.dumps(table)})
    assert main(["restore", str(target)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quantwm_core: {target}: layer 0: ")
    assert message in error


@pytest.mark.parametrize("name", methods.names())
def test_every_method_there_and_back(name: str, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(dump), "--method", name, "--chunk", "16"]) == 0
    target = dump.parent / "run.v1.qwm.safetensors"
    assert main(["restore", str(target), "--out", str(dump.parent / "back")]) == 0
    assert main(["inspect", str(target)]) == 0
    arrays, _ = read_arrays(dump)
    chunks = archive.compress(Dump(**arrays), method.scheme(name), 16)
    want = archive.restore(chunks)
    restored, _ = read_arrays(dump.parent / "back")
    assert_bits("keys", restored["layer.0.keys"], want.keys)
    assert_bits("values", restored["layer.0.values"], want.values)
    stored, shared = stored_nbytes(chunks)
    of_them = f" ({shared} shared by chunks)" if shared else ""
    assert (
        f"{len(chunks)} chunks, {stored + shared} bytes{of_them} for {want.keys.nbytes * 2} bytes of BF16"
        in capsys.readouterr().out
    )


def test_options_reach_the_scheme(dump: Path) -> None:
    out = dump.parent / "out.qwm.safetensors"
    options = [
        "--keys",
        "quantwm",
        "--values",
        "rtn",
        "--chunks-per-seal",
        "2",
        "--set",
        "rank=3",
        "--set",
        "metric=full",
    ]
    assert main(["compress", str(dump), "--chunk", "8", *options, "--set", "granularity=token", "--out", str(out)]) == 0
    (first, second, rest), _ = load(out)[0][0], None
    assert [(sealed.start, sealed.stop) for sealed in (first, second, rest)] == [(0, 16), (16, 32), (32, 40)]
    assert second.keys.parameters["rank"] == 3
    assert second.keys.parameters["metric"] == "full"
    assert second.values.parameters["granularity"] == "token"
    assert rest.keys.method == "bf16"


def test_two_recordings_of_similar_names_keep_their_own_files(tmp_path: Path) -> None:
    for name in ("run.v1.safetensors", "run.v2.safetensors", "dump"):
        write_arrays(tmp_path / name, _arrays())
        assert main(["compress", str(tmp_path / name), "--method", "bf16", "--chunk", "40"]) == 0
        assert (tmp_path / f"{name.removesuffix('.safetensors')}.qwm.safetensors").exists()


def test_a_file_without_chunks_is_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "none.qwm.safetensors", {})
    assert main(["inspect", str(tmp_path / "none.qwm.safetensors")]) == 0
    assert "0 chunks, 0 bytes" in capsys.readouterr().out


def test_help_names_the_methods(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["compress", "--help"])
    assert end.value.code == 0
    assert "bf16, kivi, klt, kvtc, oscar, quantwm, qvg, rtn" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["compress", "restore"])
def test_the_input_is_never_written_over(command: str, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = dump
    if command == "restore":
        file = dump.with_name("sealed.safetensors")
        assert main(["compress", str(dump), "--chunk", "8", "--out", str(file)]) == 0
    before = file.read_bytes()
    extra = ["--chunk", "8"] if command == "compress" else []
    assert main([command, str(file), *extra, "--out", str(file.parent / "." / file.name)]) == 2
    assert "the input itself" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", ["compress", "restore"])
@pytest.mark.parametrize("extra", [[], ["--overwrite"]])
def test_only_a_regular_file_is_ever_replaced(
    command: str, extra: list[str], dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed, folder = dump.with_name("sealed.safetensors"), dump.parent
    assert main(["compress", str(dump), "--chunk", "8", "--out", str(sealed)]) == 0
    given = [command, str(dump), "--chunk", "8"] if command == "compress" else [command, str(sealed)]
    other = folder / "other"
    other.write_bytes(b"mine")
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to(folder / "absent")
    (folder / "link").symlink_to(other)
    (folder / "folder").mkdir()
    for name in ("pipe", "dangling", "link", "folder"):
        before = (folder / name).lstat()
        assert main([*given, "--out", str(folder / name), *extra]) == 2
        assert "no regular file" in capsys.readouterr().err
        after = (folder / name).lstat()
        assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))
    assert other.read_bytes() == b"mine"
    assert not (folder / "absent").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder in which nobody makes files")
@pytest.mark.parametrize("command", ["compress", "restore"])
def test_what_cannot_be_written_is_told_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent.safetensors"  # which would be told if it were read
    chunk = ["--chunk", "8"] if command == "compress" else []
    assert main([command, str(absent), *chunk, "--out", "/proc/x"]) == 2
    assert "/proc/x: cannot be written: " in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error(dump: Path) -> None:
    assert main(["compress", str(dump), "--chunk", "8"]) == 0
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "quantwm_core", "inspect", dump.name.replace(".safetensors", ".qwm.safetensors")]
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False, cwd=dump.parent)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_input_is_known_by_any_name(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin = dump.with_name("twin.safetensors")
    twin.hardlink_to(dump)
    assert main(["compress", str(dump), "--chunk", "8", "--out", str(twin), "--overwrite"]) == 2
    assert "the input itself" in capsys.readouterr().err
