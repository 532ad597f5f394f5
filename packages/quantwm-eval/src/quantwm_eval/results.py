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

from quantwm_core.errors import FormatError, QuantWMError
from quantwm_eval import results_schema, schema
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
            "values": {name: float(value) for name, value in measured.values.items()},
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
        FormatError: The file is foreign, broken or of a newer version; the message names the line, and the field if one does
            not fit.
        OSError: It cannot be read.
    """
    return parse(path, decode(path, path.read_bytes()))


def decode(path: Path, content: bytes) -> str:
    """The text of a file's bytes.

    Raises:
        FormatError: They are none.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a quantwm results file: {error}") from error


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
        schema.hold(head, results_schema.HEAD)
        experiment, provenance = Experiment.from_json(head["experiment"]), Provenance(**head["provenance"])
    except QuantWMError as error:
        raise FormatError(f"{path}: line 1 is no head: {error}") from error
    cells = tuple(_cell(path, number, line) for number, line in enumerate(plain[1:], 2))
    _check_maps(path, cells)
    return Results(experiment, provenance, cells)


def _short(figures: Float64[np.ndarray, "..."]) -> Any:
    rounded = [float(f"{figure:.{DIGITS}g}") for figure in figures.ravel()]
    return np.reshape(rounded, figures.shape).tolist()


def _cell(path: Path, number: int, line: Mapping[str, Any]) -> Cell:
    try:
        schema.hold(line, results_schema.CELL)
    except FormatError as error:
        raise FormatError(f"{path}: line {number} is not a cell: {error}") from error
    measured = Measurement(
        {name: float(value) for name, value in line["values"].items()},
        *({name: np.array(figures, np.float64) for name, figures in line.get(part, {}).items()} for part in ALONG),
    )
    key = line["kind"], line["scene"], line["seed"], line["method"]
    return Cell(*key, line["valid"], measured, line.get("reference", ""))


def _check_maps(path: Path, cells: Iterable[Cell]) -> None:
    """Refuse maps of one method and quantity that are not of one model's layers and heads."""
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for number, cell in enumerate(cells, 2):
        for name, figures in cell.measurement.maps.items():
            needed = shapes.setdefault((cell.method, name), figures.shape)
            if figures.shape != needed:
                raise FormatError(
                    f"{path}: line {number} is not a cell: maps.{name}: got the shape {figures.shape}, need {needed} as in "
                    f"the first cell of {cell.method}"
                )


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:  # numbers of too many digits, lists in lists in lists
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
