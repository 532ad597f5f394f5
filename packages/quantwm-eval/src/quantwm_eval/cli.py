"""The ``quantwm`` command: arguments in, one call, messages out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from quantwm_core.errors import QuantWMError
from quantwm_eval import __version__
from quantwm_eval.commands import bench, compare, demo, evaluate, report
from quantwm_eval.commands.answer import FAILED, INTERRUPTED, Answer

KEEPING = ("demo", "eval")
"""Commands that write what they have as they go."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 done, 1 failed or the control was not exact, 2 bad options, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    try:
        answer: Answer = options.run(options, given, _tell)
    except KeyboardInterrupt:
        kept = "; finished cells are kept" if options.command in KEEPING else ""
        answer = Answer("", f"\ninterrupted{kept}", INTERRUPTED)
    except (QuantWMError, OSError) as error:
        answer = Answer("", f"quantwm: {error}", FAILED)
    if answer.text and (failure := _print(answer.text)):
        answer = Answer("", f"quantwm: {failure}", FAILED)
    if answer.complaint:
        print(answer.complaint, file=sys.stderr)
    return answer.status


def parser() -> argparse.ArgumentParser:
    """What can be typed."""
    top = argparse.ArgumentParser(prog="quantwm", description="Compressed caches for video world models, measured.")
    top.add_argument("--version", action="version", version=f"quantwm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, evaluate, report, compare, bench):
        command.add(commands)
    return top


def _print(text: str) -> OSError | None:
    """Print, and say why it was not; that a reader such as ``head`` has all that it wants before the end is no reason."""
    try:
        print(text, flush=True)
    except OSError as error:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, sys.stdout.fileno())  # what is left would be written once more when Python ends
        os.close(silent)
        return None if isinstance(error, BrokenPipeError) else error
    return None


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
