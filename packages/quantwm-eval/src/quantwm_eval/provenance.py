"""What a result was made with: command, versions, machine."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

PACKAGES = (
    "quantwm-core",
    "quantwm-kernels",
    "quantwm-models",
    "quantwm-eval",
    "torch",
    "numpy",
    "scipy",
    "ml_dtypes",
    "av",
)


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
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        platform=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    )
