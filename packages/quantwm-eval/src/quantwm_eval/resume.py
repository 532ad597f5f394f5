"""A results file that a run may be killed over, and be taken up again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantwm_core.errors import FormatError, StateError
from quantwm_eval import results
from quantwm_eval.experiment import Experiment
from quantwm_eval.provenance import ALWAYS, Provenance, short
from quantwm_eval.results import Results

MACHINE = ("platform", "device", "cores", "threads")
"""What must be equal, beside versions, for times to stand in one table."""


def begin(path: Path, experiment: Experiment, provenance: Provenance) -> Results:
    """Make a results file ready to be appended to.

    Where there is none it is made, with its first line whole or not at all; so is it where one holds no cell, or nothing at all,
    which is what a run leaves that failed before its first one. One with cells must be of the same experiment, host, versions,
    commit and machine; a last line that was cut off in the middle is removed, everything else stays.

    Args:
        path: The file.
        experiment: What is to be measured.
        provenance: What it is to be measured with.

    Returns:
        What the file holds, with its own provenance.

    Raises:
        StateError: The file is of another experiment, another version, another machine, another commit or a host that was
            made from something else (where both are known); the message says what differs, and the file is left as it was.
        FormatError: The file is foreign, broken before its last line, or holds a cell twice or that does not belong to it.
        OSError: It cannot be read or written.
    """
    if not path.exists() or not path.stat().st_size:
        return _fresh(path, experiment, provenance)
    found, length = read(path)
    if not found.cells:
        return _fresh(path, experiment, provenance)
    others = differing(found.experiment.to_json(), experiment.to_json()) + unlike(found.provenance, provenance)
    if others:
        raise StateError(f"{path}: belongs to another run: {'; '.join(others)}; name another folder to keep both")
    if length < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(length)
    return found


def _fresh(path: Path, experiment: Experiment, provenance: Provenance) -> Results:
    whole = path.with_name(f".{path.name}.new")
    whole.write_text(results.header_line(experiment, provenance), encoding="utf-8")
    whole.replace(path)
    return Results(experiment, provenance, ())


def read(path: Path) -> tuple[Results, int]:
    """Read a results file that may lack the end of its last line.

    Returns:
        Its whole lines, and how many bytes they take.

    Raises:
        FormatError, OSError: As :func:`begin`.
    """
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    found = results.parse(path, results.decode(path, content[:length]))
    counts = Counter(cell.key for cell in found.cells)
    twice = [key for key, count in counts.items() if count > 1]
    strange = counts.keys() - {*found.experiment.keys()}
    if twice or strange:
        key = twice[0] if twice else min(strange)
        what = "is there twice" if twice else "is none of its experiment"
        raise FormatError(f"{path}: the cell {' '.join(map(str, key))} {what}; do two runs write this file?")
    return found, length


def differing(there: Mapping[str, Any], here: Mapping[str, Any], told: Callable[[Any], str] = str) -> list[str]:
    """What two sets of settings differ in, in words; ``told`` says what a value is called.

    >>> differing({"frames": 40, "seeds": [0]}, {"frames": 64, "seeds": [0]})
    ['frames 40 there, 64 here']
    """
    names = dict.fromkeys((*there, *here))
    return [
        f"{name} {told(there.get(name))} there, {told(here.get(name))} here"
        for name in names
        if there.get(name) != here.get(name)
    ]


def unlike(there: Provenance, here: Provenance, machine: Sequence[str] = MACHINE) -> list[str]:
    """What two runs differ in, in words: what hosts were made from and commits, if both are known, versions and machines.

    Args:
        there: Of what was begun.
        here: Of what goes on.
        machine: Attributes that count beside versions.
    """
    theirs, ours = there.to_json(), here.to_json()
    known = ("commit",) if there.commit and here.commit else ()
    chosen = [{name: plain[name] for name in (*known, *machine)} for plain in (theirs, ours)]
    return [*_hosts(there, here), *_versions(there, here), *differing(chosen[0], chosen[1])]


def _versions(there: Provenance, here: Provenance) -> list[str]:
    """Their versions; those of distributions whose methods, metrics or host are used, where both state them."""
    compared = ALWAYS | (there.versions.keys() & here.versions.keys())
    theirs, ours = (
        {name: version for name, version in one.versions.items() if name in compared} for one in (there, here)
    )
    return differing(theirs, ours)


def _hosts(there: Provenance, here: Provenance) -> list[str]:
    """What their hosts were made from, where both are known and differ, by the option that says it."""
    if there.host is None or here.host is None:
        return []
    theirs, ours = ({f"--{part}": told for part, told in one.items()} for one in (there.host, here.host))
    return differing(theirs, ours, lambda told: "not given" if told is None else short(told))
