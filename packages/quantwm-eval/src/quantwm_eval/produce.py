"""From an experiment to a folder with results, page, tables and videos."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantwm_eval import report, results
from quantwm_eval.experiment import Experiment
from quantwm_eval.gallery import Gallery
from quantwm_eval.host import Host
from quantwm_eval.output import RESULTS
from quantwm_eval.provenance import Provenance
from quantwm_eval.results import Results
from quantwm_eval.run import Progress, run


@dataclass(frozen=True)
class Product:
    """What a run has written.

    Attributes:
        results: All cells.
        files: Results file, page, tables, folder of videos.
    """

    results: Results
    files: tuple[Path, ...]


def produce(experiment: Experiment, host: Host, provenance: Provenance, folder: Path, progress: Progress) -> Product:
    """Run, write each cell as soon as it is measured, then the report.

    Args:
        experiment: What to do.
        host: The model.
        provenance: What it is done with.
        folder: Where to write; files of an earlier run are replaced.
        progress: Called after every chunk of every video with what is being made.

    Raises:
        QuantWMError: The host cannot do the experiment.
        OSError: A file cannot be written.
    """
    gallery = Gallery(host.frame_rate)
    cells = []
    with (folder / RESULTS).open("w", encoding="utf-8") as file:
        file.write(results.header_line(experiment, provenance))
        for outcome in run(experiment, host, progress):
            file.write(results.cell_line(outcome.cell))
            file.flush()  # whatever stops the run, finished cells stay
            cells.append(outcome.cell)
            gallery.add(outcome)
    found = Results(experiment, provenance, tuple(cells))
    return Product(found, (folder / RESULTS, *report.write(folder, found, gallery)))
