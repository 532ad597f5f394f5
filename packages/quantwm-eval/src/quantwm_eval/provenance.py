"""What a result was made with: command, versions, machine."""

from __future__ import annotations

import importlib
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

OWN = ("core", "kernels", "models", "eval")
"""The project's packages, which know their version also where they are not installed but imported from their folders."""
OTHERS = ("torch", "triton", "numpy", "scipy", "ml_dtypes", "opencv-python-headless", "av")
"""Packages that have a say in figures; those that are not installed have none."""


@dataclass(frozen=True)
class Provenance:
    """Where figures come from.

    Attributes:
        command: What was typed, quoted for a shell.
        date: UTC, ISO 8601, to the second.
        versions: Of Python and of every package that has a say in the figures.
        platform: System and processor architecture.
        cores: Processor cores of the machine.
        threads: Threads that torch computes with.
        device: What the model ran on: ``"cpu"``, or the GPU by its name.
    """

    command: str
    date: str
    versions: Mapping[str, str]
    platform: str
    cores: int
    threads: int
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def collect(arguments: Sequence[str], device: str = "cpu") -> Provenance:
    """Look around.

    Args:
        arguments: Of the ``quantwm`` command.
        device: What the model runs on, as torch calls it.

    >>> collect(["demo", "--out", "my folder"]).command
    "quantwm demo --out 'my folder'"
    """
    return Provenance(
        command=shlex.join(["quantwm", *arguments]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        platform=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    )


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
