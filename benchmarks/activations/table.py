"""Measured lines as a table: means over inputs with 95 % bootstrap intervals."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from quantwm_eval.estimate import Estimate, bootstrap

COLUMNS = {
    "logit_error": ("logit error", 1.0, 4),
    "selection_shift": ("top-1 shift (%)", 100.0, 1),
    "attention_kl": ("attention KL", 1.0, 4),
    "output_error": ("output error", 1.0, 4),
}


def estimates(rows: list[dict[str, float]], name: str) -> Estimate:
    """Mean over inputs of the mean over layers."""
    by_source: dict[object, list[float]] = defaultdict(list)
    for row in rows:
        by_source[row["source"]].append(row[name])
    return bootstrap([sum(values) / len(values) for values in by_source.values()])


def markdown(path: Path) -> str:
    """A table of one model's lines, methods in the order in which they were measured."""
    by_method: dict[str, list[dict[str, float]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        by_method[row["method"]].append(row)
    heads = ["method", "key bits", "value bits", "shared", "state", *(title for title, _, _ in COLUMNS.values())]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for method, rows in by_method.items():
        cells = [f"`{method}`"]
        cells += [
            f"{estimates(rows, name).mean:.2f}" for name in ("key_bits", "value_bits", "shared_bits", "state_bits")
        ]
        for name, (_, factor, digits) in COLUMNS.items():
            found = estimates(rows, name)
            mean, low, high = (f"{factor * value:.{digits}f}" for value in (found.mean, found.low, found.high))
            cells.append(f"{mean} ({low}–{high})")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"
