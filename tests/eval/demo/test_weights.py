"""The bundled weights: they load, predict, obey and remember; and how that is measured."""

import json
from importlib import resources

import pytest
import torch

from quantwm_eval.demo import gates
from quantwm_eval.demo.episodes import constant_program, look_away, random_walk
from quantwm_eval.demo.room import ACTIONS
from quantwm_eval.demo.sampler import WorldPipeline, load


@pytest.fixture(scope="module")
def world() -> WorldPipeline:
    return load()


def test_the_file_is_small() -> None:
    assert len((resources.files("quantwm_eval.demo") / "weights" / "room.safetensors").read_bytes()) <= 30_000_000


def test_three_chunks_beat_copying_the_last_frame(world: WorldPipeline) -> None:
    walk = random_walk(torch.tensor([11, 12]), 16)
    video = walk.video()
    made = world.generate(video[:, :4], walk.actions[:, 4:], seeds=[11, 12]).float()
    error = (made - video[:, 4:].float()).square().mean()
    copied = (video[:, 3:4].float() - video[:, 4:].float()).square().mean()
    assert 10 * torch.log10(copied / error) > 6.0


def test_a_ball_is_remembered_by_the_cache_and_by_nothing_else(world: WorldPipeline) -> None:
    seeds = torch.tensor([21])
    episodes = look_away(seeds, 80)
    assert gates.redrawn(episodes, gates.generate_look_away(world, episodes, seeds, 7)).all()
    assert not gates.redrawn(episodes, gates.generate_look_away(world, episodes, seeds, 1)).any()
    assert world.local_attn_chunks == 7


def test_left_and_right_are_told_apart(world: WorldPipeline) -> None:
    seeds = torch.tensor([31])
    (start, left, to_left), (_, _, to_right) = (constant_program(seeds, ACTIONS.index(a), 4) for a in ("left", "right"))
    made = world.generate(start, left, seeds=[31]).float()
    assert (made - to_left.float()).square().mean() < 0.3 * (made - to_right.float()).square().mean()


def test_truth_scores_as_redrawn_and_the_empty_room_does_not() -> None:
    episodes = look_away(torch.arange(3), 20)
    assert gates.redrawn(episodes, episodes.video[:, 4:]).all()
    assert not gates.redrawn(episodes, episodes.counterfactual[:, 4:]).any()
    assert torch.isinf(gates.region_psnr(episodes, episodes.video[:, 4:])).all()


def test_sharpness_falls_under_blur() -> None:
    video = random_walk(torch.arange(8), 1).video()[:, 0]
    blurred = torch.nn.functional.avg_pool2d(video.permute(0, 3, 1, 2).float(), 9, 1).permute(0, 2, 3, 1)
    assert gates.sharpness(blurred) < 0.9 * gates.sharpness(video[:, 4:-4, 4:-4])


def test_a_contact_sheet_has_truth_above_generated() -> None:
    truth, made = torch.full((2, 8, 64, 64, 3), 200, dtype=torch.uint8), torch.zeros(2, 8, 64, 64, 3, dtype=torch.uint8)
    sheet = gates.contact_sheet(truth, made, columns=4)
    assert sheet.shape == (256, 256, 3)
    assert sheet[:64].unique().tolist() == [200]
    assert sheet[64:128].unique().tolist() == [0]


def test_the_recorded_gates_are_those_of_the_code() -> None:
    record = json.loads((resources.files("quantwm_eval.demo") / "weights" / "gates.json").read_text())
    judged = record.pop("gates")
    assert judged == [
        {
            "name": gate.name,
            "value": gate.value,
            "at_least": gate.at_least,
            "at_most": gate.at_most,
            "passed": gate.passed,
        }
        for gate in gates.gates(gates.Figures(**record))
    ]
