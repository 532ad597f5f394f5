"""Where a run writes, and the promise that nobody's files are lost to it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from quantwm_core.errors import FormatError, StateError
from quantwm_core.tensor_file import replaced
from quantwm_eval import resume

RESULTS = "results.jsonl"


def prepare(wanted: Path | None, default: str, overwrite: bool) -> Path:
    """Make the folder to write into.

    A folder that was not asked for by name never meets files: where ``default`` is taken, a number is appended. A folder
    that was asked for must be empty or new; with ``overwrite`` it may hold an earlier run of ``quantwm demo``, whose files
    are to be replaced when the new one has succeeded, everything else in it stays.

    Args:
        wanted: The folder asked for, or None.
        default: Name of the folder otherwise.
        overwrite: Whether an earlier run may be replaced.

    Raises:
        StateError: The folder holds something else, is a file or cannot be made or written; the message says what to do.
    """
    if wanted is None:
        wanted = next(
            path for number in count(1) if not _taken(path := Path(default if number == 1 else f"{default}-{number}"))
        )
    check_folder(wanted)
    if _taken(wanted):
        if not overwrite:
            raise StateError(
                f"--out {wanted}: is not empty; name another folder, or add --overwrite to replace an earlier run"
            )
        if not (wanted / RESULTS).is_file():
            raise StateError(
                f"--out {wanted}: holds no earlier run ({RESULTS}), so --overwrite does not apply; name another folder"
            )
        _check_demo(wanted)
    wanted.mkdir(parents=True, exist_ok=True)
    return wanted


def check_folder(out: Path) -> None:
    """Refuse to write into what is no folder, or one that cannot be made or written; nothing is left behind.

    Raises:
        StateError: So it is; the message says what to do.
    """
    with _said_of(out, "folder"):
        if (out.exists() or out.is_symlink()) and not out.is_dir():
            raise StateError(f"--out {out}: is {'a file' if out.exists() else 'a link to nothing'}; name a folder")
        meant = Path(os.path.realpath(out))
        there = next(folder for folder in (meant, *meant.parents) if folder.exists())
        with TemporaryDirectory(dir=there) as rehearsal:
            Path(rehearsal, meant.relative_to(there)).mkdir(parents=True, exist_ok=True)


def check_appendable(path: Path) -> None:
    """Refuse a file that is to be gone on with and cannot be written; one that is not there is none.

    Raises:
        StateError: It is a folder, or may not be written; the message says what to do.
    """
    with _said_of(path, "folder"):
        if path.exists():
            with path.open("ab"):
                pass


def check_file(out: Path, inputs: Iterable[Path], overwrite: bool) -> None:
    """Refuse to write a file over one that is read, whatever its name, or over another one unless told to.

    Args:
        out: The file asked for.
        inputs: Files that are read, each of which exists.
        overwrite: Whether another file that exists may be replaced.

    Raises:
        StateError: The file may not or cannot be written, or has no folder; the message says what to do.
    """
    with _said_of(out, "file"):
        there = out.exists()
        if there and any(out.samefile(path) for path in inputs):
            raise StateError(f"--out {out}: that is an input itself; name another file")
        if out.is_dir():
            raise StateError(f"--out {out}: is a folder; name a file")
        if there and not out.is_file():
            raise StateError(
                f"--out {out}: exists and is no regular file, which --out never replaces; name another file"
            )
        if not out.parent.is_dir():
            raise StateError(f"--out {out}: need a file in a folder that exists")
        if there and not overwrite:
            raise StateError(f"--out {out}: exists; name another file, or add --overwrite")
        with NamedTemporaryFile(dir=out.parent):  # whoever may do this may replace a file, too
            pass


def write(out: Path, text: str) -> str:
    """Write a file that :func:`check_file` let pass, as a whole or not at all.

    Returns:
        What is to be said where it could not be written after all; empty where it was.
    """
    try:
        with replaced(out) as file:
            file.write(text.encode())
    except OSError as error:
        return unwritable(out, error)
    return ""


def unwritable(out: Path, error: OSError, kind: str = "file") -> str:
    """What is said of a file or a folder that cannot be written.

    >>> unwritable(Path("scores.json"), OSError(28, "No space left on device"))
    '--out scores.json: cannot be written: No space left on device; name another file'
    """
    return f"--out {out}: cannot be written: {error.strerror or error}; name another {kind}"


@contextmanager
def _said_of(out: Path, kind: str) -> Iterator[None]:
    """What the system refuses, as a :class:`StateError`."""
    try:
        yield
    except OSError as error:
        raise StateError(unwritable(out, error, kind)) from error


def _check_demo(folder: Path) -> None:
    """Refuse to replace results that are not of ``quantwm demo``; a file without a line holds none."""
    path = folder / RESULTS
    if not path.stat().st_size:
        return
    try:
        found, _ = resume.read(path)
    except FormatError as error:
        raise StateError(f"--out {folder}: {error}; --overwrite does not apply, name another folder") from error
    if found.provenance.command.split()[:2] != ["quantwm", "demo"]:
        raise StateError(
            f"--out {folder}: {RESULTS} is of {found.provenance.command!r}, not of quantwm demo, so --overwrite does not "
            "apply; name another folder"
        )


def _taken(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))
