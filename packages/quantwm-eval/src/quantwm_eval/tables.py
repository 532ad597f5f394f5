"""Results for a terminal and for a spreadsheet: means with n, intervals, and differences over the same scenes."""

from __future__ import annotations

import csv
import io

from quantwm_eval import agreement, paired, summary, text_table
from quantwm_eval.estimate import Estimate
from quantwm_eval.metric import Quantity
from quantwm_eval.results import Results
from quantwm_eval.summary import Table

COLUMNS = (
    "kind", "quantity", "unit", "better", "method", "n", "mean", "low", "high",
    "against", "pairs", "difference", "difference_low", "difference_high",
)  # fmt: skip


def columns(results: Results, everything: bool) -> list[tuple[Quantity, str]]:
    """Quantities of the main table, or all, each with its kind of episode."""
    if not everything:
        return summary.main_columns(results)
    return [column for kind in results.experiment.kinds for column in summary.all_columns(results, kind)]


def text(results: Results, against: str | None = None, everything: bool = False) -> str:
    """A block for each quantity, a line for each method.

    Args:
        results: What was measured.
        against: The method whose values are subtracted, scene by scene; None for no differences.
        everything: Whether all quantities are shown, not those of the main table only.
    """
    blocks = []
    for quantity, kind in columns(results, everything):
        heads = ["method", "n", "mean", "95 % interval"]
        lines = [heads if against is None else [*heads, f"minus {against}", "95 % interval", "pairs"]]
        for row in paired.rows(results, quantity, kind, against):
            lacking = "" if row.found.n else summary.why(results, kind, row.label, quantity.name)
            shown = summary.entry(quantity, row.found, best=False, why=lacking)
            line = [row.label, str(row.found.n), shown.text, shown.interval]
            lines.append(line if against is None else [*line, *_difference(quantity, row.difference)])
        blocks.append(f"{kind}: {summary.head(quantity)}\n{text_table.grid(lines)}")
    stated = agreement.rows(results)
    if stated:
        blocks.append(f"{agreement.title(results)}\n{text_table.grid([agreement.HEADS, *stated], left=2)}")
    notes = ["n: scenes; seeds of a scene are averaged first."]
    if against is not None:
        notes.append(
            f"*: the interval of the difference over the same scenes, {paired.FEWEST} or more, leaves zero out."
        )
    notes.append(summary.unmeasured(results))
    return "\n\n".join([*blocks, " ".join(filter(None, notes))])


def grid(table: Table) -> str:
    """A table of methods by quantities, each mean with its interval in parentheses."""
    rows = [
        (label, *(f"{x.text} ({x.interval})" if x.interval else x.text for x in entries))
        for label, entries in table.rows
    ]
    return f"{table.title}\n{text_table.grid([('method', *table.heads), *rows])}"


def comma_separated(results: Results, against: str | None = None) -> str:
    """Every quantity and method as a line of CSV, numbers in full, empty where nothing was measured."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for quantity, kind in columns(results, everything=True):
        for row in paired.rows(results, quantity, kind, against):
            named = [kind, quantity.name, quantity.unit, quantity.better, row.label]
            other = "" if against in (None, row.label) else against
            writer.writerow([*named, *_numbers(row.found), other, *_numbers(row.difference)])
    return buffer.getvalue()


def _difference(quantity: Quantity, found: Estimate) -> tuple[str, str, str]:
    if found.n == 0:
        return "", "", ""
    low, high = summary.signed(quantity, found.low), summary.signed(quantity, found.high)
    mark = " *" if paired.certain(found) else ""
    return f"{summary.signed(quantity, found.mean)}{mark}", "" if low == high else f"{low} to {high}", str(found.n)


def _numbers(found: Estimate) -> tuple[int | str, ...]:
    return (found.n, *((repr(x) for x in (found.mean, found.low, found.high)) if found.n else ("", "", "")))
