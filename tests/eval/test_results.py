"""Results files: what is written is read, and what is broken is named."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core.errors import FormatError, StateError
from quantwm_eval import markdown, merge, provenance, report, results, resume, tables
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.gallery import Gallery
from quantwm_eval.metric import Measurement
from quantwm_eval.results import Cell, Results


@functools.cache
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
        (
            lambda lines: [lines[0].replace('"cores"', '"chores"', 1)],
            "line 1 is no head: provenance.cores: got nothing, need a whole number of at least 1",
        ),
        (lambda lines: [*lines[:-1], lines[-1][:-20]], "line 3 is not JSON"),
        (lambda lines: [*lines, "[" * 100_000], "line 4 is not JSON"),
        (lambda lines: [*lines, "1" * 10_000], "line 4 is not JSON"),
        (lambda lines: [*lines, "\u00e9\udce9"], "not a quantwm results file: .* decode byte"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, spoil: object, message: str) -> None:
    path = tmp_path / "results.jsonl"
    results.save(path, example())
    assert callable(spoil)
    path.write_text("\n".join(spoil(path.read_text().splitlines())), errors="surrogateescape")
    with pytest.raises(FormatError, match=message):
        results.load(path)


NEVER = object()


@pytest.mark.parametrize(
    ("place", "came", "message"),
    [
        (("experiment",), 3, "experiment: got 3, need an object"),
        (("experiment",), NEVER, "experiment: got nothing, need an object"),
        (("experiment", "methods"), NEVER, "experiment.methods: got nothing, need a list"),
        (("experiment", "methods"), "rtn", "experiment.methods: got 'rtn', need a list"),
        (("experiment", "methods"), ["bf16", 3], "experiment.methods[1]: got 3, need a text"),
        (("experiment", "methods"), ["bf16", "kivi:2"], "method 'kivi:2': '2' is not option=value"),
        (("experiment", "methods"), ["kivi"], "methods: the first must be 'bf16'"),
        (("experiment", "kinds"), ["stroll"], "unknown kind 'stroll'"),
        (("experiment", "scenes"), [0, -1], "experiment.scenes[1]: got -1, need a whole number of at least 0"),
        (("experiment", "scenes"), [], "scenes: got none, need at least one"),
        (("experiment", "scenes"), [0, 4, 4], "scenes: got 4 twice, need each once"),
        (("experiment", "scenes"), [math.nan], "experiment.scenes[0]: got nan, need a whole number of at least 0"),
        (("experiment", "seeds"), [2**63], f"seeds {2**63}: need numbers from 0"),
        (("experiment", "seeds"), [0.0], "experiment.seeds[0]: got 0.0, need a whole number of at least 0"),
        (("experiment", "frames"), -4, "experiment.frames: got -4, need a whole number of at least 1"),
        (("experiment", "frames"), "40", "experiment.frames: got '40', need a whole number of at least 1"),
        (("experiment", "degrees"), math.nan, "experiment.degrees: got nan, need a whole number of at least 1"),
        (("experiment", "batch"), True, "experiment.batch: got True, need a whole number of at least 1"),
        (("experiment", "samples"), -1, "experiment.samples: got -1, need a whole number of at least 0"),
        (("experiment", "model"), None, "experiment.model: got None, need a text"),
        (("experiment", "name"), 7, "experiment.name: got 7, need a text"),
        (("experiment", "framez"), 40, "experiment: got the unknown 'framez', need only methods, "),
        (("provenance", "versions"), 3, "provenance.versions: got 3, need an object"),
        (("provenance", "versions"), {"torch": 2.13}, "provenance.versions.torch: got 2.13, need a text"),
        (("provenance", "command"), 3, "provenance.command: got 3, need a text"),
        (("provenance", "threads"), 0, "provenance.threads: got 0, need a whole number of at least 1"),
        (("provenance", "host"), {"inputs": None}, "provenance.host.inputs: got None, need a text"),
        (("provenance", "device"), [], "provenance.device: got [], need a text"),
    ],
)
def test_a_head_that_does_not_fit_is_named_by_file_line_and_field(
    tmp_path: Path, place: tuple[str, ...], came: object, message: str
) -> None:
    assert_named(tmp_path / "results.jsonl", 1, place, came, f"line 1 is no head: {message}")


@pytest.mark.parametrize(
    ("place", "came", "message"),
    [
        (("seed",), [1], "seed: got [1], need a whole number of at least 0"),
        (("seed",), -1, "seed: got -1, need a whole number of at least 0"),
        (("scene",), True, "scene: got True, need a whole number of at least 0"),
        (("scene",), NEVER, "scene: got nothing, need a whole number of at least 0"),
        (("method",), None, "method: got None, need a text"),
        (("valid",), "no", "valid: got 'no', need true or false"),
        (("reference",), 3, "reference: got 3, need a text"),
        (("values",), NEVER, "values: got nothing, need an object"),
        (("values",), [1], "values: got [1], need an object"),
        (("values", "ssim"), "half", "values.ssim: got 'half', need a number or one of NaN, Infinity, -Infinity"),
        (("values", "ssim"), None, "values.ssim: got None, need a number"),
        (("values", "ssim"), 10**400, "values.ssim: got 1000000000"),
        (("curves", "psnr"), 30.0, "curves.psnr: got 30.0, need a list"),
        (("curves", "psnr"), [[30.0]], "curves.psnr[0]: got [30.0], need a number"),
        (("maps", "selection_shift"), [[0.0], [0.0, 1.0]], "maps.selection_shift: got [[0.0], [0.0, 1.0]], need rows"),
        (("maps", "selection_shift"), [0.0], "maps.selection_shift[0]: got 0.0, need a list"),
        (("ages", "selection_shift"), [None], "ages.selection_shift[0]: got None, need a number"),
    ],
)
def test_a_cell_that_does_not_fit_is_named_by_file_line_and_field(
    tmp_path: Path, place: tuple[str, ...], came: object, message: str
) -> None:
    assert_named(tmp_path / "results.jsonl", 2, place, came, f"line 2 is not a cell: {message}")


def assert_named(path: Path, number: int, place: tuple[str, ...], came: object, message: str) -> None:
    """A file with another entry in one of its lines is refused, whoever reads it."""
    results.save(path, example())
    lines = path.read_text().splitlines(keepends=True)
    plain = json.loads(lines[number - 1])
    *way, last = place
    held = plain
    for name in way:
        held = held[name]
    if came is NEVER:
        del held[last]
    else:
        held[last] = came
    lines[number - 1] = json.dumps(plain) + "\n"
    path.write_text("".join(lines))
    for read in (results.load, resume.read, lambda path: merge.load([path])):
        with pytest.raises(FormatError, match=re.escape(f"{path}: {message}")):
            read(path)
    with pytest.raises(FormatError, match=re.escape(f"{path}: {message}")):
        resume.begin(path, example().experiment, example().provenance)
    assert path.read_text() == "".join(lines)


def test_what_only_another_installation_has_is_shown_as_it_is_stored(tmp_path: Path) -> None:
    found = example()
    wanted = dataclasses.replace(
        found.experiment,
        methods=(*found.experiment.methods, MethodChoice("theirs", (("bits", 2),))),
        metrics=("psnr", "theirs_too", "ssim"),
    )
    (plain, _) = found.cells
    values = {"psnr": 20.0, "sparkle": 0.125, "dust": math.nan}
    measured = Measurement(values)
    path = tmp_path / "results.jsonl"
    ours = dataclasses.replace(plain, method="theirs:bits=2", measurement=measured)
    results.save(path, Results(wanted, found.provenance, (plain, ours)))
    back = merge.load([path])
    assert back.experiment == wanted
    assert resume.begin(path, wanted, found.provenance).cells[1].method == "theirs:bits=2"
    for text in (markdown.render(back, "headline"), tables.text(back, everything=True)):
        assert "Not installed here, so figures stand under their stored names: theirs_too." in text
        assert "0.1250" in text
        assert "– (not measured)" in text  # of sparkle under bf16, and of dust under both
    assert "walk,sparkle,,neither,theirs:bits=2,1,0.125," in tables.comma_separated(back)
    assert "theirs:bits=2" in report.page(back, Gallery(4), [])
    with pytest.raises(StateError, match=re.escape(f"{path}: belongs to another run: methods")):
        resume.begin(path, found.experiment, found.provenance)


def test_maps_of_a_method_are_of_one_model() -> None:
    head, cell = results.text(example()).splitlines()[:2]
    other = json.loads(cell) | {"scene": 1, "maps": {"selection_shift": [[0.5]]}}
    with pytest.raises(FormatError, match=r"line 3 .* maps.selection_shift: got the shape \(1, 1\), need \(2, 2\)"):
        results.parse(Path("results.jsonl"), "\n".join([head, cell, json.dumps(other)]))


@settings(max_examples=25, deadline=None)
@given(
    place=st.integers(0, 10**6),
    came=st.sampled_from([None, True, -1, 0, 10**400, 0.5, math.nan, "", "x", [], [[]], {}]),
)
def test_whatever_stands_in_a_file_it_is_read_or_refused(place: int, came: object) -> None:
    lines = [json.loads(line) for line in results.text(example()).splitlines()]
    held, name = (places := list(entries(lines)))[place % len(places)]
    held[name] = came
    try:
        found = results.parse(Path("results.jsonl"), "\n".join(map(json.dumps, lines)))
    except FormatError:
        return
    tables.comma_separated(found)
    markdown.render(found, "headline")
    assert results.text(results.parse(Path("again"), results.text(found))) == results.text(found)


def entries(value: object) -> Iterator[tuple[Any, Any]]:
    """Every entry of every list and object in a value: what holds it, and by which name."""
    if isinstance(value, (dict, list)):
        for name, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, name
            yield from entries(entry)


def test_numbers_of_any_kind_are_written_as_such() -> None:
    found: Any = {"psnr": np.float32(30), "ssim": True}
    written = json.loads(results.cell_line(Cell("walk", 0, 0, "bf16", True, Measurement(found))))["values"]
    assert written == {"psnr": 30.0, "ssim": 1.0}
    assert type(written["ssim"]) is float
