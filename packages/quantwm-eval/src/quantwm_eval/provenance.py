"""What a result was made with: command, versions, commit, machine."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

OWN = ("core", "kernels", "models", "eval")
"""The project's packages, which know their version also where they are not installed but imported from their folders."""
OTHERS = ("torch", "triton", "numpy", "scipy", "ml_dtypes", "opencv-python-headless", "av")
"""Packages that have a say in figures; those that are not installed have none."""
ALWAYS = frozenset({"python", *(f"quantwm-{name}" for name in OWN), *OTHERS})
"""What is stated whatever was measured; where it is not, it was not installed."""


@dataclass(frozen=True)
class Provenance:
    """Where figures come from.

    Attributes:
        command: What was typed, quoted for a shell.
        date: UTC, ISO 8601, to the second.
        versions: Of Python and of every package that has a say in the figures, those included that register a method, a
            metric or the host.
        platform: System and processor architecture.
        cores: Processor cores of the machine.
        threads: Threads that torch computes with.
        device: What the model ran on: ``"cpu"``, or the GPU by its name.
        commit: As :func:`commit` says; empty in early files.
        host: What the host was made from, by part, as :func:`quantwm_eval.identity.identify` says; None where that is not
            known, as in early files.
    """

    command: str
    date: str
    versions: Mapping[str, str]
    platform: str
    cores: int
    threads: int
    device: str = "cpu"
    commit: str = ""
    host: Mapping[str, str] | None = None

    @property
    def stated(self) -> dict[str, str]:
        """What pages say by name: versions, the commit if it is known, and what the host was made from."""
        commit = {"commit": self.commit} if self.commit else {}
        return {**self.versions, **commit, **{f"--{part}": short(told) for part, told in (self.host or {}).items()}}

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not known of the host is not there."""
        plain = asdict(self)
        return plain if self.host is not None else {name: value for name, value in plain.items() if name != "host"}


def short(told: str) -> str:
    """The same with the first twelve digits of each digest and commit, which are enough to tell two apart by eye.

    >>> short(f"commit:{'0123456789' * 4}+")
    'commit:012345678901+'
    """
    return re.sub(r"[0-9a-f]{40,}", lambda digits: digits[0][:12], told)


def collect(
    arguments: Sequence[str],
    device: str = "cpu",
    registered: Mapping[str, str] | None = None,
    host: Mapping[str, str] | None = None,
) -> Provenance:
    """Look around.

    Args:
        arguments: Of the ``quantwm`` command.
        device: What the model runs on, as torch calls it.
        registered: Versions of other distributions whose methods, metrics or host are used.
        host: What it was made from, if anybody knows.

    >>> collect(["demo", "--out", "my folder"]).command
    "quantwm demo --out 'my folder'"
    """
    return Provenance(
        command=shlex.join(["quantwm", *arguments]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions() | dict(registered or {}),
        platform=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        commit=commit(),
        host=host,
    )


def commit() -> str:
    """Commit of the checkout that this package is imported from, with a ``+`` where tracked files were changed since; else empty.

    The ``+`` does not say how they were changed: two trees that were changed in different ways are both ``abc1234+`` and count
    as one commit. Figures that are to be told apart by it are measured on committed files.

    >>> set(commit()) <= set("0123456789abcdef+")
    True
    """
    here = Path(__file__)
    return commit_of(here.parent, here.name)


def commit_of(folder: Path, name: str = ".", digits: int = 7) -> str:
    """Commit of the checkout that tracks something of a folder, with a ``+`` where tracked files were changed; else empty.

    Args:
        folder: It, which may lie in a checkout of something else.
        name: What must be tracked there.
        digits: Of the commit, or more where so many do not tell it from others.
    """
    git = shutil.which("git")
    if git is None:
        return ""

    def said(*arguments: str) -> str:
        made = subprocess.run([git, "-C", str(folder), *arguments], capture_output=True, text=True, check=False)  # noqa: S603 - fixed commands
        return made.stdout.strip()

    if not said("ls-files", name):
        return ""
    return said("describe", "--always", "--dirty=+", "--exclude=*", f"--abbrev={digits}")


def versions() -> dict[str, str]:
    """Versions of Python and of every package that has a say in the figures.

    >>> "quantwm-core" in versions()
    True
    """
    own = {f"quantwm-{name}": str(importlib.import_module(f"quantwm_{name}").__version__) for name in OWN}
    return {"python": platform.python_version()} | own | dict(_installed())


def _installed() -> Iterator[tuple[str, str]]:
    for name in OTHERS:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
