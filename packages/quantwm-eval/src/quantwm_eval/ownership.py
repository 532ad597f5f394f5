"""One run at a time in a folder: two that write one results file would lose each other's cells."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from quantwm_core.errors import StateError

LOCK = ".quantwm.lock"
"""File that a run holds locked while it writes beside it, and removes at its end."""
_NOT_OFFERED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keep every other run out of a folder for as long as this one writes into it.

    The system releases the lock when the process ends, however it does: a file that a killed run left behind keeps nobody
    out. On a file system that offers no locks nobody is kept out.

    Args:
        folder: An existing folder.

    Raises:
        StateError: Another run writes into it; the message names its process and machine.
        OSError: The folder cannot be written.
    """
    file = _locked(folder)
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # before the lock is released: after, it may be the next run's
        file.close()


def check_own(file: TextIO, path: Path) -> None:
    """Make sure that what is written to an open file arrives at its path.

    Raises:
        StateError: The path was removed, or is another file by now.
    """
    try:
        here = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        here = False
    if not here:
        raise StateError(
            f"{path}: was removed or replaced while this run wrote to it, and its cells with it; see that no other run "
            "writes there, and start again"
        )


def _locked(folder: Path) -> TextIO:
    """The folder's lock file, locked and still there."""
    while True:
        file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            check_own(file, folder / LOCK)
        except BlockingIOError:
            with file:
                file.seek(0)
                owner = file.read() or "another run"
            raise StateError(
                f"{folder}: {owner} writes into it; wait until it has ended, or name another folder"
            ) from None
        except StateError:  # the run before removed it between our opening and our locking
            file.close()
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                file.close()
                raise
            return file
        else:
            return file
