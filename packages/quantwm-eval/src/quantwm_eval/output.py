"""Where a run writes, and the promise that nobody's files are lost to it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile

from quantwm_core.errors import FormatError, StateError
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
        StateError: The folder holds something else, or is a file; the message says what to do.
        OSError: It cannot be made.
    """
    if wanted is None:
        wanted = next(
            path for number in count(1) if not _taken(path := Path(default if number == 1 else f"{default}-{number}"))
        )
    if wanted.exists() and not wanted.is_dir():
        raise StateError(f"--out {wanted}: is a file; name a folder")
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


def check_file(out: Path, inputs: Iterable[Path], overwrite: bool) -> None:
    """Refuse to write a file over one that is read, whatever its name, or over another one unless told to.

    Args:
        out: The file asked for.
        inputs: Files that are read, each of which exists.
        overwrite: Whether another file that exists may be replaced.

    Raises:
        StateError: The file may not or cannot be written, or has no folder; the message says what to do.
    """
    try:
        there = out.exists()
        if there and any(out.samefile(path) for path in inputs):
            raise StateError(f"--out {out}: that is an input itself; name another file")
        if there and not overwrite:
            raise StateError(f"--out {out}: exists; name another file, or add --overwrite")
        if there != out.is_file() or not out.parent.is_dir():  # a device is none
            raise StateError(f"--out {out}: need a file in a folder that exists")
        with NamedTemporaryFile(dir=out.parent):  # whoever may do this may replace a file, too
            pass
    except OSError as error:
        raise StateError(unwritable(out, error)) from error


def unwritable(out: Path, error: OSError) -> str:
    """What is said of a file that cannot be written.

    >>> unwritable(Path("scores.json"), OSError(28, "No space left on device"))
    '--out scores.json: cannot be written: No space left on device; name another file'
    """
    return f"--out {out}: cannot be written: {error.strerror or error}; name another file"


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
