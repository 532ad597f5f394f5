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

    The last line of a file may be cut off. Provenance is the first file's, with the commands of all.

    Raises:
        StateError: The experiments or versions do not fit, or two files hold one cell; the message says what.
        FormatError, OSError: A file cannot be read.
    """
    found = [resume.read(path)[0] for path in paths]
    first = found[0]
    owner: dict[Key, Path] = {}
    for path, one in zip(paths, found, strict=True):
        there, here = (
            {name: value for name, value in results.experiment.to_json().items() if name not in (*PARTS, "batch")}
            for results in (one, first)
        )
        unlike = resume.differing(there, here)
        unlike += resume.unlike(one.provenance, first.provenance, ("device",))
        if unlike:
            raise StateError(f"{path} does not fit {paths[0]}: {'; '.join(unlike)}; report them apart")
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
    provenance = dataclasses.replace(first.provenance, command=commands)
    return Results(experiment, provenance, tuple(cell for one in found for cell in one.cells))


def _union(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(entry for part in parts for entry in part))
