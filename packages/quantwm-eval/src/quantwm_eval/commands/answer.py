"""What a command has to say at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

DONE, FAILED, BAD_OPTIONS, INTERRUPTED = 0, 1, 2, 130

Tell: TypeAlias = Callable[[str], None]
"""Says a line to whoever waits, on standard error."""


@dataclass(frozen=True)
class Answer:
    """The end of a command.

    Attributes:
        text: For standard output.
        complaint: For standard error; empty where there is none.
        status: Exit status.
    """

    text: str
    complaint: str = ""
    status: int = DONE
