"""Pictures of the room: 64x64, seen from poses, by casting a ray through every pixel.

The four walls, 3.6 units high, carry four patterns in four hues, a door, a window, a picture and a lamp. Balls are
shaded spheres. Two rays by two a pixel are averaged, so that edges move smoothly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantwm_eval.demo.palette import (
    BALL_COLOURS,
    CANVAS,
    CEILING,
    DOOR,
    FIRST_BALL,
    FIRST_PILLAR,
    FIRST_WALL,
    FLOOR,
    FLOOR_COLOURS,
    FRAME,
    FURNITURE_COLOURS,
    LAMP,
    WALL_COLOURS,
    WALL_HUES,
    WINDOW,
)
from quantwm_eval.demo.room import BALL_RADIUS, BALLS, HEADINGS, PILLAR_RADIUS, PILLARS, ROOM_SIZE, Scene, spread

IMAGE_SIZE = 64
FIELD_OF_VIEW_DEGREES = 80.0
ROOM_HEIGHT = 3.6
EYE_HEIGHT = 1.1

_SUPERSAMPLING = 2
_FRAMES_AT_ONCE_CPU = 64
_FRAMES_AT_ONCE_CUDA = 1024


def render(scene: Scene, poses: Tensor) -> Tensor:
    """Pictures seen from poses.

    Args:
        scene: batch shape ``S``.
        poses: float32 ``S + (..., 3)``.

    Returns:
        uint8 ``S + (..., 64, 64, 3)``, RGB, row 0 on top.

    >>> from quantwm_eval.demo.room import draw_scene
    >>> render(draw_scene(3), torch.tensor([[4.0, 4.0, 0.0]])).shape
    torch.Size([1, 64, 64, 3])
    """
    extra = poses.dim() - 1 - len(scene.shape)
    frames = poses.shape[:-1]
    flat = Scene(
        *(
            spread(field, len(scene.shape), extra)
            .expand(*frames, *field.shape[len(scene.shape) :])
            .flatten(0, len(frames) - 1)
            if frames
            else field.unsqueeze(0)
            for field in (scene.balls, scene.colours, scene.present, scene.palette)
        )
    )
    views = poses.reshape(-1, 3)
    at_once = _FRAMES_AT_ONCE_CUDA if poses.is_cuda else _FRAMES_AT_ONCE_CPU
    parts = [_render_flat(flat[i : i + at_once], views[i : i + at_once]) for i in range(0, len(views), at_once)]
    return torch.cat(parts).view(*frames, IMAGE_SIZE, IMAGE_SIZE, 3)


def _render_flat(scene: Scene, poses: Tensor) -> Tensor:
    """uint8 ``[N, 64, 64, 3]`` of N scenes, one pose each. Depth is measured along the view axis."""
    side = IMAGE_SIZE * _SUPERSAMPLING
    reach = math.tan(math.radians(FIELD_OF_VIEW_DEGREES / 2))
    across = ((torch.arange(side, device=poses.device) + 0.5) / (side / 2) - 1.0) * reach
    slope = -across.view(1, side, 1)
    x, y, heading = (poses[:, i].view(-1, 1, 1) for i in range(3))
    angle = heading * (2 * math.pi / HEADINGS)
    ray_x = angle.cos() + across * angle.sin()
    ray_y = angle.sin() - across * angle.cos()

    depth, wall_id, along = _nearest_wall(x, y, ray_x, ray_y)
    pillar_depth, pillar = _nearest_pillar(x, y, ray_x, ray_y)
    is_pillar = pillar_depth < depth
    depth = torch.minimum(depth, pillar_depth)
    height = EYE_HEIGHT + depth * slope
    material, shade = _wall_material(wall_id, along, height)
    shade = shade * _daylight(x + depth * ray_x, y + depth * ray_y)
    round_shade = torch.where(height < 0.5, 0.7, 1.0)
    material = torch.where(is_pillar, FIRST_PILLAR + pillar, material)
    shade = torch.where(is_pillar, round_shade, shade)

    flat_depth = torch.where(slope < 0, -EYE_HEIGHT, ROOM_HEIGHT - EYE_HEIGHT) / slope
    on_flat = flat_depth < depth
    # Light falls in from one corner: brighter along walls and floor, so that what one sees says where one is.
    light = _daylight(x + flat_depth * ray_x, y + flat_depth * ray_y)
    flat_material = torch.where(slope < 0, FLOOR, CEILING)
    material = torch.where(on_flat, flat_material, material)
    shade = torch.where(on_flat, torch.where(slope < 0, light, 1.0), shade)
    depth = torch.minimum(depth, flat_depth)

    for ball in range(BALLS):
        ball_depth, ball_shade = _ball_surface(scene.balls[:, ball], x, y, ray_x, ray_y, slope)
        seen = (ball_depth < depth) & scene.present[:, ball].view(-1, 1, 1)
        material = torch.where(seen, FIRST_BALL + ball, material)
        shade = torch.where(seen, ball_shade, shade)
        depth = torch.where(seen, ball_depth, depth)

    shade = shade / (1.0 + 0.012 * depth * depth)
    table = _colour_table(scene)
    rows = torch.arange(len(poses), device=poses.device).view(-1, 1, 1)
    picture = table[rows, material] * shade.unsqueeze(-1)
    split = (len(poses), IMAGE_SIZE, _SUPERSAMPLING, IMAGE_SIZE, _SUPERSAMPLING, 3)
    return (picture.view(split).mean(dim=(2, 4)) * 255.0).round().clamp(0, 255).to(torch.uint8)


def _daylight(x: Tensor, y: Tensor) -> Tensor:
    """Brightness at places of the floor plan, 0.7 in one corner to 1.3 in the opposite one."""
    return 0.7 + 0.6 * (x + y) / (2 * ROOM_SIZE)


def _nearest_wall(x: Tensor, y: Tensor, ray_x: Tensor, ray_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Depth, wall number (0 north, 1 east, 2 south, 3 west) and place along the wall, each ``[N, 1, columns]``."""
    depth_x = torch.where(ray_x > 0, ROOM_SIZE - x, x) / ray_x.abs().clamp(min=1e-6)
    depth_y = torch.where(ray_y > 0, ROOM_SIZE - y, y) / ray_y.abs().clamp(min=1e-6)
    side_wall = depth_x < depth_y
    depth = torch.minimum(depth_x, depth_y)
    wall_id = torch.where(side_wall, torch.where(ray_x > 0, 1, 3), torch.where(ray_y > 0, 0, 2))
    along = torch.where(side_wall, y + depth * ray_y, x + depth * ray_x)
    return depth, wall_id, along


