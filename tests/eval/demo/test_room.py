"""The true room: reproducible, of the right geometry, with nothing random outside the seed."""

import math

import pytest
import torch

from quantwm_eval.demo.episodes import FIRST_FRAMES, constant_program, look_away, random_walk
from quantwm_eval.demo.rendering import EYE_HEIGHT, FIELD_OF_VIEW_DEGREES, IMAGE_SIZE, render
from quantwm_eval.demo.room import (
    ACTIONS,
    BALL_RADIUS,
    BODY_RADIUS,
    HELD_OUT_SEEDS,
    PILLARS,
    ROOM_SIZE,
    STRIDE,
    TRAINING_SEEDS,
    Scene,
    clearance,
    draw_scene,
    draw_scenes,
    follow,
    hashed_uniform,
    step,
)

LEFT, FORWARD, BACK = (ACTIONS.index(name) for name in ("left", "forward", "back"))


def equal(one: Scene, other: Scene) -> bool:
    fields = ("balls", "colours", "present", "palette")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in fields)


def test_a_scene_depends_on_its_seed_alone() -> None:
    batch = draw_scenes(torch.arange(20))
    assert equal(batch[7], draw_scene(7))
    assert not equal(draw_scene(7), draw_scene(8))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    random_walk(torch.arange(2), 8).video()
    assert torch.equal(before, torch.random.get_rng_state())


def test_hashed_numbers_are_uniform_and_independent_between_streams() -> None:
    seeds = torch.arange(20_000)
    draws = torch.stack([hashed_uniform(seeds, stream) for stream in (0, 1, 4096)])
    counts = torch.histc(draws[0], 10, 0.0, 1.0)
    assert (counts - 2_000).abs().max() < 250
    assert torch.corrcoef(draws).fill_diagonal_(0.0).abs().max() < 0.03


def test_training_and_held_out_seeds_do_not_meet() -> None:
    assert HELD_OUT_SEEDS.stop <= TRAINING_SEEDS.start


def test_balls_keep_apart_and_have_three_colours() -> None:
    scene = draw_scenes(torch.arange(200))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (scene.balls[:, one] - scene.balls[:, other]).norm(dim=-1).min() > 0.8
        assert (scene.colours[:, one] != scene.colours[:, other]).all()
    for pillar in PILLARS:
        assert (scene.balls - torch.tensor(pillar)).norm(dim=-1).min() > 0.8


@pytest.mark.parametrize("seeds", [torch.tensor([-1]), torch.tensor([1 << 32]), torch.tensor([0.5]), torch.tensor(3)])
def test_bad_seeds_are_refused(seeds: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="seeds must"):
        draw_scenes(seeds)


