"""Locks where there is no ``fcntl``: all can be imported, and one run at a time writes into a folder."""

import errno
import importlib
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantwm_core.errors import StateError
from quantwm_eval import file_lock, ownership

fcntl = pytest.importorskip("fcntl")  # by which the other kind of lock is played

IMPORTED = """
import importlib, pkgutil, sys
import torch, av, jinja2, matplotlib.pyplot, PIL, tqdm  # what others import is theirs
sys.modules["fcntl"] = None
import quantwm_eval
names = [name for _, name, _ in pkgutil.walk_packages(quantwm_eval.__path__, "quantwm_eval.") if "__main__" not in name]
assert "quantwm_eval.ownership" in names
for name in names:
    importlib.import_module(name)
"""


def test_every_module_can_be_imported_without_fcntl() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def locking(descriptor: int, mode: int, count: int) -> None:
    """As ``msvcrt.locking``: bytes from where the file stands, one process or several, refused as a permission."""
    kind = {0: fcntl.F_UNLCK, 2: fcntl.F_WRLCK}[mode]
    region = struct.pack("hhqqi4x", kind, 1, 0, count, 0)  # 1: from where the file stands
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, region)
    except BlockingIOError as error:
        raise PermissionError(errno.EACCES, "Permission denied") from error


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Windows has for locks, on the locks of open files that Linux has."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        pytest.skip("needs locks of open files")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_UNLCK=0, LK_NBLCK=2))
    monkeypatch.setattr(file_lock, "REMOVED_OPEN", False)
    with pytest.raises(ImportError):
        importlib.import_module("fcntl")


def test_one_run_at_a_time_without_fcntl(tmp_path: Path, windows: None) -> None:
    with ownership.owned(tmp_path):
        with pytest.raises(StateError, match=r"process \d+ on .* writes into it"), ownership.owned(tmp_path):
            pytest.fail("two runs own one folder")
        assert (tmp_path / ownership.LOCK).exists()
    assert not (tmp_path / ownership.LOCK).exists()
    (tmp_path / ownership.LOCK).write_text("process 1, killed")
    with ownership.owned(tmp_path):
        assert (tmp_path / ownership.LOCK).read_text().startswith("process ")
        assert "killed" not in (tmp_path / ownership.LOCK).read_text()


def test_a_lock_file_that_the_next_run_holds_stays(
    tmp_path: Path, windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "is used by another process")

    with monkeypatch.context() as patch, ownership.owned(tmp_path):
        patch.setattr(Path, "unlink", refuse)
    assert (tmp_path / ownership.LOCK).exists()
    with ownership.owned(tmp_path):
        pass


def test_a_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fcntl", "msvcrt"):
        monkeypatch.setitem(sys.modules, name, None)
    with ownership.owned(tmp_path), ownership.owned(tmp_path):
        pass
