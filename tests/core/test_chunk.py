import contextlib
import copy
import inspect
import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from safetensors import deserialize, safe_open

from quantwm_core import chunk, load, save, scheme
from quantwm_core.chunk import SealedChunk, SealedTensor, read_arrays, write_arrays
from quantwm_core.domain import BF16
from quantwm_core.errors import DtypeError, FormatError, ParameterError, QuantWMError, RangeError, ShapeError
from quantwm_core.method import decode
from tests.core import strategies
from tests.core.compare import assert_arrays, assert_bits

DTYPES = ("bfloat16", "float8_e4m3fn", "uint8", "int8", "int32", "int64", "float32", "float16")


def _sealed(name: str = "quantwm", tokens: int = 20, start: int = 0) -> SealedChunk:
    unit = strategies.unit(("normal", "channels"), start, tokens, 32)
    return scheme(name).seal(unit, unit[:, ::-1], strategies.moment(0, 2, 32), start=start)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two layers of two chunks."""
    target = tmp_path / "cache.qwm.safetensors"
    save(
        target, {0: [_sealed(), _sealed(start=20)], 11: [_sealed("kivi"), _sealed("rtn", start=20)]}, {"model": "demo"}
    )
    return target


def _parts(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    size = int(struct.unpack("<Q", blob[:8])[0])
    return json.loads(blob[8 : 8 + size]), blob[8 + size :]


def _joined(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _with_metadata(path: Path, **entries: str | None) -> None:
    """Change metadata entries of a file; None takes one out."""
    header, data = _parts(path.read_bytes())
    metadata = {**header.get("__metadata__", {}), **entries}
    header["__metadata__"] = {name: text for name, text in metadata.items() if text is not None}
    path.write_bytes(_joined(header, data))


def _with_table(path: Path, change: Any) -> None:
    """Apply ``change`` to the chunk table of a file; what it returns, if anything, takes the table's place."""
    header, _ = _parts(path.read_bytes())
    table = json.loads(header["__metadata__"]["chunks"])
    replaced = change(table)
    _with_metadata(path, chunks=json.dumps(table if replaced is None else replaced))


@settings(max_examples=15)
@given(data=st.data())
def test_any_arrays_survive_a_file(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    names = data.draw(st.lists(st.text('abc.ü"\\', min_size=1, max_size=6), max_size=4, unique=True))
    shapes = stn.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
    arrays = {}
    for name in names:
        dtype, shape = np.dtype(data.draw(st.sampled_from(DTYPES))), data.draw(shapes)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
        arrays[name] = raw.view(dtype).reshape(shape) if size else np.zeros(shape, dtype)
    metadata = data.draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
    path = tmp_path_factory.mktemp("arrays") / "any.safetensors"
    write_arrays(path, arrays, metadata)
    got, got_metadata = read_arrays(path)
    assert_arrays("arrays", got, arrays)
    assert got_metadata == metadata


def test_the_safetensors_library_reads_what_is_written(path: Path) -> None:
    arrays, metadata = read_arrays(path)
    with safe_open(path, "np") as file:
        assert file.metadata() == metadata
        assert sorted(file.keys()) == sorted(arrays)
        for name, array in arrays.items():
            if array.dtype.kind in "iuf" and array.dtype != ml_dtypes.float8_e4m3fn:
                assert_bits(name, file.get_tensor(name), array)
    for name, entry in deserialize(path.read_bytes()):
        assert bytes(entry["data"]) == arrays[name].tobytes()


def test_every_array_is_aligned_to_its_numbers(path: Path) -> None:
    header, _ = _parts(path.read_bytes())
    size = int.from_bytes(path.read_bytes()[:8], "little")
    assert size % 8 == 0
    widths = {"F32": 4, "I32": 4, "BF16": 2}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % widths.get(entry["dtype"], 1) == 0


def test_names_are_those_of_the_format(path: Path) -> None:
    arrays, metadata = read_arrays(path)
    assert metadata["format"] == "quantwm/1"
    assert "layer.0.chunk.1.keys.super_scale" in arrays
    assert "layer.11.chunk.0.values.minima" in arrays
    table = json.loads(metadata["chunks"])
    assert [(entry["layer"], entry["chunk"], entry["start"]) for entry in table] == [
        (0, 0, 0), (0, 1, 20), (11, 0, 0), (11, 1, 20),
    ]  # fmt: skip
    assert table[0]["keys"]["method"] == "quantwm"
    assert table[0]["keys"]["shape"] == [1, 2, 20, 32]


def test_the_same_chunks_give_the_same_file(tmp_path: Path) -> None:
    metadata = {f"name{i}": str(i) for i in range(8)}
    files = []
    for number in range(4):
        save(tmp_path / f"{number}", {0: [_sealed()], 1: [_sealed("kivi")]}, metadata)
        files.append((tmp_path / f"{number}").read_bytes())
    assert len(set(files)) == 1
    header, _ = _parts(files[0])  # in every process, that is, and not by the hashes of one
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])


