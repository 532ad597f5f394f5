"""Prompt suites in text files, one prompt a line, as MovieGen's comes."""

from __future__ import annotations

from pathlib import Path

from quantwm_core.errors import FormatError


def read(path: Path) -> tuple[str, ...]:
    """Read a suite: UTF-8, one prompt a line; empty lines are passed over.

    Raises:
        FormatError: The file is no text, or holds no prompt.
        OSError: It cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text: {error}") from error
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise FormatError(f"{path}: holds no prompt; one a line is needed")
    return found
