"""Write the tables of docs/true-shapes.md from docs/results/true-shapes.jsonl and from the formulas.

    python scripts/true_shapes_page.py

A table stands between two comments that bear its name; what is between them is replaced, all else stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantwm_eval.markdown import listed
from quantwm_eval.true_shapes import budget_table, shape, table

DOCS = Path(__file__).parents[1] / "docs"
PAGE, RESULTS = DOCS / "true-shapes.md", DOCS / "results" / "true-shapes.jsonl"
NOT_YET = "Not yet measured on a GPU."


def tables() -> dict[str, str]:
    """Tables by name."""
    lines = table.load(RESULTS) if RESULTS.exists() else []
    groups = dict.fromkeys(map(table.key, lines))
    measured = [[line for line in lines if table.key(line) == each] for each in groups]
    each = (f"### {table.title(group[0])}\n\n{table.markdown(group)}" for group in measured)
    computed = {"fitting": budget_table.fitting(shape.names()), "lengths": budget_table.lengths(shape.names())}
    rows = {name: listed(head, body) for name, (head, *body) in computed.items()}
    return {"measured": "\n\n".join(each) or NOT_YET, **rows}


def filled(text: str, by_name: Mapping[str, str]) -> str:
    r"""A page with its tables replaced.

    >>> filled("a <!-- t -->old<!-- /t --> b", {"t": "new"})
    'a <!-- t -->\n\nnew\n\n<!-- /t --> b'
    """
    for name, made in by_name.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        old, found, after = rest.partition(end)
        if not found or begin in old or begin in after:
            raise ValueError(f"{name}: need one place in the page, between {begin} and {end}")
        text = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
