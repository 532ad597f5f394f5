"""Plots of results as SVG, each a function from results to a picture."""

from __future__ import annotations

import math

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from quantwm_eval import lines, summary
from quantwm_eval.drawing import MARKERS, STYLE, Plot, canvas, cells_of, colours, svg
from quantwm_eval.results import Results

PANELS = 5
"""Heat maps that stand beside each other."""


def all_plots(results: Results) -> list[Plot]:
    """Every plot for which there are figures."""
    kind = results.experiment.kinds[0]
    drawn = [lines.draw(results, kind, plot) for plot in lines.PLOTS]
    made = (quality_by_bits(results, kind), *drawn, shift_by_head(results, kind))
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
        figure, axes = canvas()
        for index, label, bits, quality in points:
            spread = [[quality.mean - quality.low], [quality.high - quality.mean]]
            axes.errorbar(
                bits.mean, quality.mean, spread, fmt=MARKERS[index % len(MARKERS)],
                color=colours(results)[label], capsize=3, markersize=8,
            )  # fmt: skip
            offset = (9, -12 if index % 2 else 5)  # neighbours are often close
            axes.annotate(label, (bits.mean, quality.mean), offset, textcoords="offset points")
        axes.margins(x=0.25)
        axes.set(xlabel="bits per element, every stored byte counted", ylabel="PSNR against BF16, dB")
        picture = svg(figure)
    told = "; ".join(f"{label} {quality.mean:.1f} dB at {bits.mean:.2f} bits" for _, label, bits, quality in points)
    caption = f"Up and to the left is better. BF16 takes 16 bits. Bars: 95 % interval over {points[0][3].n} scenes."
    return Plot("Quality against bits", caption, f"Scatter plot: {told}.", picture)


def shift_by_head(results: Results, kind: str) -> Plot | None:
    """Selection shift by layer and head, one panel per method."""
    grids = {}
    for label in results.experiment.compressed:
        maps = [
            cell.measurement.maps["selection_shift"]
            for cell in cells_of(results, kind, label)
            if "selection_shift" in cell.measurement.maps
        ]
        if maps and np.isfinite(maps).any():
            grids[label] = 100 * np.nanmean(maps, axis=0)
    if not grids:
        return None
    top = max(float(np.nanmax(grid)) for grid in grids.values()) or 1.0
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        columns = min(len(grids), PANELS)
        rows = -(-len(grids) // columns)
        figure = Figure(figsize=(7.2, 3.6 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
        shades = ScalarMappable(Normalize(0, top), "magma_r")
        for axes, (label, grid) in zip(panels, grids.items(), strict=False):
            axes.imshow(grid, cmap=shades.get_cmap(), norm=shades.norm, aspect="auto")
            axes.set_title(label.replace(":", "\n"), fontsize=9)
            axes.set(xlabel="head", xticks=range(grid.shape[1]), yticks=range(grid.shape[0]))
        for axes in panels[::columns]:
            axes.set_ylabel("layer")
        for axes in panels[len(grids) :]:
            axes.set_axis_off()
        figure.colorbar(shades, ax=list(panels), label="queries shifted, %")
        picture = svg(figure)
    worst = "; ".join(
        f"{label} at most {np.nanmax(grid):.0f} % in layer {np.unravel_index(np.nanargmax(grid), grid.shape)[0]}"
        for label, grid in grids.items()
    )
    return Plot("Selection shift by layer and head", "Darker is worse.", f"Heat maps: {worst}.", picture)
