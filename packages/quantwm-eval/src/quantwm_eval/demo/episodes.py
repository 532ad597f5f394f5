"""Sequences of actions in the room: a persistent random walk, constant programs, and the look-away test.

The look-away test stands before a ball, turns away by a number of degrees, turns back, and keeps two true videos: of
the room as it is, and of the same room without that ball. A generated video has *redrawn* the ball when the region of
the ball is closer to the first than to the second. Nothing on the way back tells where the ball was: only memory does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantwm_eval.demo.rendering import render
from quantwm_eval.demo.room import (
    ACTIONS,
    BALL_RADIUS,
    BALLS,
    BODY_RADIUS,
    HEADINGS,
    ROOM_SIZE,
    STRIDE,
    Scene,
    clearance,
    draw_scenes,
    follow,
    hashed_uniform,
    step,
)

NOOP, FORWARD, LEFT, RIGHT, FORWARD_LEFT, FORWARD_RIGHT, BACK = range(len(ACTIONS))
OPPOSITE: tuple[int, ...] = (NOOP, BACK, RIGHT, LEFT, RIGHT, LEFT, FORWARD)
DEGREES_PER_TURN = 360 // HEADINGS
FIRST_FRAMES = 4

# Share of a macro action among those that the random walk draws, and its shortest and longest duration in frames.
WALK: tuple[tuple[int, float, int, int], ...] = (
    (NOOP, 0.08, 1, 4),
    (FORWARD, 0.16, 4, 14),
    (LEFT, 0.13, 3, 22),
    (RIGHT, 0.13, 3, 22),
    (FORWARD_LEFT, 0.14, 4, 14),
    (FORWARD_RIGHT, 0.14, 4, 14),
    (BACK, 0.22, 4, 14),
)
# How often the walk undoes a turn that it has finished, and turns to the room's centre rather than bump into something.
RETURN_SHARE = 0.5
SWERVE_SHARE = 0.9

_WALK_STREAM = 4096
_START_STREAM = 2048


@dataclass(frozen=True)
class Walk:
    """Episodes with true frames at hand: ``F`` frames, ``actions[:, f]`` leads from frame f-1 to frame f.

    Attributes:
        scene: batch shape ``[B]``.
        poses: float32 ``[B, F, 3]``.
        actions: int64 ``[B, F]``; entry 0 is 0, nothing led to the first frame.
    """

    scene: Scene
    poses: Tensor
    actions: Tensor

    def video(self) -> Tensor:
        """The true frames, uint8 ``[B, F, 64, 64, 3]``."""
        return render(self.scene, self.poses)


@dataclass(frozen=True)
class LookAway:
    """Look-away episodes of ``F = 4 + T`` frames: four standing still, ``T`` turning away, back, and standing.

    Attributes:
        scene: batch shape ``[B]``.
        ball: int64 ``[B]``, which ball is looked away from.
        poses: float32 ``[B, F, 3]``.
        actions: int64 ``[B, T]``, T a multiple of 4; what ``WorldPipeline.generate`` takes.
        video: uint8 ``[B, F, 64, 64, 3]``, the truth; the first four frames are the real ones to start from.
        counterfactual: the same without the ball.
        mask: bool ``[B, F, 64, 64]``, where the two videos differ: the region of the ball.
    """

    scene: Scene
    ball: Tensor
    poses: Tensor
    actions: Tensor
    video: Tensor
    counterfactual: Tensor
    mask: Tensor


def random_walk(seeds: Tensor, frames: int, look_away_share: float = 0.0) -> Walk:
    """Persistent random play: macro actions of several frames, turns that are often undone, seldom into obstacles.

    Args:
        seeds: int64 ``[B]``; an episode depends on its own seed only, whatever batch or device it is made in.
        frames: how many frames, the start included.
        look_away_share: share of episodes that begin before a ball, turn away from it and back.
    """
    device = seeds.device
    opposite = torch.tensor(OPPOSITE, device=device)
    scene = draw_scenes(seeds)
    looking = hashed_uniform(seeds, _START_STREAM) < look_away_share
    pose = torch.where(looking.unsqueeze(-1), stand_before_ball(scene, seeds)[0], free_start(scene, seeds))
    pause = torch.where(looking, (hashed_uniform(seeds, _START_STREAM + 1) * 5).long(), 0)
    action = torch.where(hashed_uniform(seeds, _START_STREAM + 2) < 0.5, LEFT, RIGHT)
    left = torch.where(looking, 8 + (hashed_uniform(seeds, _START_STREAM + 3) * 14).long(), 0)
    next_action, next_left = opposite[action], left
    poses, actions = [pose], [torch.zeros_like(action)]
    for frame in range(1, frames):
        stream = _WALK_STREAM + 8 * frame
        drawn, length = _draw_macro(seeds, stream)
        undone = ((drawn == LEFT) | (drawn == RIGHT)) & (hashed_uniform(seeds, stream + 2) < RETURN_SHARE)
        ended, queued = left == 0, next_left > 0
        action = torch.where(ended, torch.where(queued, next_action, drawn), action)
        left = torch.where(ended, torch.where(queued, next_left, length), left)
        next_action = torch.where(ended & ~queued, opposite[drawn], next_action)
        next_left = torch.where(ended, torch.where(~queued & undone, length, 0), next_left)

        waiting = pause >= frame
        played = torch.where(waiting, NOOP, action)
        ahead = step(scene, pose, played)
        moves = (played != NOOP) & (played != LEFT) & (played != RIGHT)
        blocked = moves & (ahead[:, :2] == pose[:, :2]).all(dim=-1)
        swerve = blocked & (hashed_uniform(seeds, stream + 3) < SWERVE_SHARE)
        turn = _towards_centre(pose)
        played, action = torch.where(swerve, turn, played), torch.where(swerve, turn, action)
        left = torch.where(swerve, 4 + (hashed_uniform(seeds, stream + 4) * 9).long(), left)
        next_action, next_left = torch.where(swerve, FORWARD, next_action), torch.where(swerve, 6, next_left)
        pose = torch.where(swerve.unsqueeze(-1), step(scene, pose, turn), ahead)
        poses.append(pose)
        actions.append(played)
        left = left - (~waiting).long()
    return Walk(scene, torch.stack(poses, dim=1), torch.stack(actions, dim=1))


def look_away(seeds: Tensor, degrees: int = 80) -> LookAway:
    """Look-away episodes; half of the seeds turn left first, half right.

    Args:
        seeds: int64 ``[B]``.
        degrees: how far to turn away, a multiple of 10 so that the way there and back fills whole chunks.

    Raises:
        ValueError: degrees not a positive multiple of 10.
    """
    if degrees <= 0 or degrees % (2 * DEGREES_PER_TURN):
        raise ValueError(f"degrees must be a positive multiple of {2 * DEGREES_PER_TURN}, got {degrees}")
    scene = draw_scenes(seeds)
    pose, ball = stand_before_ball(scene, seeds)
    turns = degrees // DEGREES_PER_TURN
    first = torch.where(hashed_uniform(seeds, _START_STREAM + 2) < 0.5, LEFT, RIGHT).unsqueeze(-1)
    actions = torch.cat([first.expand(-1, turns), (LEFT + RIGHT - first).expand(-1, turns)], dim=1)
    poses = torch.cat([pose.unsqueeze(1).expand(-1, FIRST_FRAMES, -1), follow(scene, pose, actions)], dim=1)
    video = render(scene, poses)
    counterfactual = render(scene.without_ball(ball), poses)
    mask = (video != counterfactual).any(dim=-1)
    return LookAway(scene, ball, poses, actions, video, counterfactual, mask)


def constant_program(seeds: Tensor, action: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """The truth of one action held from a place where moving ``frames`` strides ahead or back meets nothing.

    Args:
        seeds: int64 ``[B]``.
        action: index into ``ACTIONS``.
        frames: how many frames the action is held.

    Returns:
        First frames uint8 ``[B, 4, 64, 64, 3]`` (standing still), actions int64 ``[B, frames]``, true video uint8
        ``[B, frames, 64, 64, 3]``.
    """
    scene = draw_scenes(seeds)
    pose = _open_start(scene, seeds, frames)
    actions = torch.full((len(seeds), frames), action, dtype=torch.int64, device=seeds.device)
    still = render(scene, pose.unsqueeze(1).expand(-1, FIRST_FRAMES, -1))
    return still, actions, render(scene, follow(scene, pose, actions))


def free_start(scene: Scene, seeds: Tensor) -> Tensor:
    """A pose with room around it that looks into the room, within 60 degrees of its centre; float32 ``[B, 3]``."""
    tries = 16
    draws = torch.stack([hashed_uniform(seeds, _START_STREAM + 16 + k) for k in range(2 * tries)], dim=-1)
    points = BODY_RADIUS + (ROOM_SIZE - 2 * BODY_RADIUS) * draws.view(-1, tries, 2)
    best = clearance(scene, points).clamp(max=BODY_RADIUS + 0.25).argmax(dim=1)
    place = points[torch.arange(len(seeds), device=seeds.device), best]
    aside = (hashed_uniform(seeds, _START_STREAM + 8) - 0.5) * (HEADINGS / 3)
    heading = (_centre_heading(place) + aside).round() % HEADINGS
    return torch.cat([place, heading.unsqueeze(-1)], dim=-1)


def stand_before_ball(scene: Scene, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """A pose that looks straight at a ball 1.6 to 2.4 units away, nothing between.

    Returns:
        Poses float32 ``[B, 3]`` and which ball, int64 ``[B]``.
    """
    heading = torch.arange(HEADINGS, device=seeds.device, dtype=torch.float32)
    angle = heading * (2 * math.pi / HEADINGS)
    ahead = torch.stack([angle.cos(), angle.sin()], dim=-1)
    distances = torch.tensor([1.6, 2.0, 2.4], device=seeds.device)
    back = distances.view(1, 1, 3, 1) * ahead.view(1, HEADINGS, 1, 2)
    spots = scene.balls.view(-1, BALLS, 1, 1, 2) - back
    midway = scene.balls.view(-1, BALLS, 1, 1, 2) - 0.55 * back
    body = torch.minimum(clearance(scene, spots) - BODY_RADIUS, clearance(scene, midway) - 0.5 * BALL_RADIUS)
    in_room = ((spots > BODY_RADIUS) & (spots < ROOM_SIZE - BODY_RADIUS)).all(dim=-1)
    # Among the spots that will do, the seed picks: a hashed preference far smaller than the clearance that counts.
    taste = torch.stack([hashed_uniform(seeds, _START_STREAM + 128 + k) for k in range(HEADINGS * BALLS)], dim=-1)
    worth = body.clamp(max=0.05).masked_fill(~in_room, -1.0) + 0.01 * taste.view(-1, BALLS, HEADINGS, 1)
    best = worth.flatten(1).argmax(dim=1)
    rows = torch.arange(len(seeds), device=seeds.device)
    ball = best // (HEADINGS * 3)
    pose = torch.cat([spots.flatten(1, 3)[rows, best], heading[(best // 3) % HEADINGS].unsqueeze(-1)], dim=-1)
    return pose, ball


def _open_start(scene: Scene, seeds: Tensor, frames: int) -> Tensor:
    """The start, of many tried, from which ``frames`` strides ahead and back are freest."""
    rounds = 64
    many = torch.stack([(seeds + 7919 * k) % (1 << 32) for k in range(rounds)], dim=1).flatten()
    repeated = scene[torch.arange(len(seeds), device=seeds.device).repeat_interleave(rounds)]
    starts = free_start(repeated, many)
    freest = torch.full_like(starts[:, 0], math.inf)
    for action in (FORWARD, BACK):
        path = follow(repeated, starts, torch.full((len(many), frames), action, device=seeds.device))
        # In whole strides, so that rounding cannot make one device choose another start.
        travelled = ((path[:, -1, :2] - starts[:, :2]).norm(dim=-1) / STRIDE).round()
        freest = torch.minimum(freest, travelled)
    best = freest.view(-1, rounds).argmax(dim=1)
    return starts.view(-1, rounds, 3)[torch.arange(len(seeds), device=seeds.device), best]


def _draw_macro(seeds: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """An action and its duration from ``WALK``, int64 ``[B]`` each."""
    shares = torch.tensor([share for _, share, _, _ in WALK], device=seeds.device)
    index = torch.bucketize(hashed_uniform(seeds, stream), shares.cumsum(0)[:-1], right=True)
    action, shortest, longest = (torch.tensor([row[i] for row in WALK], device=seeds.device)[index] for i in (0, 2, 3))
    return action, shortest + (hashed_uniform(seeds, stream + 1) * (longest - shortest + 1)).long()


def _towards_centre(pose: Tensor) -> Tensor:
    """The turn that brings the view nearer to the room's centre, int64 ``[B]``."""
    return torch.where((_centre_heading(pose) - pose[:, 2]) % HEADINGS < HEADINGS / 2, LEFT, RIGHT)


def _centre_heading(place: Tensor) -> Tensor:
    """The heading, not rounded, that looks at the room's centre; float32 ``[B]``."""
    return torch.atan2(ROOM_SIZE / 2 - place[:, 1], ROOM_SIZE / 2 - place[:, 0]) * (HEADINGS / (2 * math.pi))
