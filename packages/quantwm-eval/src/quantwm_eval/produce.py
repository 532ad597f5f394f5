"""From an experiment to a folder with results, page, tables and videos."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from quantwm_eval import films, report, results, resume
from quantwm_eval.experiment import Experiment
from quantwm_eval.gallery import TRUTH, Gallery
from quantwm_eval.host import Host
from quantwm_eval.output import RESULTS
from quantwm_eval.provenance import Provenance
from quantwm_eval.results import Results
from quantwm_eval.run import Progress, run

UNFINISHED = "unfinished-"
"""How the folder's name begins in which a run works that is to replace an earlier one."""


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

    Where an earlier run lies in the folder, the new one works in a folder of its own inside it, ``unfinished-...``. When it
    has succeeded its files take the place of the other's, whose videos that have no successor go. One that breaks off
    leaves the earlier run as it was and its finished cells where it worked.

    Args:
        experiment: What to do.
        host: The model.
        provenance: What it is done with.
        folder: Where to write.
        progress: Called after every chunk of every video with what is being made.

    Raises:
        QuantWMError: The host cannot do the experiment.
        FormatError: The earlier run's results file is foreign or broken.
        OSError: A file cannot be written.
    """
    if not (folder / RESULTS).exists():
        return _produce(experiment, host, provenance, folder, progress)
    outdated = _videos(folder)
    fresh = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))
    made = _produce(experiment, host, provenance, fresh, progress)
    _move(fresh, folder, outdated)
    return Product(made.results, tuple(folder / path.relative_to(fresh) for path in made.files))


def _produce(experiment: Experiment, host: Host, provenance: Provenance, folder: Path, progress: Progress) -> Product:
    gallery = Gallery(host.frame_rate)
    cells = []
    with (folder / RESULTS).open("x", encoding="utf-8") as file:
        file.write(results.header_line(experiment, provenance))
        for outcome in run(experiment, host, progress):
            file.write(results.cell_line(outcome.cell))
            file.flush()  # whatever stops the run, finished cells stay
            cells.append(outcome.cell)
            gallery.add(outcome)
    found = Results(experiment, provenance, tuple(cells))
    return Product(found, (folder / RESULTS, *report.write(folder, found, gallery)))


def _videos(folder: Path) -> set[Path]:
    """Where a run's videos lie, as its results file tells; a file without a line tells of none."""
    path = folder / RESULTS
    if not path.stat().st_size:
        return set()
    wanted = resume.read(path)[0].experiment
    labels = (TRUTH, *(method.label for method in wanted.methods))
    stems = [films.stem(kind, scene, label) for kind in wanted.kinds for scene in wanted.scenes for label in labels]
    return {folder / films.VIDEOS / f"{stem}.mp4" for stem in stems}


def _move(fresh: Path, folder: Path, outdated: set[Path]) -> None:
    """Put a finished run's files in their places, and remove what is outdated and has no successor."""
    files = [path for path in sorted(fresh.rglob("*")) if path.is_file()]
    places = [folder / path.relative_to(fresh) for path in files]
    for path, place in zip(files, places, strict=True):
        place.parent.mkdir(exist_ok=True)
        path.replace(place)
    for path in outdated.difference(places):
        path.unlink(missing_ok=True)
    shutil.rmtree(fresh)  # folders that are empty now
