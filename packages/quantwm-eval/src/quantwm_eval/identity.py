"""What a host was made from, told from anything else by content: paths do not count, another machine has others.

==========  ==========================================================================================================
part        what is recorded of it
==========  ==========================================================================================================
checkout    ``commit:`` and the whole commit where git tracks the folder. A ``+`` and the digest of its code follow where
            tracked files were changed; the digest stands alone where git tracks nothing there, or is not installed.
weights     ``pieces:``, SHA-256 over the size of each file and :data:`PIECES` pieces of it, :data:`PIECE` bytes each, at even
            distances: a file of up to 4 MiB is read whole, of one of tens of GB 4 MiB are. A changed tensor is noticed if
            it takes a 1024th of its file or more; to read all of it would take as long as to load the host.
inputs      ``sha256:``, of all that is there.
config      ``sha256:``, of the file.
size        As it was typed.
==========  ==========================================================================================================

The digest of a file is of its content alone; that of a folder is of every file's name in it and content, hidden ones left
out. What is no path of this machine, such as the name of a repository of weights, is recorded as it was typed. What a host
reads beside these is not known here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeAlias

from quantwm_core.errors import ParameterError
from quantwm_eval.hosts import Setup
from quantwm_eval.output import RESULTS
from quantwm_eval.provenance import commit_of

PIECES, PIECE = 1024, 4096
CODE = frozenset({".json", ".py", ".yaml", ".yml"})
"""What of a checkout decides what it does: code, and the configurations that it comes with; not folders of results in it."""

Read: TypeAlias = Callable[[Path], str]
"""From a file to a digest of it, in hexadecimal digits."""


def identify(setup: Setup) -> dict[str, str]:
    """Say what a host is made from, by part; parts that are not given are not there.

    Args:
        setup: What it is made from. Its device, scenes, frames and batch are told elsewhere in a results file.

    Raises:
        OSError: A file cannot be read.

    >>> identify(Setup(size="480p"))
    {'size': '480p'}
    """
    given = {
        "checkout": (setup.checkout, _checkout),
        "weights": (setup.weights, lambda path: f"pieces:{_digest(path, _pieces)}"),
        "inputs": (setup.inputs, _whole),
        "config": (_config(setup), _whole),
    }
    found = {
        part: told(path) if path.is_file() or path.is_dir() else str(path)
        for part, (path, told) in given.items()
        if path is not None
    }
    return found | ({"size": setup.size} if setup.size else {})


def check_apart(setup: Setup, folder: Path) -> None:
    """Refuse to write into what a host is made from, which the first result would change.

    Args:
        setup: What it is made from.
        folder: Where results go; where it lies in a checkout it does not count as code.

    Raises:
        ParameterError: All of a folder counts, and this one is in it.
    """
    for part in ("weights", "inputs"):
        path: Path | None = getattr(setup, part)
        if path is not None and folder.resolve().is_relative_to(path.resolve()):
            raise ParameterError(
                f"--out {folder}: lies in --{part} {path}, of which all counts when the run goes on; name a folder elsewhere"
            )


def _config(setup: Setup) -> Path | None:
    """Where a configuration is: a file of the checkout, or else any path."""
    if setup.config is None or setup.checkout is None:
        return setup.config
    inside = setup.checkout / setup.config
    return inside if inside.is_file() else setup.config


def _checkout(path: Path) -> str:
    known = commit_of(path, digits=40)
    commit = f"commit:{known}" if known else ""
    if commit and not commit.endswith("+"):
        return commit
    return f"{commit} sha256:{_digest(path, _content, CODE)}".lstrip()


def _whole(path: Path) -> str:
    return f"sha256:{_digest(path, _content)}"


def _digest(path: Path, read: Read, suffixes: Collection[str] = ()) -> str:
    """Digest of a file, or of the files of a folder, all of them or those of some suffixes."""
    if path.is_file():
        return read(path)
    listed = [
        (file.relative_to(path).as_posix(), read(file))
        for file in _files(path, without=RESULTS if suffixes else "")
        if not suffixes or file.suffix.lower() in suffixes
    ]
    return hashlib.sha256(json.dumps(sorted(listed)).encode()).hexdigest()


def _files(folder: Path, above: frozenset[Path] = frozenset(), without: str = "") -> Iterator[Path]:
    """Files of a folder and of those in it, but for folders with a file ``without``; links are followed, but not in circles."""
    here = folder.resolve()
    for entry in () if here in above or (without and (folder / without).is_file()) else folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(entry, above | {here}, without)
        elif entry.is_file():
            yield entry


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pieces(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, max(PIECE, -(-size // PIECES))):
            file.seek(start)
            digest.update(file.read(PIECE))
    return digest.hexdigest()
