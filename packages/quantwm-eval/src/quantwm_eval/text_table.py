"""A table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def grid(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns as wide as their widest entry, the first ones to the left and the others to the right.

    Args:
        rows: The first is the head.
        left: How many columns stand to the left.

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
            entry.ljust(width) if index < left else entry.rjust(width)
            for index, (entry, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
