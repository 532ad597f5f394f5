"""docs/true-shapes.md: its tables are those of its data, and what it says can be typed."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from quantwm_eval import cli
from quantwm_eval.true_shapes import budget_table, measure, shape, table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "true-shapes.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("true_shapes_page", ROOT / "scripts" / "true_shapes_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_tables_are_those_of_the_data_and_of_the_formulas(script: ModuleType) -> None:
    assert script.filled(PAGE, script.tables()) == PAGE, "run python scripts/true_shapes_page.py"


def test_data_are_of_whole_shapes(script: ModuleType) -> None:
    lines = table.load(script.RESULTS)
    assert lines
    assert not any(line["tiny"] for line in lines)
    assert all(line["provenance"]["device"] != "cpu" for line in lines)


def test_an_untouched_host_that_rebuilds_holds_two_histories_and_ours_none(script: ModuleType) -> None:
    made_anew = [line for line in table.load(script.RESULTS) if shape.Shape.load(line["model"]).host != "rolling"]
    lines = [line for line in made_anew if not line["offload"]]  # elsewhere it is in the host's memory
    hosts = [line for line in lines if line["method"] == measure.HOST and table.fits(line)]
    assert hosts
    for host in hosts:
        dense = 2 * host["own_nbytes"]
        assert host["peak_nbytes"] >= host["before_nbytes"] + dense
        ours = [line for line in lines if table.key(line) == table.key(host) and line["sealed_nbytes"]]
        assert ours
        assert all(line["peak_nbytes"] <= host["peak_nbytes"] - dense / 2 for line in ours)


def test_a_peak_is_extrapolated_to_all_layers_and_as_other_depths_were_measured(script: ModuleType) -> None:
    lines = table.load(script.RESULTS)
    whole = [line for line in lines if line["layers_run"] == line["layers"]]
    assert whole
    assert all(table.peak(line) == line["peak_nbytes"] for line in whole)
    cut = [line for line in lines if line["layers_run"] < line["layers"]]
    assert all(table.peak(line) > line["weight_nbytes"] * line["layers"] / line["layers_run"] for line in cut)
    few, more = sorted(
        (line for line in cut if line["offload"] and line["method"] == "quantwm"), key=lambda line: line["layers_run"]
    )
    assert (few["model"], few["layers_run"], more["layers_run"]) == (more["model"], 8, 24)
    assert table.peak(few | {"layers": 24}) == pytest.approx(more["peak_nbytes"], rel=0.01)
    assert table.size(table.peak(more), digits=2) in table.markdown([more])


def test_the_readme_states_what_longcat_needs_at_least() -> None:
    head, *rows = budget_table.fitting(("longcat_video",))
    least = min((float(row[head.index("in all")]), row[1:3]) for row in rows)
    told = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"needs more than 24 GB in any setting: {least[0]:.1f} GiB with FP8 weights and two bits offloaded" in told
    assert least[0] > 24
    assert least[1] == ("2 bits, offloaded", "FP8")


@pytest.mark.parametrize("text", ["a", "<!-- t -->", "<!-- t --><!-- t --><!-- /t -->"])
def test_a_place_that_is_not_there_once_is_refused(text: str, script: ModuleType) -> None:
    with pytest.raises(ValueError, match="need one place"):
        script.filled(text, {"t": "new"})


def test_every_command_can_be_typed() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "quantwm"
        cli.parser().parse_args(arguments)


def test_every_model_is_named() -> None:
    assert all(shape.Shape.load(name).title in PAGE for name in shape.names())
