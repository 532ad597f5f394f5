"""Measures whether weights are fit to ship: ``python -m quantwm_eval.demo.gates --out gates.json``.

Everything is measured on episodes of held-out seeds, against the true video that the room gives for any action
sequence. ``redrawn`` and ``region_psnr`` are the scores of the look-away test and serve the evaluation as well.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.image import imsave
from torch import Tensor

from quantwm_eval.demo.episodes import FIRST_FRAMES, LookAway, constant_program, look_away, random_walk
from quantwm_eval.demo.room import ACTIONS, HELD_OUT_SEEDS
from quantwm_eval.demo.sampler import WorldPipeline, load

ROLLOUT_CHUNKS = 16
PROGRAMS: tuple[int, ...] = tuple(ACTIONS.index(name) for name in ("noop", "forward", "left", "right", "back"))
PROGRAM_CHUNKS = 3

# Measured last, once: nothing about the room, the walk or the training was chosen with these episodes in view.
_ROLLOUT_SEEDS = HELD_OUT_SEEDS.start + 20_000
_LOOK_AWAY_SEEDS = HELD_OUT_SEEDS.start + 2_000
_PROGRAM_SEEDS = HELD_OUT_SEEDS.start + 3_000


@dataclass(frozen=True)
class Gate:
    """A measured figure and the range that it has to lie in."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the figure lies in its range."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)


@dataclass(frozen=True)
class Figures:
    """What is measured.

    Attributes:
        scenes: held-out scenes of the look-away test and of the constant actions.
        rollouts: held-out episodes of random play; many, because a mean over 16 of them moves by 3 dB.
        steps: Euler steps a chunk.
        psnr_by_chunk: of random play against the truth, dB, of the mean squared error over scenes and frames.
        copy_last_by_chunk: the same for the last real frame, repeated.
        sharpness_ratio: ``sharpness`` of generated over true frames.
        action_identification: share of chunks recognized, per action and their mean.
        look_away: balls redrawn and mean PSNR of their region, keys ``"100 degrees, window 7"``.
    """

    scenes: int
    rollouts: int
    steps: int
    psnr_by_chunk: list[float]
    copy_last_by_chunk: list[float]
    sharpness_ratio: float
    action_identification: dict[str, float]
    look_away: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Rollout:
    """Random play: uint8 last real frame ``[B, 1, 64, 64, 3]``, true and generated ``[B, T, 64, 64, 3]``."""

    last_frame: Tensor
    truth: Tensor
    generated: Tensor


def redrawn(episodes: LookAway, generated: Tensor, last: int = 4) -> Tensor:
    """Whether the ball is there again after looking away and back.

    Args:
        episodes: B look-away episodes.
        generated: uint8 ``[B, T, 64, 64, 3]``, made from the first four true frames and the episodes' actions.
        last: how many frames at the end are judged.

    Returns:
        bool ``[B]``: the region of the ball is closer to the truth than to the room without the ball.

    >>> episodes = look_away(torch.tensor([2_000]), 10)
    >>> redrawn(episodes, episodes.video[:, 4:]), redrawn(episodes, episodes.counterfactual[:, 4:])
    (tensor([True]), tensor([False]))
    """
    to_truth = _region_error(episodes.video, episodes.mask, generated, last)
    return to_truth < _region_error(episodes.counterfactual, episodes.mask, generated, last)


def region_psnr(episodes: LookAway, generated: Tensor, last: int = 4) -> Tensor:
    """PSNR against the truth inside the ball's region over the last frames, dB ``[B]``; arguments as ``redrawn``."""
    return 10.0 * torch.log10(255.0**2 / _region_error(episodes.video, episodes.mask, generated, last))


def sharpness(video: Tensor) -> float:
    """Mean absolute difference of neighbouring pixels, grey levels."""
    wide = video.float()
    return float((wide.diff(dim=-2).abs().mean() + wide.diff(dim=-3).abs().mean()) / 2)