def _nearest_pillar(x: Tensor, y: Tensor, ray_x: Tensor, ray_y: Tensor) -> tuple[Tensor, Tensor]:
    """Depth, infinite where none is hit, and number of the nearest pillar, each ``[N, 1, columns]``."""
    depths = []
    square = ray_x * ray_x + ray_y * ray_y
    for centre_x, centre_y in PILLARS:
        to_x, to_y = centre_x - x, centre_y - y
        half = to_x * ray_x + to_y * ray_y
        inside = half * half - square * (to_x * to_x + to_y * to_y - PILLAR_RADIUS**2)
        depth = (half - inside.clamp(min=0).sqrt()) / square
        depths.append(torch.where((inside > 0) & (depth > 0), depth, math.inf))
    nearest, number = torch.stack(depths).min(dim=0)
    return nearest, number


def _wall_material(wall_id: Tensor, along: Tensor, height: Tensor) -> tuple[Tensor, Tensor]:
    """Material and brightness of wall points ``[N, rows, columns]`` from place along and height, units."""
    stripes = 1.12 + 0.20 * ((along % 2.0) < 1.0)
    bands = 0.52 + 0.16 * ((height % 1.25) < 0.625)
    panels = torch.where(height < 0.9, 0.45, 0.80)
    checks = 0.86 + 0.22 * (((along / 2.0).floor() + (height / 1.25).floor()) % 2)
    shade = torch.where(
        wall_id == 0, stripes, torch.where(wall_id == 1, bands, torch.where(wall_id == 2, panels, checks))
    )

    def box(wall: int, left: float, right: float, low: float, high: float) -> Tensor:
        return (wall_id == wall) & (along > left) & (along < right) & (height > low) & (height < high)

    lamp = (wall_id == 3) & ((along - 2.6) ** 2 + (height - 1.65) ** 2 < 0.2)
    wall_material = FIRST_WALL + wall_id.expand_as(height)
    material = wall_material
    for index, where in (
        (DOOR, box(0, 3.2, 4.7, 0.0, 2.05)),
        (WINDOW, box(1, 2.8, 5.2, 0.9, 2.0)),
        (FRAME, box(2, 3.6, 5.6, 1.0, 2.1)),
        (CANVAS, box(2, 3.9, 5.3, 1.25, 1.85)),
        (LAMP, lamp),
    ):
        material = torch.where(where, index, material)
    return material, torch.where(material == wall_material, shade, 1.0)


def _ball_surface(
    centre: Tensor, x: Tensor, y: Tensor, ray_x: Tensor, ray_y: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Depth (infinite where missed) and brightness of one ball, each ``[N, rows, columns]``; lit from above."""
    to_x = centre[:, 0].view(-1, 1, 1) - x
    to_y = centre[:, 1].view(-1, 1, 1) - y
    to_z = BALL_RADIUS - EYE_HEIGHT
    square = ray_x * ray_x + ray_y * ray_y + slope * slope
    half = to_x * ray_x + to_y * ray_y + to_z * slope
    inside = half * half - square * (to_x * to_x + to_y * to_y + to_z * to_z - BALL_RADIUS**2)
    depth = (half - inside.clamp(min=0).sqrt()) / square
    up = (EYE_HEIGHT + depth * slope - BALL_RADIUS) / BALL_RADIUS
    hit = (inside > 0) & (depth > 0)
    return torch.where(hit, depth, math.inf), 0.75 + 0.25 * up


def _colour_table(scene: Scene) -> Tensor:
    """float32 ``[N, materials, 3]``."""
    device = scene.palette.device
    furniture = torch.tensor(FURNITURE_COLOURS, device=device).expand(scene.shape[0], -1, -1)
    tint = torch.tensor(WALL_COLOURS, device=device)[scene.palette[:, 0]].unsqueeze(1)
    walls = tint * torch.tensor(WALL_HUES, device=device)
    floor = torch.tensor(FLOOR_COLOURS, device=device)[scene.palette[:, 1]].unsqueeze(1)
    balls = torch.tensor(BALL_COLOURS, device=device)[scene.colours]
    return torch.cat([furniture, walls, floor, 0.5 + 0.4 * tint, balls], dim=1)
