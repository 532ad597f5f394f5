"""The bytes of a safetensors file: a header that says where each array lies, and a file that is replaced only when whole.

Whoever writes goes through the arrays one after the other, so that no second copy of all of them is ever held.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16, E4M3
from quantwm_core.errors import DtypeError, FormatError

DTYPES = {
    "BF16": BF16, "F8_E4M3": E4M3, "U8": np.dtype("uint8"), "I8": np.dtype("int8"), "I32": np.dtype("int32"),
    "I64": np.dtype("int64"), "F32": np.dtype("float32"), "F16": np.dtype("float16"),
}  # fmt: skip
"""Number formats that files hold, by their names there."""
LARGEST_HEADER = 100_000_000
"""Bytes of the largest header that the safetensors library reads."""
_HEADER_ALIGNMENT = 8


class Place(NamedTuple):
    """An array in a file: its number format and shape, and the bytes ``start`` to ``stop`` of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def make_header(
    arrays: Mapping[str, tuple[np.dtype[Any], Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """What stands before the arrays, and the order in which they follow.

    Arrays and metadata stand in a fixed order (the safetensors library writes metadata in a random one): those of wider
    numbers first, which keeps every array aligned.

    Args:
        arrays: Number format and shape by name.
        metadata: Text entries.

    Raises:
        DtypeError: An array has a number format that the files do not know.
        FormatError: There are so many arrays that no reader would take the header.

    >>> text, order = make_header({"a": (np.dtype("uint8"), (3,)), "b": (np.dtype("float32"), (2, 2))})
    >>> order, len(text) % 8
    (('b', 'a'), 0)
    """
    order = tuple(sorted(arrays, key=lambda name: (-arrays[name][0].itemsize, name)))
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = arrays[name]
        known = [text for text, each in DTYPES.items() if each == dtype]
        if not known:
            raise DtypeError(f"array {name!r}: got {dtype}, files hold {', '.join(DTYPES)}")
        begin, end = end, end + dtype.itemsize * prod(shape)
        entries[name] = {"dtype": known[0], "shape": list(shape), "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    if len(text) > LARGEST_HEADER:
        raise FormatError(
            f"{len(arrays)} arrays need a header of {len(text)} bytes, readers take {LARGEST_HEADER}; save fewer in a file"
        )
    return len(text).to_bytes(8, "little") + text, order


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, Place], dict[str, str]]:
    """Where every array of a safetensors file lies, by name in alphabetical order, and the metadata.

    Raises:
        FormatError: The file is truncated or no safetensors file, or holds a number format that none of ours has.
        OSError: The file cannot be read.
    """
    if Path(path).is_dir():
        raise FormatError(f"{path}: is a folder; name a file in it")
    try:
        with safe_open(
            path, "np"
        ):  # the library is the judge of headers, and of whether the file is as long as it says
            pass
    except SafetensorError as error:
        raise FormatError(f"{path}: truncated, or not a safetensors file ({error})") from error
    with Path(path).open("rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
        begin = file.tell()
    entries = json.loads(text)
    metadata = entries.pop("__metadata__", None) or {}
    places = {}
    for name, entry in sorted(entries.items()):
        if entry["dtype"] not in DTYPES:
            raise FormatError(
                f"{path}: array {name!r} has dtype {entry['dtype']}; known: {', '.join(DTYPES)}; convert it to one of these first"
            )
        start, stop = (begin + offset for offset in entry["data_offsets"])
        places[name] = Place(DTYPES[entry["dtype"]], tuple(entry["shape"]), start, stop)
    return places, {str(key): str(value) for key, value in metadata.items()}


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file to be written, which takes the place of ``path`` only when it is whole and on the disk.

    Whatever happens before, a file that was there stays as it was. Of a link it is the file that the link names. A process
    that is killed may leave the unfinished file beside it, whose name begins with a dot and ends in ``.partial``.

    Raises:
        FormatError: ``path`` is a folder, or a device, a pipe or a socket, in whose place a file would be; or it names what is
            open in a process (``/dev/stdout``) and lies in no folder.
        OSError: The folder is not there, or cannot be written.
    """
    given, target = Path(path), Path(os.path.realpath(path))
    if given.is_dir():
        raise FormatError(f"{path}: is a folder; name a file in it")
    # The path of an open pipe or of a removed file exists; what it resolves to does not.
    if given.exists() and not target.is_file():
        raise FormatError(
            f"{path}: exists and is no regular file that has a name, in whose place another could be; name another"
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"{path}: its folder is not there; make it first", str(target.parent))
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


explain_errors(globals())
