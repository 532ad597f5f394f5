"""Plots of figures along an axis: a line for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
import numpy as np
from jaxtyping import Float64

from quantwm_eval.drawing import STYLE, Plot, canvas, cells_of, colours, legend_columns, svg
from quantwm_eval.experiment import CONTROL
from quantwm_eval.metrics.psnr import decibels
from quantwm_eval.results import Results


@dataclass(frozen=True)
class Lines:
    """A plot to be drawn where there are figures for it.

    Attributes:
        title: Heading.
        part: Part of a measurement.
        quantity: Name in it.
        caption: What is seen.
        across: Title of the horizontal axis.
        up: Title of the vertical axis.
        of: Methods that compress, all of them but the control, the control alone, or both.
        factor: What figures are multiplied with; decibels are averaged as the errors they come from.
        digits: Decimals in the description.
        start: First position that is drawn.
    """

    title: str
    part: Literal["curves", "ages", "positions"]
    quantity: str
    caption: str
    across: str
    up: str
    of: Literal["compressed", "others", "control", "all"] = "compressed"
    factor: float | Literal["decibels"] = 1.0
    digits: int = 1
    start: int = 0


PLOTS = (
    Lines(
        "Quality over time", "curves", "psnr",
        "Frames before the first sealed unit is read are identical to BF16 and not drawn.",
        "frame", "PSNR against BF16, dB", of="others", factor="decibels",
    ),
    Lines(
        "Drift from the truth", "curves", "truth_psnr_end",
        "What would truly be seen is known here. BF16 drifts as well; a method's own part is what it lies below.",
        "frame", "PSNR against the truth, dB", of="all", factor="decibels",
    ),
    Lines(
        "Selection shift over time", "curves", "selection_shift",
        "How often a query's largest logit moves to another past token, over real queries of the rollout.",
        "chunk", "queries shifted, %", factor=100.0,
    ),
    Lines(
        "Logit error by age", "ages", "logit_error",
        "Error of the logits against their variance, over sealed tokens that were written so many chunks ago.",
        "age of the token, chunks", "logit error", digits=4, start=1,  # the active chunk, age 0, is never sealed
    ),
    Lines(
        "Logit error by position", "positions", "logit_error",
        "The same over tokens by the chunk in which they were written: the first unit is sealed before any query was seen.",
        "chunk of the token", "logit error", digits=4,
    ),
    Lines(
        "Query energy", "curves", "query_energy",
        "Share of the queries' second moment in so many leading directions, mean over layers and heads, BF16 rollout.",
        "directions", "energy, %", of="control", factor=100.0,
    ),
)  # fmt: skip


def draw(results: Results, kind: str, lines: Lines) -> Plot | None:
    """Draw a plot, None where there is nothing to draw."""
    found = {label: _line(results, kind, label, lines) for label in _labels(results, lines)}
    known = {label: line for label, line in found.items() if np.isfinite(line).any()}
    if not known:
        return None
    with mpl.rc_context(STYLE):
        columns = legend_columns(list(found))
        figure, axes = canvas(3.4 + 0.22 * -(-len(found) // columns))
        for label, line in found.items():
            positions = np.arange(1, len(line) + 1)
            axes.plot(positions, line, color=colours(results)[label], label=label, linewidth=1.8)
        axes.set(xlabel=lines.across, ylabel=lines.up)
        figure.legend(ncols=columns, loc="outside upper center")
        picture = svg(figure)
    told = "; ".join(f"{label} from {_ends(line, lines.digits)}" for label, line in known.items())
    return Plot(lines.title, lines.caption, f"Line plot, {lines.up} by {lines.across}: {told}.", picture)


def _labels(results: Results, lines: Lines) -> Sequence[str]:
    everybody = list(colours(results))
    others = [label for label in everybody if label != CONTROL]
    chosen = {"compressed": results.experiment.compressed, "others": others, "control": (CONTROL,), "all": everybody}
    return chosen[lines.of]


def _line(results: Results, kind: str, label: str, lines: Lines) -> Float64[np.ndarray, " positions"]:
    measured = [getattr(cell.measurement, lines.part) for cell in cells_of(results, kind, label)]
    curves = [part[lines.quantity] for part in measured if lines.quantity in part]
    if lines.factor == "decibels":
        quality = np.array([decibels(error) for error in _mean([255.0**2 * 10 ** (-curve / 10) for curve in curves])])
        return np.where(np.isfinite(quality), quality, np.nan)
    return lines.factor * _mean(curves)[lines.start :]


def _mean(curves: Sequence[Float64[np.ndarray, " positions"]]) -> Float64[np.ndarray, " positions"]:
    """Mean over cells by position; NaN where no cell has a figure."""
    if not curves:
        return np.zeros(0)
    grid = np.full((len(curves), max(map(len, curves))), np.nan)
    for row, curve in zip(grid, curves, strict=True):
        row[: len(curve)] = curve
    known = np.isfinite(grid)
    return np.where(known.any(0), np.where(known, grid, 0).sum(0) / np.maximum(known.sum(0), 1), np.nan)


def _ends(line: Float64[np.ndarray, " positions"], digits: int) -> str:
    known = line[np.isfinite(line)]
    return f"{known[0]:.{digits}f} to {known[-1]:.{digits}f}"
