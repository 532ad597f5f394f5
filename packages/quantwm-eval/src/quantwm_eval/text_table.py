"""A table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry, the first to the left and the others to the right; the first row is the head.

    >>> print(grid([("method", "PSNR"), ("kivi", "25.10"), ("quantwm", "9.00")]))
    method    PSNR
    -------  -----
    kivi     25.10
    quantwm   9.00
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "  ".join(
            entry.rjust(width) if index else entry.ljust(width)
            for index, (entry, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
