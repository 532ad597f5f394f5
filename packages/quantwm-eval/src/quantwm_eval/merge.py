"""Results files of one experiment, measured in parts, as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantwm_core.errors import StateError
from quantwm_eval import resume
from quantwm_eval.results import Key, Results

PARTS = ("methods", "scenes", "seeds")
"""What files may differ in."""


def load(paths: Sequence[Path]) -> Results:
    """Read and join results files whose experiments differ in methods, scenes and seeds only.

    The last line of a file may be cut off. Provenance is the first file's, with the commands of all and the
    versions of all distributions whose methods they use; what the host was made from is known where all files say it.

    Raises:
        StateError: The experiments, hosts or versions do not fit, or two files hold one cell; the message says what.
        FormatError, OSError: A file cannot be read.
    """
    found = [resume.read(path)[0] for path in paths]
    first = found[0]
    owner: dict[Key, Path] = {}
    for number, (path, one) in enumerate(zip(paths, found, strict=True)):
        for before in range(number):  # not the first alone, which may not say all that others do
            if unlike := _unlike(one, found[before]):
                raise StateError(f"{path} does not fit {paths[before]}: {'; '.join(unlike)}; report them apart")
        for cell in one.cells:
            if cell.key in owner:
                raise StateError(f"{path} and {owner[cell.key]} both hold the cell {' '.join(map(str, cell.key))}")
            owner[cell.key] = path
    experiment = dataclasses.replace(
        first.experiment,
        methods=_union([one.experiment.methods for one in found]),
        scenes=_union([one.experiment.scenes for one in found]),
        seeds=_union([one.experiment.seeds for one in found]),
    )
    commands = "; ".join(dict.fromkeys(one.provenance.command for one in found))
    versions = {name: version for one in found for name, version in one.provenance.versions.items()}
    host = None if any(one.provenance.host is None for one in found) else first.provenance.host
    provenance = dataclasses.replace(first.provenance, command=commands, versions=versions, host=host)
    return Results(experiment, provenance, tuple(cell for one in found for cell in one.cells))


def _unlike(there: Results, here: Results) -> list[str]:
    """What parts of one experiment may not differ in, in words."""
    theirs, ours = (
        {name: value for name, value in one.experiment.to_json().items() if name not in (*PARTS, "batch")}
        for one in (there, here)
    )
    return resume.differing(theirs, ours) + resume.unlike(there.provenance, here.provenance, ("device",))


def _union(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(entry for part in parts for entry in part))
