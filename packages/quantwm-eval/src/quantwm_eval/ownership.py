"""One run at a time in a folder: two that write one results file would lose each other's cells."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from quantwm_core.errors import StateError
from quantwm_eval import file_lock

LOCK = ".quantwm.lock"
"""File that a run holds locked while it writes beside it, and removes at its end."""
_NOT_OFFERED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keep every other run out of a folder for as long as this one writes into it.

    The system releases the lock when the process ends, however it does: a file that a killed run left behind keeps nobody
    out. On a system or a file system that offers no locks nobody is kept out.

    Args:
        folder: An existing folder.

    Raises:
        StateError: Another run writes into it, and the message names its process and machine; or it cannot be written.
    """
    path = folder / LOCK
    try:
        file = _locked(path)
    except OSError as error:
        raise StateError(
            f"{path}: cannot be written: {error.strerror or error}; remove it, or name another folder"
        ) from error
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
    finally:
        _release(file, path)


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


def _locked(path: Path) -> TextIO:
    """A folder's lock file, locked and still there, or as it is where there are no locks."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            file_lock.lock(file.fileno())
            check_own(file, path)
        except BlockingIOError:
            with file:
                file.seek(0)
                owner = file.read() or "another run"
            raise StateError(
                f"{path.parent}: {owner} writes into it; wait until it has ended, or name another folder"
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


def _release(file: TextIO, path: Path) -> None:
    """Remove a lock file and let go of it, in the order that never removes the next run's."""
    if file_lock.REMOVED_OPEN:
        path.unlink(missing_ok=True)
        file.close()
        return
    file_lock.unlock(file.fileno())
    file.close()
    with suppress(PermissionError):  # the next run has opened it already
        path.unlink(missing_ok=True)