def test_turning_left_moves_the_horizon_right_by_the_true_pixels() -> None:
    scene = draw_scene(3)
    pose = torch.tensor([4.0, 4.0, 20.0])
    turned = step(scene, pose, torch.tensor(LEFT))
    pictures = render(scene, torch.stack([pose, turned])).float()
    before, after = pictures[:, IMAGE_SIZE // 2 - 1].mean(dim=-1)
    reach = math.tan(math.radians(FIELD_OF_VIEW_DEGREES / 2))
    columns = torch.arange(8, 48)
    across = ((columns + 0.5) / (IMAGE_SIZE / 2) - 1.0) * reach
    moved = torch.tan(torch.atan(across) + math.radians(5.0)) / reach
    target = (moved + 1.0) * (IMAGE_SIZE / 2) - 0.5
    low = target.floor().long()
    share = target - low
    expected = after[low] * (1 - share) + after[low + 1] * share
    assert (target - columns).mean() == pytest.approx(4.0, abs=0.8)
    assert (before[columns] - expected).abs().mean() < 0.35 * (before[columns] - after[columns]).abs().mean()


def test_walls_and_balls_stop_whoever_walks_into_them() -> None:
    scene = draw_scenes(torch.arange(50))
    start = random_walk(torch.arange(50), 1).poses[:, 0]
    poses = follow(scene, start, torch.full((50, 80), FORWARD))
    assert clearance(scene, poses[..., :2]).min() >= BODY_RADIUS - 1e-4
    assert torch.equal(poses[:, -1], poses[:, -2])
    assert (poses[..., :2] > 0).all()
    assert (poses[..., :2] < ROOM_SIZE).all()


def test_back_undoes_forward_in_the_open() -> None:
    scene = draw_scene(0).without_ball(0).without_ball(1).without_ball(2)
    start = torch.tensor([4.0, 4.0, 18.0])
    ahead = step(scene, start, torch.tensor(FORWARD))
    assert ahead[1] - start[1] == pytest.approx(STRIDE)
    assert torch.allclose(step(scene, ahead, torch.tensor(BACK)), start, atol=1e-6)


def test_a_ball_looks_as_large_as_it_is() -> None:
    scene = Scene(
        torch.tensor([[6.0, 4.0], [1.0, 1.0], [1.0, 7.0]]),
        torch.tensor([0, 1, 2]),
        torch.tensor([True, False, False]),
        torch.tensor([0, 0]),
    )
    pose = torch.tensor([[3.0, 4.0, 0.0]])
    difference = (render(scene, pose) != render(scene.without_ball(0), pose)).any(dim=-1)[0]
    focal = IMAGE_SIZE / 2 / math.tan(math.radians(FIELD_OF_VIEW_DEGREES / 2))
    assert difference.any(dim=0).sum() == pytest.approx(2 * BALL_RADIUS * focal / 3.0, abs=2)
    middle = difference.any(dim=1).nonzero().float().mean()
    assert middle == pytest.approx(IMAGE_SIZE / 2 + focal * (EYE_HEIGHT - BALL_RADIUS) / 3.0, abs=1.5)


def test_an_episode_does_not_depend_on_its_batch() -> None:
    together, alone = random_walk(torch.arange(6), 24, 0.5), random_walk(torch.tensor([4]), 24, 0.5)
    assert torch.equal(together.actions[4], alone.actions[0])
    assert torch.equal(together.video()[4, -1], alone.video()[0, -1])


def test_the_walk_uses_every_action_and_back_often_enough() -> None:
    walk = random_walk(torch.arange(400), 48)
    shares = walk.actions[:, 1:].flatten().bincount(minlength=len(ACTIONS)) / walk.actions[:, 1:].numel()
    assert shares.min() > 0.01
    assert shares[BACK] > 0.1
    assert torch.equal(walk.poses[:, 5], step(walk.scene, walk.poses[:, 4], walk.actions[:, 5]))


@pytest.mark.parametrize("degrees", [80, 100])
def test_look_away_comes_back_to_a_ball_that_was_out_of_sight(degrees: int) -> None:
    episodes = look_away(torch.arange(3), degrees)
    turns = degrees // 5
    assert episodes.actions.shape == (3, 2 * turns)
    assert torch.equal(episodes.poses[:, 0], episodes.poses[:, -1])
    assert episodes.mask[:, -1].flatten(1).sum(dim=1).min() > 30
    assert not episodes.mask[:, FIRST_FRAMES + turns - 1].any()
    outside = ~episodes.mask.unsqueeze(-1).expand_as(episodes.video)
    assert torch.equal(episodes.video[outside], episodes.counterfactual[outside])


def test_look_away_refuses_angles_that_do_not_fill_chunks() -> None:
    with pytest.raises(ValueError, match="multiple of 10, got 85"):
        look_away(torch.arange(1), 85)


def test_a_constant_program_is_never_blocked() -> None:
    still, actions, video = constant_program(torch.arange(4), FORWARD, 12)
    assert still.shape[1] == FIRST_FRAMES
    assert actions.unique().tolist() == [FORWARD]
    assert (video[:, 1:] != video[:, :-1]).flatten(2).any(dim=-1).all()
