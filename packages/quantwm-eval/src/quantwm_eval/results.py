"""Measurements as JSON lines: one line says what was run and with what, every further one is a cell.

Numbers that JSON does not know are written as the strings ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``. Figures are written in
full; what is drawn along an axis (curves, maps, ages, positions) to seven digits, which halves the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float64

from quantwm_core.errors import FormatError
from quantwm_eval.experiment import Experiment
from quantwm_eval.metric import Measurement
from quantwm_eval.provenance import Provenance

FORMAT = "quantwm-results"
VERSION = 1

ALONG = ("curves", "maps", "ages", "positions")
"""Parts of a measurement that lie along an axis, in its order."""
DIGITS = 7

Key: TypeAlias = tuple[str, int, int, str]
"""Kind, scene, seed and method of a cell."""


@dataclass(frozen=True)
class Cell:
    """What was measured in one video.

    Attributes:
        kind: Kind of the episode.
        scene: Number of the scene.
        seed: Number that the noise was drawn from.
        method: Label of the method.
        valid: Whether the BF16 control of this episode was exact.
        measurement: The figures of all metrics.
        reference: SHA-256 of the video that it was compared with; empty in files of early versions.
    """

    kind: str
    scene: int
    seed: int
    method: str
    valid: bool
    measurement: Measurement
    reference: str = ""

    @property
    def key(self) -> Key:
        """What tells it from the other cells of its experiment."""
        return self.kind, self.scene, self.seed, self.method


@dataclass(frozen=True)
class Results:
    """A run, whole or in part.

    Attributes:
        experiment: What was to be measured.
        provenance: Versions, machine, command.
        cells: What was measured.
    """

    experiment: Experiment
    provenance: Provenance
    cells: tuple[Cell, ...]

    @property
    def valid(self) -> bool:
        """Whether every BF16 control was exact."""
        return all(cell.valid for cell in self.cells)

    @property
    def missing(self) -> int:
        """Cells that are not measured yet."""
        return len({*self.experiment.keys()} - {cell.key for cell in self.cells})


def header_line(experiment: Experiment, provenance: Provenance) -> str:
    """First line of a results file."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "experiment": experiment.to_json(),
        "provenance": provenance.to_json(),
    }
    return dump(head)


def cell_line(cell: Cell) -> str:
    """Line of a cell."""
    measured = cell.measurement
    return dump(
        {
            "kind": cell.kind,
            "scene": cell.scene,
            "seed": cell.seed,
            "method": cell.method,
            "valid": cell.valid,
            "reference": cell.reference,
            "values": dict(measured.values),
            **{part: {name: _short(x) for name, x in getattr(measured, part).items()} for part in ALONG},
        }
    )


def text(results: Results) -> str:
    """A whole results file."""
    return "".join([header_line(results.experiment, results.provenance), *map(cell_line, results.cells)])


def save(path: Path, results: Results) -> None:
    """Write a results file; one that exists is replaced."""
    path.write_text(text(results), encoding="utf-8")


def load(path: Path) -> Results:
    """Read a results file.

    Raises:
        FormatError: The file is foreign, broken or of a newer version; the message names the line.
        OSError: It cannot be read.
    """
    return parse(path, path.read_text(encoding="utf-8"))


def parse(path: Path, text: str) -> Results:
    """Read the text of a results file.

    Args:
        path: Its file, for messages.
        text: Its lines.

    Raises:
        FormatError: As :func:`load`.
    """
    lines = text.splitlines()
    plain = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
    head = plain[0] if plain else {}
    if head.get("format") != FORMAT:
        raise FormatError(f"{path}: not a quantwm results file, its first line names no format {FORMAT!r}")
    if head.get("version") != VERSION:
        raise FormatError(
            f"{path}: version {head.get('version')}, this quantwm-eval reads version {VERSION}; update it"
        )
    try:
        experiment, provenance = Experiment.from_json(head["experiment"]), Provenance(**head["provenance"])
        _check_types(provenance, command=str, versions=dict)
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: line 1 is incomplete: {error}") from error
    return Results(experiment, provenance, tuple(_cell(path, number, line) for number, line in enumerate(plain[1:], 2)))


def _short(figures: Float64[np.ndarray, "..."]) -> Any:
    rounded = [float(f"{figure:.{DIGITS}g}") for figure in figures.ravel()]
    return np.reshape(rounded, figures.shape).tolist()


def _cell(path: Path, number: int, line: Mapping[str, Any]) -> Cell:
    try:
        measured = Measurement(
            {name: float(value) for name, value in line["values"].items()},
            *(
                {name: np.array(figures, np.float64) for name, figures in line.get(part, {}).items()}
                for part in ALONG  # early files have no ages and no positions
            ),
        )
        key = line["kind"], line["scene"], line["seed"], line["method"]
        cell = Cell(*key, line["valid"], measured, line.get("reference", ""))
        _check_types(cell, kind=str, scene=int, seed=int, method=str, valid=bool, reference=str)
        return cell
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: line {number} is not a cell: {error}") from error


def _check_types(value: object, **wanted: type) -> None:
    """Refuse what JSON holds in the place of another type.

    Raises:
        TypeError: A field is of another type; the message says which, and what came.
    """
    for name, needed in wanted.items():
        came = getattr(value, name)
        if type(came) is not needed:
            raise TypeError(f"{name} {came!r}: need {needed.__name__}")


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}: line {number} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise FormatError(f"{path}: line {number} is not an object")
    return parsed


def dump(value: Mapping[str, Any]) -> str:
    """A line of strict JSON; numbers that it does not know become strings, see above."""
    return json.dumps(_plain(value), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """The same with numbers that JSON does not know as strings; ``float`` and NumPy read them back."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
