"""What all plots share: colours, style, and the way to SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quantwm_eval.experiment import CONTROL
from quantwm_eval.results import Cell, Results

# Okabe and Ito's palette, which colour-blind readers can tell apart, and three more; the control is black.
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c6d31", "#999999", "#332288")
MARKERS = "osD^vPX*<"
STYLE: Any = {  # matplotlib types its keys as one long literal
    "svg.fonttype": "none",
    "svg.hashsalt": "quantwm",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """A picture for a page.

    Attributes:
        title: Heading.
        caption: What is seen, in a sentence or two.
        alternative: The same for those who do not see it.
        svg: The picture.
    """

    title: str
    caption: str
    alternative: str
    svg: bytes


def colours(results: Results) -> dict[str, str]:
    """A colour for every method."""
    labels = [method.label for method in results.experiment.methods if method.label != CONTROL]
    return {CONTROL: "#222222"} | {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(labels)}


def cells_of(results: Results, kind: str, label: str) -> list[Cell]:
    """What was measured of one method on one kind of episode."""
    return [cell for cell in results.cells if cell.kind == kind and cell.method == label]


def canvas(height: float = 3.6) -> tuple[Figure, Axes]:
    """An empty figure as wide as all are, ``height`` inches high."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, figure.subplots()


def legend_columns(labels: Sequence[str]) -> int:
    """How many labels fit beside each other.

    >>> legend_columns(["kivi", "qvg"]), legend_columns(["quantwm:metric=uniform:candidates=1"] * 4)
    (2, 1)
    """
    return max(1, min(len(labels), 66 // (max(map(len, labels)) + 7)))


def svg(figure: Figure) -> bytes:
    """A figure as an SVG file, the same bytes each time."""
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return buffer.getvalue()
