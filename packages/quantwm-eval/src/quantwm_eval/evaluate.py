"""An experiment to a results file, as far as it is not there yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from quantwm_eval import ownership, results
from quantwm_eval.experiment import Experiment
from quantwm_eval.films import Films
from quantwm_eval.host import Host
from quantwm_eval.results import Cell, Results
from quantwm_eval.run import Progress, run


def evaluate(
    experiment: Experiment,
    host: Host,
    begun: Results,
    path: Path,
    progress: Progress = lambda _title: None,
    films: Films | None = None,
) -> Results:
    """Run what is missing and write each cell as soon as it is measured.

    A run that is killed, whenever that may be, loses the batch of cells in flight and nothing else; called again, it goes
    on from there and ends with the figures of an uninterrupted run.

    Args:
        experiment: What to do.
        host: The model.
        begun: What :func:`quantwm_eval.resume.begin` found in the file.
        path: The results file.
        progress: Called after every chunk of every video with what is being made.
        films: Keeps some of the videos, or None.

    Raises:
        QuantWMError: The host cannot do the experiment, or its BF16 video is not that of the finished cells.
        StateError: The file was removed or replaced meanwhile.
        OSError: The file cannot be written.
    """

    def measured() -> Iterator[Cell]:
        for outcome in run(experiment, host, progress, begun.cells):
            if films is not None:
                films.add(outcome)  # before its cell: a finished cell has its film
            yield outcome.cell

    return append(begun, path, measured())


def append(begun: Results, path: Path, cells: Iterable[Cell]) -> Results:
    """Write cells as they come to a file that was begun, each at once.

    Args:
        begun: What is there.
        path: The results file.
        cells: What is to be added.

    Raises:
        StateError: The file was removed or replaced meanwhile, so that a cell would be lost.
        OSError: The file cannot be written.
    """
    found = list(begun.cells)
    with path.open("a", encoding="utf-8") as file:
        for cell in cells:
            ownership.check_own(file, path)
            file.write(results.cell_line(cell))
            file.flush()
            found.append(cell)
    return Results(begun.experiment, begun.provenance, tuple(found))