def test_loaded_chunks_are_saved_as_the_same_file(path: Path, tmp_path: Path) -> None:
    layers, metadata = load(path)
    assert metadata == {"model": "demo"}
    save(tmp_path / "again", layers, metadata)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_strided_arrays_are_stored_by_value(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    write_arrays(tmp_path / "a", {"t": array.T, "r": array[::-2, ::3], "z": np.broadcast_to(array[0], (3, 6))})
    got, _ = read_arrays(tmp_path / "a")
    assert_arrays("strided", got, {"t": array.T, "r": array[::-2, ::3], "z": np.broadcast_to(array[0], (3, 6))})


def test_a_file_that_is_cut_anywhere_is_refused(path: Path) -> None:
    blob = path.read_bytes()
    rng = np.random.default_rng(0)
    for size in {0, 1, 7, 8, 9, 100, len(blob) - 1, *rng.integers(0, len(blob), 40).tolist()}:
        path.write_bytes(blob[:size])
        with pytest.raises(FormatError, match=r"cache\.qwm\.safetensors: truncated, or not a safetensors file"):
            load(path)
    path.write_bytes(blob + b"\0")
    with pytest.raises(FormatError):
        load(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one small chunk, in a folder where damaged copies of it may lie."""
    target = tmp_path_factory.mktemp("small") / "cache.qwm.safetensors"
    save(target, {0: [_sealed(tokens=5)]})
    return target


@settings(max_examples=150)
@given(place=st.integers(0, 10**6), difference=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_a_number(small: Path, place: int, difference: int) -> None:
    # There is no checksum, so a changed number is a changed number; but nothing else may happen than a typed error.
    blob, target = small.read_bytes(), small.with_name("damaged")
    position = place % min(len(blob), 3000)  # the header, for the most part
    target.write_bytes(blob[:position] + bytes([blob[position] ^ difference]) + blob[position + 1 :])
    with contextlib.suppress(QuantWMError):
        for chunks in load(target)[0].values():
            for sealed in chunks:
                decode(sealed)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\0" * 64, b"\xff" * 64, b"PK\x03\x04" + b"\0" * 40, b"\x08\0\0\0\0\0\0\0not json", b"[1, 2]" * 9],
)
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(FormatError, match="truncated, or not a safetensors file"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "metadata", [None, {}, {"format": "pt"}, {"format": "quantwm"}, {"format": "quantwm/x"}, {"format": "quantwm/²"}]
)
def test_a_foreign_safetensors_file_is_refused(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", {"weight": np.zeros(3, np.float32)}, metadata)
    with pytest.raises(FormatError, match=r"not a quantwm file .* 'compress' makes one"):
        load(tmp_path / "a")


def test_metadata_may_be_null(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(_joined({"__metadata__": None}, b""))
    with pytest.raises(FormatError):
        load(tmp_path / "a")


def test_a_number_format_that_no_chunk_uses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(_joined({"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8))
    with pytest.raises(
        FormatError, match=r"array 'x' has dtype F64; known: BF16, .*; convert it to one of these first"
    ):
        read_arrays(tmp_path / "a")


def test_a_newer_version_is_refused_with_what_to_do(path: Path) -> None:
    _with_metadata(path, format="quantwm/2")
    with pytest.raises(FormatError, match="format version 2, this release reads up to 1; upgrade quantwm"):
        load(path)


JUNK: tuple[Any, ...] = (None, 0.5, "0", [], {})


def _set(*keys: str | int, value: Any) -> Any:
    """A change of a table: the entry at ``keys`` becomes ``value``, or goes where that is ``...``."""

    def change(table: Any) -> None:
        *where, last = keys
        for key in where:
            table = table[key]
        if value is ...:
            del table[last]
        else:
            table[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(_set(0, name, value=...) for name in ("layer", "chunk", "start", "version", "keys", "values")),
        *(_set(0, "keys", name, value=...) for name in ("method", "parameters", "shape")),
        *(_set(0, "layer", value=value) for value in JUNK),
        *(_set(0, "start", value=value) for value in (None, "0", 1.5)),
        *(_set(0, "version", value=value) for value in (None, "1", 1.5)),
        *(_set(0, "keys", value=value) for value in JUNK),
        *(_set(0, "keys", "method", value=value) for value in (None, 3, ["quantwm"])),
        *(_set(0, "keys", "parameters", value=value) for value in (None, 3, ["rank"], "rank")),
        *(_set(0, "keys", "shared", value=value) for value in (None, 1, "x", ["shared_basis"], {"shared_basis": 0})),
        *(_set(0, "keys", "shape", value=value) for value in (None, 5, [], [1, 2, 20], "1234", [1, 2, 20, "32"])),
        *(_set(0, "keys", "shape", value=value) for value in ([1, 2, 20, 0], [1, 2, -20, 32], [1.0, 2, 20, 32])),
        _set(0, "keys", "shape", value=[1, 2, 21, 32]),
        _set(0, "chunk", value=7),
        _set(0, value=None),
        _set(0, value=5),
        lambda table: table.append(table[0]),
        lambda table: table.pop(),
        lambda _: {"layer": 0},
        lambda _: 5,
        lambda _: "text",
    ],
)
def test_a_damaged_chunk_table_is_refused(path: Path, change: Any) -> None:
    _with_table(path, change)
    with pytest.raises(FormatError, match=r"chunk table is damaged|arrays that no chunk names"):
        load(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(0, "start", value=...), "its entry 0 lacks 'start'"),
        (_set(0, value=5), "its entry 0 cannot be read: 'int' object"),
        (lambda table: table.append(table[0]), "its entry 4 lacks 'layer.0.chunk.0.keys"),
        (lambda _: 5, "it is int in JSON, no list"),
        (lambda _: {"layer": 0}, "it is dict in JSON, no list"),
    ],
)
def test_what_of_a_chunk_table_is_damaged_is_said(path: Path, change: Any, reason: str) -> None:
    _with_table(path, change)
    with pytest.raises(FormatError, match=f"chunk table is damaged: {reason}"):
        load(path)


@pytest.mark.parametrize("text", ["", "[", "nonsense", "[" * 100_000])
def test_a_chunk_table_that_is_no_json_is_refused(path: Path, text: str) -> None:
    _with_metadata(path, chunks=text)
    with pytest.raises(FormatError, match="chunk table is damaged: it is no JSON"):
        load(path)


def test_a_file_without_a_chunk_table_is_refused(path: Path) -> None:
    _with_metadata(path, chunks=None)
    with pytest.raises(FormatError, match="the chunk table is missing"):
        load(path)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("method",), "absent"),
        (("method",), "kivi"),
        (("parameters", "rank"), "eight"),
        (("parameters", "rang"), 8),
        (("parameters", "centroids"), -4),
        (("shape",), [1, 2, 20, 64]),
        (("shape",), [2, 1, 20, 32]),
    ],
)
def test_a_table_that_does_not_fit_its_arrays_is_refused_when_read(
    path: Path, keys: tuple[str, ...], value: Any
) -> None:
    _with_table(path, _set(0, "keys", *keys, value=value))
    with pytest.raises(QuantWMError):
        decode(load(path)[0][0][0])


def test_arrays_that_no_chunk_names_are_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", {"stray": np.zeros(3, np.uint8)}, {"format": "quantwm/1", "chunks": "[]"})
    with pytest.raises(FormatError, match=r"arrays that no chunk names: \['stray'\]"):
        load(tmp_path / "a")


def test_a_file_without_chunks_is_empty(tmp_path: Path) -> None:
    save(tmp_path / "a", {})
    assert load(tmp_path / "a") == ({}, {})


@pytest.mark.parametrize("key", ["format", "chunks"])
def test_reserved_metadata_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="reserved"):
        save(tmp_path / "a", {}, {key: "x"})
    assert not list(tmp_path.iterdir())


def _unchecked(value: Any, **changes: Any) -> Any:
    """A copy with other fields, past the annotations, which are enforced in these tests only."""
    changed = copy.copy(value)
    for name, field in changes.items():
        object.__setattr__(changed, name, field)
    return changed


@pytest.mark.parametrize(
    ("layer", "start", "metadata", "error", "told"),
    [
        ("a", 0, {}, ParameterError, "layer 'a': need a whole number"),
        (0.5, 0, {}, ParameterError, r"layer 0\.5: need a whole number"),
        (0, "x", {}, ParameterError, "start 'x': need a whole number"),
        (0, 1.5, {}, ParameterError, r"start 1\.5: need a whole number"),
        (0, 0, {"a": 3}, FormatError, "metadata 'a': 3: need text"),
        (0, 0, {3: "a"}, FormatError, "metadata 3: 'a': need text"),
    ],
)
def test_what_could_not_be_loaded_is_not_written(
    layer: Any, start: Any, metadata: Any, error: type[Exception], told: str, path: Path
) -> None:
    before = path.read_bytes()
    with pytest.raises(error, match=told):
        inspect.unwrap(save)(path, {layer: [_unchecked(_sealed(), start=start)]}, metadata)
    assert path.read_bytes() == before


def test_whole_numbers_of_numpy_are_whole_numbers(tmp_path: Path) -> None:
    sealed = _sealed()
    keys = _unchecked(sealed.keys, shape=tuple(map(np.int64, sealed.keys.shape)))
    wide = _unchecked(sealed, start=np.int64(0), keys=keys)
    save(tmp_path / "plain", {3: [sealed]})
    layer: Any = np.int64(3)
    inspect.unwrap(save)(tmp_path / "wide", {layer: [wide]})
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "wide").read_bytes()


def test_an_array_that_no_file_can_hold_is_named(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(DtypeError, match="array 'x': got float64, files hold BF16, F8_E4M3"):
        write_arrays(path, {"x": np.zeros(3)})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


class _FullDisk:
    """A file whose disk is full after some bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> "_FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return int(self.file.write(data))


@pytest.mark.parametrize("room", [0, 5000])
def test_a_write_that_fails_leaves_the_old_file(path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, opened = path.read_bytes(), Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode: _FullDisk(opened(self, mode), room))
    with pytest.raises(OSError, match="No space left"):
        save(path, {0: [_sealed(tokens=200)]})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_replacement_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PermissionError):
        save(path, {})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        save(tmp_path / "absent" / "a", {})
    with pytest.raises(OSError, match="absent"):
        load(tmp_path / "absent")


def test_a_path_may_be_text(tmp_path: Path) -> None:
    save(str(tmp_path / "a"), {2: [_sealed()]})
    assert list(load(os.fspath(tmp_path / "a"))[0]) == [2]


def test_bytes_are_counted_over_arrays() -> None:
    sealed = _sealed()
    arrays = [*sealed.keys.arrays.values(), *sealed.values.arrays.values()]
    assert sealed.nbytes == sum(array.nbytes for array in arrays)
    assert sealed.bf16_nbytes == 2 * 2 * (2 * 20 * 32)


def test_keys_and_values_hold_the_same_tokens() -> None:
    with pytest.raises(ShapeError, match="hold different tokens"):
        SealedChunk(_sealed(tokens=20).keys, _sealed(tokens=21).values)


def test_token_ranges() -> None:
    tensor = SealedTensor("bf16", {}, (1, 1, 5, 4), {"exact": np.zeros((1, 1, 5, 4), BF16)})
    assert tensor.token_range(1, None) == (1, 5)
    assert tensor.token_range(5, 5) == (5, 5)
    for start, stop in ((-1, 2), (3, 2), (0, 6), (6, None)):
        with pytest.raises(RangeError, match="need 0 <= start <= stop <= 5"):
            tensor.token_range(start, stop)


def test_the_format_version_is_one() -> None:
    assert chunk.FORMAT_VERSION == 1
