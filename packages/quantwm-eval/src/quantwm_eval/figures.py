"""Plots of results as SVG, each a function from results to a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from quantwm_eval import summary
from quantwm_eval.experiment import CONTROL
from quantwm_eval.metrics.psnr import decibels
from quantwm_eval.results import Cell, Results

# Okabe and Ito's palette, which colour-blind readers can tell apart; the control is black.
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#d55e00", "#0072b2", "#cc79a7")
MARKERS = "osD^vP"
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


def all_plots(results: Results) -> list[Plot]:
    """Every plot for which there are figures."""
    kind = results.experiment.kinds[0]
    made = (
        quality_by_bits(results, kind),
        quality_over_time(results, kind),
        shift_over_time(results, kind),
        error_by_age(results, kind),
        shift_by_head(results, kind),
    )
    return [plot for plot in made if plot is not None]


def quality_by_bits(results: Results, kind: str) -> Plot | None:
    """PSNR against bits per element, with intervals."""
    points = []
    for index, label in enumerate(results.experiment.compressed):
        bits = summary.estimate(results, kind, label, "bits_per_element")
        quality = summary.estimate(results, kind, label, "psnr")
        if math.isfinite(bits.mean) and math.isfinite(quality.mean):
            points.append((index, label, bits, quality))
    if not points:
        return None
    with mpl.rc_context(STYLE):
        figure, axes = _canvas()
        for index, label, bits, quality in points:
            spread = [[quality.mean - quality.low], [quality.high - quality.mean]]
            axes.errorbar(
                bits.mean, quality.mean, spread, fmt=MARKERS[index % len(MARKERS)],
                color=colours(results)[label], capsize=3, markersize=8,
            )  # fmt: skip
            axes.annotate(label, (bits.mean, quality.mean), (9, 5), textcoords="offset points")
        axes.margins(x=0.25)
        axes.set(xlabel="bits per element, every stored byte counted", ylabel="PSNR against BF16, dB")
        picture = _svg(figure)
    told = "; ".join(f"{label} {quality.mean:.1f} dB at {bits.mean:.2f} bits" for _, label, bits, quality in points)
    caption = f"Up and to the left is better. BF16 takes 16 bits. Bars: 95 % interval over {points[0][3].n} scenes."
    return Plot("Quality against bits", caption, f"Scatter plot: {told}.", picture)


def quality_over_time(results: Results, kind: str) -> Plot | None:
    """PSNR of each frame, errors averaged over scenes before the logarithm."""
    curves = {
        label: _mean_curve(_cells(results, kind, label), "psnr") for label in colours(results) if label != CONTROL
    }
    lines = {}
    for label, curve in curves.items():
        quality = np.array([decibels(error) for error in curve])
        lines[label] = np.where(np.isfinite(quality), quality, np.nan)
    if not any(np.isfinite(line).any() for line in lines.values()):
        return None
    caption = "Frames before the first sealed unit is read are identical to BF16 and not drawn."
    return _lines(results, lines, "Quality over time", caption, "frame", "PSNR against BF16, dB")


def shift_over_time(results: Results, kind: str) -> Plot | None:
    """Selection shift at each position of the active chunk."""
    lines = {
        label: 100
        * _nan_mean([cell.measurement.curves.get("selection_shift") for cell in _cells(results, kind, label)])
        for label in results.experiment.compressed
    }
    if not any(np.isfinite(line).any() for line in lines.values()):
        return None
    caption = "How often a query's largest logit moves to another past token, over real queries of the rollout."
    return _lines(results, lines, "Selection shift over time", caption, "chunk", "queries shifted, %")


def error_by_age(results: Results, kind: str) -> Plot | None:
    """Logit error by how long ago the token was written; the active chunk, age 0, is never sealed."""
    lines = {
        label: _nan_mean([cell.measurement.ages.get("logit_error") for cell in _cells(results, kind, label)])[1:]
        for label in results.experiment.compressed
    }
    if not any(np.isfinite(line).any() for line in lines.values()):
        return None
    caption = "Error of the logits against their variance, over sealed tokens that were written so many chunks ago."
    return _lines(results, lines, "Logit error by age", caption, "age of the token, chunks", "logit error", digits=4)


def shift_by_head(results: Results, kind: str) -> Plot | None:
    """Selection shift by layer and head, one panel per method."""
    grids = {}
    for label in results.experiment.compressed:
        maps = [
            cell.measurement.maps["selection_shift"]
            for cell in _cells(results, kind, label)
            if "selection_shift" in cell.measurement.maps
        ]
        if maps and np.isfinite(maps).any():
            grids[label] = 100 * np.nanmean(maps, axis=0)
    if not grids:
        return None
    top = max(float(np.nanmax(grid)) for grid in grids.values()) or 1.0
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        panels = figure.subplots(1, len(grids), squeeze=False, sharey=True)[0]
        shades = ScalarMappable(Normalize(0, top), "magma_r")
        for axes, (label, grid) in zip(panels, grids.items(), strict=True):
            axes.imshow(grid, cmap=shades.get_cmap(), norm=shades.norm, aspect="auto")
            axes.set(title=label, xlabel="head", xticks=range(grid.shape[1]), yticks=range(grid.shape[0]))
        panels[0].set_ylabel("layer")
        figure.colorbar(shades, ax=list(panels), label="queries shifted, %")
        picture = _svg(figure)
    worst = "; ".join(
        f"{label} at most {np.nanmax(grid):.0f} % in layer {np.unravel_index(np.nanargmax(grid), grid.shape)[0]}"
        for label, grid in grids.items()
    )
    return Plot("Selection shift by layer and head", "Darker is worse.", f"Heat maps: {worst}.", picture)


def _lines(
    results: Results, lines: dict[str, np.ndarray], title: str, caption: str, across: str, up: str, digits: int = 1
) -> Plot:
    with mpl.rc_context(STYLE):
        figure, axes = _canvas()
        for label, line in lines.items():
            axes.plot(np.arange(1, len(line) + 1), line, color=colours(results)[label], label=label, linewidth=1.8)
        axes.set(xlabel=across, ylabel=up)
        axes.legend(ncols=min(len(lines), 5), loc="lower center", bbox_to_anchor=(0.5, 1.0))
        picture = _svg(figure)
    told = "; ".join(
        f"{label} from {line[np.isfinite(line)][0]:.{digits}f} to {line[np.isfinite(line)][-1]:.{digits}f}"
        for label, line in lines.items() if np.isfinite(line).any()
    )  # fmt: skip
    return Plot(title, caption, f"Line plot, {up} by {across}: {told}.", picture)


def _cells(results: Results, kind: str, label: str) -> list[Cell]:
    return [cell for cell in results.cells if cell.kind == kind and cell.method == label]


def _mean_curve(cells: Sequence[Cell], quantity: str) -> np.ndarray:
    """Squared error by frame from curves in dB, averaged over cells."""
    curves = [cell.measurement.curves[quantity] for cell in cells if quantity in cell.measurement.curves]
    return np.mean([255.0**2 * 10 ** (-curve / 10) for curve in curves], axis=0) if curves else np.zeros(0)


def _nan_mean(found: Sequence[np.ndarray | None]) -> np.ndarray:
    """Mean over cells by position; NaN where no cell has a figure."""
    curves = np.array([curve for curve in found if curve is not None])
    if curves.size == 0:
        return np.zeros(0)
    known = np.isfinite(curves)
    return np.where(known.any(0), np.where(known, curves, 0).sum(0) / np.maximum(known.sum(0), 1), np.nan)


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return buffer.getvalue()