def generate_look_away(world: WorldPipeline, episodes: LookAway, seeds: Tensor, window: int, steps: int = 2) -> Tensor:
    """Generated video of look-away episodes with a window of past chunks; the world's own window is put back."""
    kept = world.local_attn_chunks
    world.local_attn_chunks = window
    try:
        start = episodes.video[:, :FIRST_FRAMES]
        return world.generate(start, episodes.actions, seeds=seeds.tolist(), steps=steps)
    finally:
        world.local_attn_chunks = kept


def measure(world: WorldPipeline, scenes: int = 16, rollouts: int = 64, steps: int = 2) -> Figures:
    """All figures of the gates; see ``gates`` for the thresholds."""
    rollout = measure_rollout(world, rollouts, steps)
    return Figures(
        scenes,
        rollouts,
        steps,
        _psnr_by_chunk(rollout.generated, rollout.truth),
        _psnr_by_chunk(rollout.last_frame.expand_as(rollout.truth), rollout.truth),
        round(sharpness(rollout.generated) / sharpness(rollout.truth), 4),
        measure_actions(world, scenes, steps),
        measure_look_away(world, scenes, steps),
    )


def measure_rollout(world: WorldPipeline, scenes: int, steps: int) -> Rollout:
    """Generated and true video of random play."""
    seeds = torch.arange(scenes, device=world.device) + _ROLLOUT_SEEDS
    walk = random_walk(seeds, FIRST_FRAMES * (1 + ROLLOUT_CHUNKS))
    video = walk.video()
    start, truth = video[:, :FIRST_FRAMES], video[:, FIRST_FRAMES:]
    generated = world.generate(start, walk.actions[:, FIRST_FRAMES:], seeds=seeds.tolist(), steps=steps).to(
        truth.device
    )
    return Rollout(start[:, -1:], truth, generated)


def measure_actions(world: WorldPipeline, scenes: int, steps: int) -> dict[str, float]:
    """Share of chunks that are nearest to the truth of the action that made them, of five actions held constant."""
    seeds = torch.arange(scenes, device=world.device) + _PROGRAM_SEEDS
    frames = PROGRAM_CHUNKS * FIRST_FRAMES
    programs = [constant_program(seeds, action, frames) for action in PROGRAMS]
    truths = torch.stack([truth for _, _, truth in programs]).unflatten(2, (PROGRAM_CHUNKS, -1)).float()
    shares: dict[str, float] = {}
    for number, (start, actions, _) in enumerate(programs):
        made = world.generate(start, actions, seeds=seeds.tolist(), steps=steps)
        error = (truths - made.unflatten(1, (PROGRAM_CHUNKS, -1)).float()).square().mean(dim=(3, 4, 5, 6))
        shares[ACTIONS[PROGRAMS[number]]] = round(float((error.argmin(dim=0) == number).float().mean()), 4)
    shares["mean"] = round(sum(shares.values()) / len(PROGRAMS), 4)
    return shares


def measure_look_away(
    world: WorldPipeline,
    scenes: int,
    steps: int,
    degrees: tuple[int, ...] = (80, 100),
    windows: tuple[int, ...] = (1, 7),
) -> dict[str, dict[str, float]]:
    """Balls redrawn, of all scenes, and mean PSNR of their region; keys ``"100 degrees, window 7"``."""
    seeds = torch.arange(scenes, device=world.device) + _LOOK_AWAY_SEEDS
    table: dict[str, dict[str, float]] = {}
    for angle in degrees:
        episodes = look_away(seeds, angle)
        for window in windows:
            made = generate_look_away(world, episodes, seeds, window, steps)
            table[f"{angle} degrees, window {window}"] = {
                "redrawn": int(redrawn(episodes, made).sum()),
                "region_psnr": round(float(region_psnr(episodes, made).mean()), 2),
            }
    return table


