"""Results that docs/results.md tells of: whole, of the experiment whose name they bear, and exact in their control."""

from pathlib import Path

import pytest

from quantwm_eval import experiment_file, named, resume

FOLDER = Path(__file__).parents[2] / "docs" / "results"
FINISHED = sorted([*FOLDER.glob("paper-*.jsonl"), *FOLDER.glob("beyond-*.jsonl")])


def test_every_bundled_experiment_has_been_run() -> None:
    assert [path.stem for path in FINISHED] == sorted(name.replace("/", "-") for name in named.names())


@pytest.mark.parametrize("path", FINISHED, ids=lambda path: path.stem)
def test_results_are_all_of_their_experiment(path: Path) -> None:
    found, length = resume.read(path)
    assert found.experiment == experiment_file.build(named.get(path.stem.replace("-", "/")).settings)
    assert found.missing == 0
    assert found.valid
    assert length == path.stat().st_size
