"""A lock on an open file, which goes when the file is closed or its process ends, however it does.

POSIX systems and Windows have different calls for it; each is in a module that the other does not have.
"""

from __future__ import annotations

import errno
import importlib
import os
from types import ModuleType

FAR = 2**30
"""Byte that is locked on Windows, where nobody else can read what is: they must still read whose the file is."""
REMOVED_OPEN = os.name == "posix"
"""Whether a file can be removed while it is open; elsewhere one that somebody has opened stays."""


def lock(descriptor: int) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError: It is locked already, through another opening of it.
        OSError: It cannot be; with ``ENOSYS``, ``ENOTSUP`` or ``ENOLCK`` the system or its file system has no locks.
    """
    if posix := _module("fcntl"):
        posix.flock(descriptor, posix.LOCK_EX | posix.LOCK_NB)
    elif windows := _module("msvcrt"):
        try:
            _at_far(windows, descriptor, windows.LK_NBLCK)
        except PermissionError as error:  # what it says of a byte that is locked
            raise BlockingIOError(errno.EWOULDBLOCK, "is locked already") from error
    else:
        raise OSError(errno.ENOSYS, "this system has no locks")


def unlock(descriptor: int) -> None:
    """Release what :func:`lock` locked, now: Windows may take its time when the file is closed."""
    if not _module("fcntl") and (windows := _module("msvcrt")):
        _at_far(windows, descriptor, windows.LK_UNLCK)


def _at_far(windows: ModuleType, descriptor: int, mode: int) -> None:
    """Lock or unlock the byte, which need not be there, and stay where the file was read or written."""
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, FAR, os.SEEK_SET)
    try:
        windows.locking(descriptor, mode, 1)
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