def gates(figures: Figures) -> list[Gate]:
    """The thresholds for shipping, applied to the figures."""
    made, copied, table = figures.psnr_by_chunk, figures.copy_last_by_chunk, figures.look_away
    remembered = table["100 degrees, window 7"]["redrawn"] / figures.scenes
    forgotten = table["100 degrees, window 1"]["redrawn"] / figures.scenes
    return [
        Gate("gain over copying at chunk 1, dB", round(made[0] - copied[0], 2), at_least=15.0),
        Gate(f"gain over copying at chunk {len(made)}, dB", round(made[-1] - copied[-1], 2), at_least=8.0),
        Gate("action identification", figures.action_identification["mean"], at_least=0.95),
        Gate("look-away at 100 degrees, window 7, share redrawn", remembered, at_least=0.75),
        Gate("look-away at 100 degrees, window 1, share redrawn", forgotten, at_most=0.125),
        Gate("sharpness ratio", figures.sharpness_ratio, at_least=0.9, at_most=1.2),
    ]


def contact_sheet(truth: Tensor, generated: Tensor, columns: int = 16) -> Tensor:
    """One picture, uint8 ``[H, W, 3]``: per scene a row of true frames above a row of generated ones, evenly spread.

    Args:
        truth, generated: uint8 ``[B, T, 64, 64, 3]``.
        columns: frames shown, T a multiple of it.
    """
    stride = truth.shape[1] // columns
    rows = torch.stack([truth[:, stride - 1 :: stride], generated[:, stride - 1 :: stride]], dim=1).flatten(0, 1)
    return rows.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1, 2)


def _psnr_by_chunk(video: Tensor, truth: Tensor) -> list[float]:
    """PSNR of each chunk's mean squared error over all scenes, dB: finite though single frames may be equal."""
    error = (video.float() - truth.float()).square().unflatten(1, (ROLLOUT_CHUNKS, -1)).mean(dim=(0, 2, 3, 4, 5))
    return [round(x, 2) for x in (10.0 * torch.log10(255.0**2 / error)).tolist()]


def _region_error(video: Tensor, mask: Tensor, generated: Tensor, last: int) -> Tensor:
    """Mean squared error inside the mask over the last frames, ``[B]``."""
    inside = mask[:, -last:].unsqueeze(-1).float()
    error = (generated[:, -last:].float() - video[:, -last:].float()).square() * inside
    return error.sum(dim=(1, 2, 3, 4)) / (3.0 * inside.sum(dim=(1, 2, 3, 4)))


def main() -> None:
    """The command line; exit status 1 when a gate is missed."""
    parser = argparse.ArgumentParser(prog="quantwm_eval.demo.gates", description="Measure the demo world model.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--weights", type=Path, help="weights to measure; default: the bundled ones")
    parser.add_argument("--scenes", type=int, default=16, help="scenes of the look-away test and of constant actions")
    parser.add_argument("--rollouts", type=int, default=64, help="episodes of random play")
    parser.add_argument("--steps", type=int, default=2, help="Euler steps a chunk")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sheet", type=Path, help="PNG file for the contact sheet")
    arguments = parser.parse_args()
    world = load(arguments.weights, device=arguments.device)
    figures = measure(world, arguments.scenes, arguments.rollouts, arguments.steps)
    results = gates(figures)
    report = {**asdict(figures), "gates": [{**asdict(gate), "passed": gate.passed} for gate in results]}
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.sheet is not None:
        rollout = measure_rollout(world, min(6, arguments.rollouts), arguments.steps)
        imsave(arguments.sheet, contact_sheet(rollout.truth, rollout.generated).cpu().numpy())
    for gate in results:
        print(f"{'pass' if gate.passed else 'MISS'}  {gate.name}: {gate.value:.3f}")
    raise SystemExit(0 if all(gate.passed for gate in results) else 1)


if __name__ == "__main__":
    main()
