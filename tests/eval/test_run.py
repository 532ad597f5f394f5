"""Experiments on the fake host: the control, equal conditions, and independence of the batch."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from quantwm_core.errors import ParameterError
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.run import Outcome, count_chunks, run
from tests.eval.fake_host import CHUNK, FakeHost

METHODS = (MethodChoice("bf16"), MethodChoice("rtn"), MethodChoice("quantwm"))
WANTED = Experiment(METHODS, scenes=(0, 1, 2), frames=10, batch=2, chunks_per_seal=1)
TIMED = ("seconds", "seal_seconds", "decode_seconds")


def outcomes(experiment: Experiment = WANTED, host: FakeHost | None = None) -> list[Outcome]:
    return list(run(experiment, host or FakeHost()))


def untimed(found: Outcome) -> dict[str, float]:
    return {name: value for name, value in found.cell.measurement.values.items() if name not in TIMED}


def test_every_cell_is_measured_once() -> None:
    found = [(o.cell.kind, o.cell.scene, o.cell.seed, o.cell.method) for o in outcomes()]
    wanted = [(kind, scene, 0, m.label) for kind in WANTED.kinds for scene in WANTED.scenes for m in METHODS]
    assert sorted(found) == sorted(wanted)


def test_the_control_is_exact_and_the_others_are_not() -> None:
    for outcome in outcomes():
        assert outcome.cell.valid
        exact = outcome.cell.method == "bf16"
        assert (outcome.cell.measurement.values["psnr"] == math.inf) is exact
        assert np.array_equal(outcome.video, outcome.reference) is exact
        assert (outcome.cell.measurement.values["selection_shift"] == 0) is exact


def test_a_host_that_is_not_steady_makes_the_run_invalid() -> None:
    found = outcomes(host=FakeHost(unsteady=True))
    assert not any(outcome.cell.valid for outcome in found)


def test_the_batch_changes_no_figure_and_no_pixel() -> None:
    by_key = {}
    for batch in (1, 3):
        for outcome in outcomes(dataclasses.replace(WANTED, batch=batch)):
            key = (outcome.cell.kind, outcome.cell.scene, outcome.cell.method)
            if batch == 1:
                by_key[key] = outcome
            else:
                np.testing.assert_array_equal(outcome.video, by_key[key].video)
                assert untimed(outcome) == pytest.approx(untimed(by_key[key]), rel=1e-6)


def test_scenes_are_batched_as_asked() -> None:
    host = FakeHost()
    outcomes(host=host)
    assert max(host.batches) == 2
    assert host.batches.count(2) == host.batches.count(1) - len(METHODS)  # scenes 0 and 1, then 2; warm-up before


def test_seeds_give_other_videos_and_the_same_seed_the_same() -> None:
    two = dataclasses.replace(WANTED, seeds=(0, 1), scenes=(0,), kinds=("walk",))
    first, second = (outcomes(two) for _ in range(2))
    assert [untimed(o) for o in first] == [untimed(o) for o in second]
    videos = {outcome.cell.seed: outcome.video for outcome in first if outcome.cell.method == "bf16"}
    assert not np.array_equal(videos[0], videos[1])


def test_progress_is_told_of_every_chunk_and_no_more() -> None:
    titles: list[str] = []
    list(run(WANTED, FakeHost(), titles.append))
    assert len(titles) == count_chunks(WANTED, FakeHost()) == 2 * 3 * (len(METHODS) + 1) * 10 // CHUNK
    assert titles[0] == "walk 0-1, reference"
    assert "look-away 2, quantwm" in titles


def test_bytes_are_those_of_the_cost_formula() -> None:
    for outcome in outcomes():
        values = outcome.cell.measurement.values
        if outcome.cell.method == "bf16":
            assert values["bits_per_element"] == 16
            assert values["compression"] == 1
        elif outcome.cell.method == "rtn":
            assert 2 < values["bits_per_element"] < 6
        assert len(outcome.cell.measurement.curves["cache_bytes"]) == 10 // CHUNK


def test_no_global_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    outcomes()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_host_cannot_do_is_said_before_anything_runs() -> None:
    with pytest.raises(ParameterError, match="frames 5"):
        count_chunks(dataclasses.replace(WANTED, frames=5), FakeHost())
