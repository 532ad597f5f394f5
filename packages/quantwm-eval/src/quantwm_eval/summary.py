"""Cells to tables: means over scenes with intervals, once, for every output format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantwm_eval import metrics
from quantwm_eval.estimate import Estimate, bootstrap, proportion
from quantwm_eval.metric import Metric, Quantity
from quantwm_eval.results import Cell, Results

MAIN = (
    ("bits_per_element", "walk"),
    ("own_bits_per_element", "walk"),
    ("shared_bits_per_element", "walk"),
    ("compression", "walk"),
    ("state_bytes", "walk"),
    ("psnr", "walk"),
    ("ssim", "walk"),
    ("lpips", "walk"),
    ("temporal_flickering", "walk"),
    ("excess_flicker", "walk"),
    ("excess_flicker_max", "walk"),
    ("selection_shift", "walk"),
    ("logit_error", "walk"),
    ("balls_redrawn", "look-away"),
    ("seconds", "walk"),
    ("drift", "walk"),
)
"""Columns of the main table: quantity, and the kind of episode that it is taken from."""

COUNTED = ("balls_redrawn",)
"""Quantities that are 0 or 1 in a video, shown as a count."""


@dataclass(frozen=True)
class Entry:
    """A figure in a table.

    Attributes:
        text: The mean as shown.
        interval: The 95 % interval as shown, or empty where it has no width.
        best: Whether no compressed method is better.
    """

    text: str
    interval: str
    best: bool


@dataclass(frozen=True)
class Table:
    """Methods by quantities.

    Attributes:
        title: What it shows.
        heads: Column titles with units.
        rows: Method label and its entries.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]


def quantities(results: Results) -> dict[str, Quantity]:
    """Every quantity of the experiment's metrics, those of the main table first.

    One that its metric has only had since the file was written is left out. Figures that no metric here tells of come last, under
    their stored names.
    """
    measured = dict.fromkeys(name for cell in results.cells for name in cell.measurement.values)
    found: dict[str, Quantity] = {}
    for metric in _known_metrics(results):
        known = [quantity for quantity in metric.quantities if quantity.name in measured]
        found |= {quantity.name: quantity for quantity in known or metric.quantities}
    found |= {
        name: Quantity(name, name, "", "neither", low=-math.inf, digits=4) for name in measured if name not in found
    }
    order = [name for name, _ in MAIN if name in found]
    return {name: found[name] for name in dict.fromkeys((*order, *found))}


def _known_metrics(results: Results) -> list[Metric]:
    """Those of the experiment that there are here; a file may be of a machine that had others."""
    here = metrics.loaded()
    return [here[name] for name in results.experiment.metrics if name in here]


def by_scene(cells: Sequence[Cell], kind: str, method: str, quantity: str) -> dict[int, float]:
    """One value per scene, seeds averaged; scenes that were not measured are left out."""
    found: dict[int, list[float]] = {}
    for cell in cells:
        if cell.kind == kind and cell.method == method and quantity in cell.measurement.values:
            found.setdefault(cell.scene, []).append(cell.measurement.values[quantity])
    return {scene: sum(values) / len(values) for scene, values in sorted(found.items())}


def values(cells: Sequence[Cell], kind: str, method: str, quantity: str) -> list[float]:
    """The values of :func:`by_scene`."""
    return list(by_scene(cells, kind, method, quantity).values())


def estimate(results: Results, kind: str, method: str, quantity: str) -> Estimate:
    """Mean and interval over scenes."""
    found = values(results.cells, kind, method, quantity)
    return proportion(found) if quantity in COUNTED else bootstrap(found)


def why(results: Results, kind: str, method: str, quantity: str) -> str:
    """Why there is no estimate of a quantity, in words."""
    owners = [metric for metric in _known_metrics(results) if quantity in (one.name for one in metric.quantities)]
    cells = [cell for cell in results.cells if (cell.kind, cell.method) == (kind, method)]
    if not cells:
        return "not run yet"
    if not owners:
        return "not measured"
    (metric,) = owners
    return metric.blank if any(quantity in cell.measurement.values for cell in cells) else metric.lacking


def unmeasured(results: Results) -> str:
    """Metrics of the experiment that no cell says anything of, each with its reason, and those that are not known here.

    Sentences; empty if there are none of either.
    """
    measured = {name for cell in results.cells for name in cell.measurement.values}
    silent = [
        f"{metric.name} ({metric.lacking})"
        for metric in _known_metrics(results)
        if results.cells and not any(quantity.name in measured for quantity in metric.quantities)
    ]
    here = metrics.loaded()
    foreign = [name for name in results.experiment.metrics if name not in here]
    told = [f"Not measured: {', '.join(silent)}."] if silent else []
    told += [f"Not installed here, so figures stand under their stored names: {', '.join(foreign)}."] if foreign else []
    return " ".join(told)


