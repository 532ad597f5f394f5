"""Results that docs/results.md tells of: whole, of the experiment whose name they bear, and exact in their control."""

from pathlib import Path

import pytest

from quantwm_eval import experiment_file, named, resume

FOLDER = Path(__file__).parents[2] / "docs" / "results"
FINISHED = sorted([*FOLDER.glob("paper-*.jsonl"), *FOLDER.glob("beyond-*.jsonl")])


def test_every_bundled_experiment_has_been_run_or_is_said_to_be_missing() -> None:
    page = (FOLDER.parent / "results.md").read_text(encoding="utf-8")
    missing = page.partition("## Not measured yet")[2].partition("## ")[0]
    there = {path.stem.replace("-", "/", 1) for path in FINISHED}
    assert [name for name in named.names() if (name in there) == (f"`{name}`" in missing)] == []


@pytest.mark.parametrize("path", FINISHED, ids=lambda path: path.stem)
def test_results_are_all_of_their_experiment(path: Path) -> None:
    found, length = resume.read(path)
    assert found.experiment == experiment_file.build(named.get(path.stem.replace("-", "/")).settings)
    assert found.missing == 0
    assert found.valid
    assert length == path.stat().st_size
