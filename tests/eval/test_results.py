"""Results files: what is written is read, and what is broken is named."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from quantwm_core.errors import FormatError
from quantwm_eval import provenance, results
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.metric import Measurement
from quantwm_eval.results import Cell, Results


def example() -> Results:
    measured = Measurement(
        {"psnr": math.inf, "ssim": 0.5, "selection_shift": math.nan},
        {"psnr": np.array([math.inf, 30.0])},
        {"selection_shift": np.array([[0.0, math.nan], [0.25, 1.0]])},
        {"selection_shift": np.array([math.nan, 0.5])},
    )
    cells = (Cell("walk", 0, 0, "bf16", True, measured), Cell("walk", 0, 0, "kivi", False, measured))
    return Results(Experiment((MethodChoice("bf16"), MethodChoice("kivi")), (0,)), provenance.collect(["demo"]), cells)


def test_a_file_is_read_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.save(path, example())
    back = results.load(path)
    assert back.experiment == example().experiment
    assert back.provenance.versions == example().provenance.versions
    assert not back.valid
    for cell, wanted in zip(back.cells, example().cells, strict=True):
        assert (cell.kind, cell.scene, cell.seed, cell.method, cell.valid) == (
            wanted.kind,
            0,
            0,
            wanted.method,
            wanted.valid,
        )
        np.testing.assert_equal(dict(cell.measurement.values), dict(wanted.measurement.values))
        np.testing.assert_array_equal(cell.measurement.curves["psnr"], wanted.measurement.curves["psnr"])
        np.testing.assert_array_equal(
            cell.measurement.maps["selection_shift"], wanted.measurement.maps["selection_shift"]
        )
        np.testing.assert_array_equal(cell.measurement.ages["selection_shift"], [math.nan, 0.5])


def test_a_file_from_before_ages_and_digests_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.save(path, example())
    head, *lines = path.read_text().splitlines()
    old = [json.loads(line) for line in lines]
    for cell in old:
        del cell["ages"], cell["reference"]
    path.write_text("\n".join([head, *map(json.dumps, old)]))
    for cell in results.load(path).cells:
        assert cell.reference == ""
        assert not cell.measurement.ages


def test_every_line_is_strict_json_and_states_its_versions(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.save(path, example())

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0]["experiment"]["seeds"] == [0]
    assert {"python", "torch", "numpy", "quantwm-core", "quantwm-eval", "av"} <= set(lines[0]["provenance"]["versions"])
    assert lines[1]["values"]["psnr"] == "Infinity"


def changed(line: str, *path: str, **changes: object) -> str:
    """A line with other entries in the object at a path."""
    plain = json.loads(line)
    place = plain
    for name in path:
        place = place[name]
    place.update(changes)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: [], "not a quantwm results file"),
        (lambda lines: ["[1]", *lines[1:]], "line 1 is not an object"),
        (lambda _: ['{"format": "other"}'], "not a quantwm results file"),
        (
            lambda lines: [lines[0].replace('"version": 1', '"version": 2', 1)],
            "version 2, this quantwm-eval reads version 1",
        ),
        (lambda lines: [lines[0].replace('"cores"', '"chores"', 1)], "line 1 is incomplete"),
        (lambda lines: [*lines[:-1], lines[-1][:-20]], "line 3 is not JSON"),
        (lambda lines: [changed(lines[0], "provenance", versions=3)], "line 1 is incomplete: versions 3: need dict"),
        (lambda lines: [changed(lines[0], "provenance", command=3)], "line 1 is incomplete: command 3: need str"),
        (lambda lines: [changed(lines[0], experiment=3)], "line 1 is incomplete"),
        (lambda lines: [lines[0], changed(lines[1], seed=[1])], r"line 2 is not a cell: seed \[1\]: need int"),
        (lambda lines: [lines[0], changed(lines[1], scene=True)], "line 2 is not a cell: scene True: need int"),
        (lambda lines: [lines[0], changed(lines[1], method=None)], "line 2 is not a cell: method None: need str"),
        (lambda lines: [lines[0], changed(lines[1], valid="no")], "line 2 is not a cell: valid 'no': need bool"),
        (lambda lines: [lines[0], lines[1].replace('"values"', '"figures"')], "line 2 is not a cell"),
        (lambda lines: [lines[0], lines[1].replace("0.5", '"half"')], "line 2 is not a cell"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, spoil: object, message: str) -> None:
    path = tmp_path / "results.jsonl"
    results.save(path, example())
    assert callable(spoil)
    path.write_text("\n".join(spoil(path.read_text().splitlines())))
    with pytest.raises(FormatError, match=message):
        results.load(path)
