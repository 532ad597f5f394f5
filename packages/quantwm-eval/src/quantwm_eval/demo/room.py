"""A furnished room and how one moves in it: what stands where, and which pose follows which action.

The room is 8 x 8 units with a light and a dark pillar at fixed places. An episode draws the rest from its seed: place and colour of
three balls, and the colours of walls and floor. Everything is a pure function of explicit integers, so the *true* video
of any action sequence is at hand (see ``rendering``), and so is that of the same room without one of its balls.

Conventions: a pose is float32 ``[x, y, heading]``, heading counted in steps of 5 degrees, counter-clockwise, 0 along
+x. Randomness is a hash of (seed, stream number): no generator, no global state, the same on every device.

Seeds: ``HELD_OUT_SEEDS`` are for measuring, ``TRAINING_SEEDS`` are for training; the two ranges do not meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantwm_eval.demo.palette import BALL_COLOURS, FLOOR_COLOURS, WALL_COLOURS

ACTIONS: tuple[str, ...] = ("noop", "forward", "left", "right", "forward+left", "forward+right", "back")
MOVES: tuple[int, ...] = (0, 1, 0, 0, 1, 1, -1)
TURNS: tuple[int, ...] = (0, 0, 1, -1, 1, -1, 0)

HELD_OUT_SEEDS = range(1 << 24)
TRAINING_SEEDS = range(1 << 24, 1 << 32)

ROOM_SIZE = 8.0
HEADINGS = 72
STRIDE = 0.15
BODY_RADIUS = 0.7
BALLS = 3
BALL_RADIUS = 0.3
PILLAR_RADIUS = 0.25
PILLARS: tuple[tuple[float, float], ...] = ((2.6, 2.2), (5.7, 5.3))

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Scene:
    """What an episode draws from its seed; a batch of episodes when the fields have a leading axis.

    Attributes:
        balls: float32 ``[..., 3, 2]``, centres on the floor plan, units.
        colours: int64 ``[..., 3]``, index into ``BALL_COLOURS``, no colour twice in a scene.
        present: bool ``[..., 3]``; False takes a ball out of the room.
        palette: int64 ``[..., 2]``, index into ``WALL_COLOURS`` and ``FLOOR_COLOURS``.
    """

    balls: Tensor
    colours: Tensor
    present: Tensor
    palette: Tensor

    @property
    def shape(self) -> torch.Size:
        """Batch shape: ``()`` for one scene, ``(B,)`` for a batch."""
        return self.palette.shape[:-1]

    def __getitem__(self, index: int | slice | Tensor) -> Scene:
        """Scenes picked from a batch."""
        return Scene(self.balls[index], self.colours[index], self.present[index], self.palette[index])

    def to(self, device: torch.device | str) -> Scene:
        """The same scenes on another device."""
        return Scene(*(field.to(device) for field in (self.balls, self.colours, self.present, self.palette)))

    def without_ball(self, ball: int | Tensor) -> Scene:
        """The same room with one ball taken out; ``ball`` is one number, or int64 of the batch shape."""
        index = torch.as_tensor(ball, device=self.present.device).expand(self.shape).unsqueeze(-1)
        return replace(self, present=self.present.scatter(-1, index, False))


def hashed_uniform(seeds: Tensor, stream: int) -> Tensor:
    """Uniform float32 in [0, 1) for each seed: a 32-bit integer hash, equal on every device.

    Args:
        seeds: int64, any shape, values in [0, 2**32).
        stream: which of a seed's independent numbers.

    >>> hashed_uniform(torch.tensor([5, 5, 6]), 0).unique().numel()
    2
    """
    mixed = _mix32((_mix32(seeds & _MASK32) + (stream * 0x9E3779B9)) & _MASK32)
    return (mixed >> 8).to(torch.float32) * 2.0**-24


def draw_scene(seed: int, device: torch.device | str = "cpu") -> Scene:
    """The room of one episode.

    >>> draw_scene(7).balls.shape
    torch.Size([3, 2])
    """
    return draw_scenes(torch.tensor([seed], dtype=torch.int64, device=device))[0]


def draw_scenes(seeds: Tensor) -> Scene:
    """The rooms of a batch of episodes.

    Args:
        seeds: int64 ``[B]``, values in [0, 2**32).

    Raises:
        ValueError: seeds of another type or shape, or outside [0, 2**32).
    """
    if seeds.dtype != torch.int64 or seeds.dim() != 1:
        raise ValueError(f"seeds must be int64 [B], got {seeds.dtype} {tuple(seeds.shape)}")
    if seeds.numel() and not (int(seeds.min()) >= 0 and int(seeds.max()) <= _MASK32):
        raise ValueError(f"seeds must lie in [0, 2**32), got {int(seeds.min())} to {int(seeds.max())}")
    pillars = torch.tensor(PILLARS, device=seeds.device).expand(seeds.shape[0], -1, -1)
    placed: list[Tensor] = []
    for ball in range(BALLS):
        tries = 16
        draws = torch.stack([hashed_uniform(seeds, 64 * (ball + 1) + k) for k in range(2 * tries)], dim=-1)
        candidates = 1.0 + (ROOM_SIZE - 2.0) * draws.view(-1, tries, 2)
        taken = torch.cat([pillars, *(p.unsqueeze(1) for p in placed)], dim=1)
        gap = (candidates.unsqueeze(2) - taken.unsqueeze(1)).norm(dim=-1).amin(dim=2)
        best = gap.clamp(max=1.5).argmax(dim=1)
        placed.append(candidates[torch.arange(len(seeds), device=seeds.device), best])
    order = torch.stack([hashed_uniform(seeds, 16 + k) for k in range(len(BALL_COLOURS))], dim=-1).argsort(dim=-1)
    wall = (hashed_uniform(seeds, 8) * len(WALL_COLOURS)).long()
    floor = (hashed_uniform(seeds, 9) * len(FLOOR_COLOURS)).long()
    present = torch.ones(len(seeds), BALLS, dtype=torch.bool, device=seeds.device)
    return Scene(torch.stack(placed, dim=1), order[:, :BALLS], present, torch.stack([wall, floor], dim=-1))


def clearance(scene: Scene, points: Tensor) -> Tensor:
    """Distance in units from points on the floor plan to the nearest surface; negative inside a body.

    Args:
        scene: batch shape ``S``.
        points: float32 ``S + (..., 2)``.

    Returns:
        float32 ``S + (...)``.
    """
    extra = points.dim() - 1 - len(scene.shape)
    balls = spread(scene.balls, len(scene.shape), extra)
    present = spread(scene.present, len(scene.shape), extra)
    pillars = torch.tensor(PILLARS, device=points.device)
    to_walls = torch.minimum(points, ROOM_SIZE - points).amin(dim=-1)
    to_pillars = (points.unsqueeze(-2) - pillars).norm(dim=-1).amin(dim=-1) - PILLAR_RADIUS
    to_balls = (points.unsqueeze(-2) - balls).norm(dim=-1).masked_fill(~present, math.inf).amin(dim=-1) - BALL_RADIUS
    return torch.minimum(torch.minimum(to_walls, to_pillars), to_balls)


def step(scene: Scene, pose: Tensor, action: Tensor) -> Tensor:
    """The pose one frame later: turn first, then move; whoever would touch something stays where they are.

    Args:
        scene: batch shape ``S``.
        pose: float32 ``S + (3,)``.
        action: int64 ``S``, index into ``ACTIONS``.

    >>> scene = draw_scene(0)
    >>> step(scene, torch.tensor([4.0, 4.0, 0.0]), torch.tensor(ACTIONS.index("left")))
    tensor([4., 4., 1.])
    """
    turns = torch.tensor(TURNS, device=pose.device)[action]
    moves = torch.tensor(MOVES, device=pose.device)[action]
    heading = (pose[..., 2] + turns) % HEADINGS
    angle = heading * (2 * math.pi / HEADINGS)
    ahead = torch.stack([angle.cos(), angle.sin()], dim=-1)
    here = pose[..., :2]
    there = here + STRIDE * moves.unsqueeze(-1) * ahead
    place = torch.where((clearance(scene, there) >= BODY_RADIUS).unsqueeze(-1), there, here)
    return torch.cat([place, heading.unsqueeze(-1)], dim=-1)


def follow(scene: Scene, start: Tensor, actions: Tensor) -> Tensor:
    """Poses after each action of a sequence.

    Args:
        scene: batch shape ``S``.
        start: float32 ``S + (3,)``.
        actions: int64 ``S + (T,)``.

    Returns:
        float32 ``S + (T, 3)``; entry t is the pose after action t.
    """
    pose, poses = start, []
    for t in range(actions.shape[-1]):
        pose = step(scene, pose, actions[..., t])
        poses.append(pose)
    return torch.stack(poses, dim=-2)


def _mix32(value: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64; both factors are below 2**31, so nothing overflows."""
    value = value ^ (value >> 16)
    value = (value * 0x21F0AAAD) & _MASK32
    value = value ^ (value >> 15)
    value = (value * 0x735A2D97) & _MASK32
    return value ^ (value >> 15)


def spread(field: Tensor, batch_dims: int, extra: int) -> Tensor:
    """The field with ``extra`` axes of length one after its batch axes."""
    return field[(slice(None),) * batch_dims + (None,) * extra]
