"""The bundled experiments: each can be run, and what the paper states stands beside what it measures."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from quantwm_core.errors import UnknownNameError
from quantwm_eval import agreement, cli, experiment_file, markdown, named, paper, provenance, results, tables
from quantwm_eval.demo_host import DemoHost
from quantwm_eval.experiment import Experiment
from quantwm_eval.metric import Measurement
from quantwm_eval.results import Cell, Results
from tests.eval.fake_host import FakeHost

SOURCE = provenance.collect(["eval"])


def built(name: str) -> Experiment:
    return experiment_file.build(named.get(name).settings)


@pytest.fixture(scope="module")
def demo() -> DemoHost:
    return DemoHost()


@pytest.mark.parametrize("name", named.names())
def test_each_can_be_run_on_the_demo_world(name: str, demo: DemoHost) -> None:
    wanted = built(name)
    demo.check(wanted.scenes, wanted.frames, wanted.degrees)
    assert wanted.name == name
    assert Experiment.from_json(wanted.to_json()) == wanted
    assert len(wanted.scenes) >= 8
    assert "memory" in wanted.metrics, "quality without bytes is not a result"


def test_every_table_of_the_paper_that_states_a_figure_has_an_experiment() -> None:
    covered = {source for name in named.names() for source in named.get(name).sources}
    assert {target.source for target in paper.bundled()} <= covered
    tables = {f"paper/table{number}" for number in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11)}
    assert tables | {"paper/causal", "beyond/codes", "beyond/ahead"} == {*named.names()}


def test_the_long_rollout_is_ten_windows_long(demo: DemoHost) -> None:
    wanted = built("paper/table8")
    assert wanted.frames >= 10 * demo.pipeline.config.past_chunks * demo.chunk_frames
    assert "drift" in wanted.metrics


def test_names_are_listed_and_mistyped_ones_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--list"]) == 0
    told = capsys.readouterr().out
    assert all(f"{name} " in told and named.get(name).about in told for name in named.names())
    with pytest.raises(UnknownNameError, match="did you mean 'paper/table3'"):
        named.get("paper/tabel3")
    assert cli.main(["eval", "paper/tabel3"]) == 2
    assert "did you mean 'paper/table3'" in capsys.readouterr().err


def test_a_name_is_a_command_and_its_settings_can_be_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", lambda _setup: FakeHost())
    given = ["eval", "paper/table4", "--scenes", "0,1", "--frames", "12", "--chunks-per-seal", "1"]
    assert cli.main([*given, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    found = results.load(tmp_path / "results.jsonl")
    assert (found.experiment.name, found.experiment.samples, found.experiment.scenes) == ("paper/table4", 128, (0, 1))
    assert "What the paper states, and what was measured on demo" in told
    (line,) = (line for line in told.splitlines() if line.startswith("Table 4  Selection shift of qvg"))
    assert "61.4 %" in line


def run_of(name: str, figures: Mapping[tuple[str, str], tuple[float, ...]], model: str = "demo") -> Results:
    """A run with figures by method and quantity, one a scene."""
    wanted = dataclasses.replace(built(name), scenes=(0, 1), model=model)
    cells = [
        Cell(
            "walk", scene, 0, method.label, True,
            Measurement({of: values[scene] for (label, of), values in figures.items() if label == method.label}),
        )
        for method in wanted.methods
        for scene in wanted.scenes
    ]  # fmt: skip
    return Results(wanted, SOURCE, tuple(cells))


def test_measured_stands_beside_stated_with_its_difference() -> None:
    shifts = {("qvg", "selection_shift"): (0.5, 0.6), ("quantwm", "selection_shift"): (0.4, 0.3)}
    shift, reduction = agreement.lines(run_of("paper/table4", shifts))
    assert [shift.stated, shift.measured.mean] == pytest.approx([0.6136, 0.55])
    assert shift.difference == pytest.approx(0.55 - 0.6136)
    assert [reduction.stated, reduction.measured.mean] == pytest.approx([0.1019, 0.2])
    assert agreement.rows(run_of("paper/table4", shifts))[1][2:] == (
        "10.19 %", "20.00 %", "10.00–30.00 %", "2", "+9.81 %",
    )  # fmt: skip


def test_improvements_latency_bits_and_energy_are_derived() -> None:
    quality = {("qvg", "psnr"): (20.0, 22.0), ("quantwm", "psnr"): (25.0, 28.0)}
    gains = {x.target.model: x for x in agreement.lines(run_of("paper/table3", quality)) if "minus qvg" in x.what}
    assert gains["longcat_video"].stated == pytest.approx(25.508 - 20.683)
    assert gains["longcat_video"].measured.mean == pytest.approx(5.5)
    seconds = {("bf16", "seconds"): (2.0, 4.0), ("quantwm", "seconds"): (2.2, 4.4)}
    found = {x.target.model: x for x in agreement.lines(run_of("paper/table6", seconds))}
    assert found["hy_world"].measured.mean == pytest.approx(0.1)
    bits = {
        ("quantwm:rank=8", "bits_per_element"): (3.5, 3.5), ("quantwm:rank=16", "bits_per_element"): (3.75, 3.75),
        ("bf16", "query_energy"): (0.7, 0.8),
    }  # fmt: skip
    *increments, energy = agreement.lines(run_of("paper/table9", bits))
    assert [line.measured.mean for line in increments] == [0.25, 0.25]
    assert energy.measured.mean == pytest.approx(0.75)
    assert agreement.rows(run_of("paper/table9", bits))[-1][2] == "> 60.0 %"


def test_a_host_of_the_paper_is_held_against_its_own_figures() -> None:
    quality = {("quantwm", "psnr"): (25.0, 28.0)}
    models = {line.target.model for line in agreement.lines(run_of("paper/table3", quality, model="matrix_game"))}
    assert models == {"matrix_game"}


def test_other_experiments_are_held_against_nothing() -> None:
    run = run_of("paper/table4", {("qvg", "selection_shift"): (0.5, 0.6)})
    other = dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, name=""))
    assert agreement.lines(other) == []
    assert "paper" in tables.text(run)
    assert "paper" not in tables.text(other)
    assert "## What the paper states" in markdown.render(run, "x")
