"""Results that docs/results.md tells of: whole, of the experiment whose name they bear, and exact in their control."""

from pathlib import Path

import pytest

from quantwm_eval import experiment_file, named, resume

FOLDER = Path(__file__).parents[2] / "docs" / "results"
FINISHED = sorted(FOLDER.glob("paper-*.jsonl"))
UNFINISHED = sorted((FOLDER / "unfinished").glob("*.jsonl"))


def test_there_are_some() -> None:
    assert len(FINISHED) >= 7


@pytest.mark.parametrize("path", FINISHED, ids=lambda path: path.stem)
def test_finished_results_are_all_of_their_experiment(path: Path) -> None:
    found, length = resume.read(path)
    name = path.stem.replace("-", "/")
    assert found.experiment == experiment_file.build(named.get(name).settings)
    assert found.missing == 0
    assert found.valid
    assert length == path.stat().st_size


@pytest.mark.parametrize("path", UNFINISHED, ids=lambda path: path.stem)
def test_unfinished_results_can_be_gone_on_from(path: Path) -> None:
    found, length = resume.read(path)
    assert found.missing > 0
    assert found.valid
    assert found.experiment.name in named.names()
    assert length == path.stat().st_size
