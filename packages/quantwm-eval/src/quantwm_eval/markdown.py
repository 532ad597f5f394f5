"""The report's tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from quantwm_eval import agreement, summary
from quantwm_eval.results import Results
from quantwm_eval.summary import Table


def render(results: Results, headline: str, more: Sequence[Table] = ()) -> str:
    """Headline, tables and provenance, to be pasted into an issue or a README.

    Args:
        results: What was measured.
        headline: The first line.
        more: Tables that come from elsewhere, VBench's.
    """
    source, stated = results.provenance, agreement.rows(results)
    details = [summary.detail_table(results, kind) for kind in results.experiment.kinds]
    tables = [summary.main_table(results), *more, *details]
    versions = ", ".join(f"{name} {told}" for name, told in source.stated.items())
    warning = (
        [] if results.valid else ["**INVALID: a BF16 control differed from its reference; no figure here counts.**"]
    )
    scenes = len(results.experiment.scenes)
    parts = [
        f"# {headline}",
        *warning,
        *(f"## {table.title}\n\n{grid(table)}" for table in tables),
        *([f"## {agreement.title(results)}\n\n{listed(agreement.HEADS, stated)}"] if stated else []),
        f"Mean over {scenes} scene{'s' if scenes > 1 else ''} (or n, where it says so), 95 % interval in parentheses; best "
        f"compressed method in bold. {summary.unmeasured(results)}".rstrip(),
        f"`{source.command}`\n\n{source.date}, {source.platform}, {source.device}, {source.threads} threads; {versions}",
    ]
    return "\n\n".join(parts) + "\n"


def grid(table: Table) -> str:
    """One table.

    >>> print(grid(Table("Any", ("PSNR, dB ↑",), (("kivi", (summary.Entry("25.10", "", True),)),))))
    | method | PSNR, dB ↑ |
    |---|---|
    | kivi | **25.10** |
    """
    rows = []
    for label, entries in table.rows:
        cells = [f"**{entry.text}**" if entry.best else entry.text for entry in entries]
        rows.append(
            (label, *(f"{cell} ({e.interval})" if e.interval else cell for cell, e in zip(cells, entries, strict=True)))
        )
    return listed(("method", *table.heads), rows)


def listed(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Heads and rows as a table."""
    return "\n".join(map(_line, [heads, ["---"] * len(heads), *rows]))


def _line(row: Sequence[str]) -> str:
    return f"|{'|'.join(row)}|" if row[0] == "---" else f"| {' | '.join(row)} |"
