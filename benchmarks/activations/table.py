"""Measured lines as a table: means over inputs with 95 % bootstrap intervals, and ratios over the same inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantwm_eval.estimate import Estimate, bootstrap

Rows = list[Mapping[str, Any]]
"""Lines of one method, an input each."""
BITS = {"key_bits": "key bits", "value_bits": "value bits", "shared_bits": "shared", "state_bits": "state"}
# Title, factor and digits of each error.
ERRORS = {
    "logit_error": ("logit error", 1.0, 4),
    "selection_shift": ("top-1 shift (%)", 100.0, 1),
    "attention_kl": ("attention KL", 1.0, 4),
    "output_error": ("output error", 1.0, 4),
}


def by_source(rows: Rows, name: str) -> dict[object, float]:
    """Value of each input."""
    return {row["source"]: row[name] for row in rows}


def text(found: Estimate, factor: float, digits: int) -> str:
    """Mean and interval."""
    mean, low, high = (f"{factor * value:.{digits}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} ({low}–{high})"


def ratio(rows: Rows, reference: Rows, name: str) -> Estimate:
    """Input by input."""
    ours, theirs = by_source(rows, name), by_source(reference, name)
    return bootstrap([ours[source] / theirs[source] for source in ours if source in theirs])


def markdown(path: Path, order: Sequence[str]) -> str:
    """A table of one model's lines.

    Args:
        path: Lines of JSON.
        order: Labels, as they shall stand; others come last. Ratios are to the first setting of ``quantwm``, the paper's.
    """
    methods: dict[str, Rows] = {label: [] for label in order}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        methods.setdefault(row["method"], []).append(row)
    methods = {label: rows for label, rows in methods.items() if rows}
    paper = next(rows for label, rows in methods.items() if label.startswith("quantwm"))
    heads = ["method", *BITS.values(), *(title for title, _, _ in ERRORS.values()), "logit error to the paper's"]
    lines = [heads, ["---"] * len(heads)]
    for method, rows in methods.items():
        cells = [f"`{method}`"]
        cells += [f"{bootstrap(list(by_source(rows, name).values())).mean:.2f}" for name in BITS]
        for name, (_, factor, digits) in ERRORS.items():
            cells.append(text(bootstrap(list(by_source(rows, name).values())), factor, digits))
        lines.append([*cells, text(ratio(rows, paper, "logit_error"), 1.0, 2)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def pairs(path: Path) -> str:
    """Methods that look ahead beside themselves that do not: means, and ratios of the same inputs."""
    methods: dict[str, Rows] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        methods.setdefault(row["method"], []).append(row)
    heads = ["method", *(f"{title}, ratio" for title, _, _ in ERRORS.values())]
    lines = [heads, ["---"] * len(heads)]
    for method, rows in methods.items():
        if ":frames_ahead=" not in method:
            continue
        plain = methods[method.partition(":frames_ahead=")[0]]
        cells = []
        for name, (_, factor, digits) in ERRORS.items():
            before, after = (bootstrap(list(by_source(each, name).values())).mean for each in (plain, rows))
            shown = " → ".join(f"{factor * value:.{digits}f}" for value in (before, after))
            cells.append(f"{shown}, {text(ratio(rows, plain, name), 1.0, 2)}")
        lines.append([f"`{method}`", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def totals(path: Path) -> str:
    """Methods with all that they take, and their errors over those of the first, the paper's, on the same inputs."""
    methods: dict[str, Rows] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        methods.setdefault(row["method"], []).append(row)
    paper = next(iter(methods.values()))
    heads = ["method", *BITS.values(), "total", "of 16 bits", *(f"{title}, ratio" for title, _, _ in ERRORS.values())]
    lines = [heads, ["---"] * len(heads)]
    for method, rows in methods.items():
        bits = {name: bootstrap(list(by_source(rows, name).values())).mean for name in BITS}
        total = (bits["key_bits"] + bits["value_bits"]) / 2 + bits["shared_bits"] + bits["state_bits"]
        cells = [f"{value:.2f}" for value in (*bits.values(), total)] + [f"1/{16 / total:.1f}"]
        cells += [text(ratio(rows, paper, name), 1.0, 2) for name in ERRORS]
        lines.append([f"`{method}`", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