def main_columns(results: Results) -> list[tuple[Quantity, str]]:
    """Quantities of the main table, each with the kind of episode that it is taken from."""
    kinds, known = results.experiment.kinds, quantities(results)
    columns = [
        (known[name], kind if kind in kinds or name in COUNTED else kinds[0]) for name, kind in MAIN if name in known
    ]
    return [column for column in columns if column[1] in kinds]


def all_columns(results: Results, kind: str) -> list[tuple[Quantity, str]]:
    """Everything that was measured on one kind of episode."""
    measured = {name for cell in results.cells if cell.kind == kind for name in cell.measurement.values}
    return [(quantity, kind) for quantity in quantities(results).values() if quantity.name in measured]


def main_table(results: Results) -> Table:
    """The table that goes into a message: one row per method."""
    return _table(results, "Methods", main_columns(results))


def detail_table(results: Results, kind: str) -> Table:
    """A table of :func:`all_columns`."""
    return _table(results, f"All figures, {kind} scenes", all_columns(results, kind))


def _table(results: Results, title: str, columns: Sequence[tuple[Quantity, str]]) -> Table:
    labels = [method.label for method in results.experiment.methods]
    grid = {label: [estimate(results, kind, label, quantity.name) for quantity, kind in columns] for label in labels}
    rivals = results.experiment.compressed
    best = [
        best_mean(quantity, [grid[label][index].mean for label in rivals])
        for index, (quantity, _) in enumerate(columns)
    ]
    rows = tuple(
        (
            label,
            tuple(
                _of_fewer(
                    results,
                    found,
                    entry(
                        quantity,
                        found,
                        label in rivals and found.mean == top,
                        "" if found.n else why(results, kind, label, quantity.name),
                    ),
                )
                for (quantity, kind), found, top in zip(columns, grid[label], best, strict=True)
            ),
        )
        for label in labels
    )
    return Table(title, tuple(head(quantity) for quantity, _ in columns), rows)


def _of_fewer(results: Results, found: Estimate, shown: Entry) -> Entry:
    """With the number of scenes at its interval where not all have such a figure."""
    if not shown.interval or found.n == len(results.experiment.scenes):
        return shown
    return replace(shown, interval=f"{shown.interval}, n = {found.n}")


def best_mean(quantity: Quantity, means: Sequence[float]) -> float:
    """The best of some means, NaN where no direction is better or all are equal."""
    known = [mean for mean in means if not math.isnan(mean)]
    if len(set(known)) < 2 or quantity.better == "neither":
        return math.nan
    return max(known) if quantity.better == "higher" else min(known)


def head(quantity: Quantity) -> str:
    """Column title with its unit and an arrow for the better direction."""
    unit = "" if quantity.unit in {"", "B", "×", "bits", "share"} else f", {quantity.unit}"
    arrow = {"higher": " ↑", "lower": " ↓", "neither": ""}[quantity.better]
    return f"{quantity.label}{unit}{arrow}"


def entry(quantity: Quantity, found: Estimate, best: bool, why: str = "") -> Entry:
    """An estimate as text; where there is none a dash, and why.

    >>> entry(Quantity("psnr", "PSNR", "dB", "higher"), Estimate(30.123, 29.0, 31.0, 8), best=True)
    Entry(text='30.12', interval='29.00–31.00', best=True)
    """
    if found.n == 0:
        return Entry(f"– ({why})" if why else "–", "", best=False)
    if quantity.name in COUNTED:
        text = f"{round(found.mean * found.n)} of {found.n}"
        return Entry(text, f"{100 * found.low:.0f}–{100 * found.high:.0f} %", best)
    low, high = number(quantity, found.low), number(quantity, found.high)
    dash = " to " if low.startswith("-") else "–"
    interval = f"{low.removesuffix(' %').removesuffix(' KiB')}{dash}{high}"
    return Entry(number(quantity, found.mean), "" if low == high else interval, best)


def number(quantity: Quantity, value: float) -> str:
    """A value as tables show it: bytes in KiB, shares in percent, ratios with a sign, infinity as such."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if quantity.unit == "B":
        return f"{value / 1024:,.0f} KiB"
    if quantity.unit == "share":
        return f"{100 * value:.{quantity.digits}f} %"
    return f"{value:.{quantity.digits}f}{'×' if quantity.unit == '×' else ''}"


def signed(quantity: Quantity, value: float) -> str:
    """A difference as tables show it.

    >>> signed(Quantity("psnr", "PSNR", "dB", "higher"), 1.5)
    '+1.50'
    """
    text = number(quantity, value)
    return text if text.startswith("-") else f"+{text}"
