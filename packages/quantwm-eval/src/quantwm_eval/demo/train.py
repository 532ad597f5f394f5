"""Trains the demo world model: ``python -m quantwm_eval.demo.train --seconds 440 --out folder``.

Teacher forcing on ``[clean | noisy]`` sequences under a block mask. Half of the sequences have their context blurred by
noise. Later in training half of the steps, then more, take a context that the model sampled itself, first chunk real,
while the target stays the truth: so it learns to come back from its own errors.

The schedule is a function of the share of ``--seconds`` that has passed, so a run ends when it should on any device.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from quantwm_eval.demo.config import ModelConfig
from quantwm_eval.demo.model import VideoTransformer
from quantwm_eval.demo.sampler import load, save
from quantwm_eval.demo.trainer import Recipe, Trainer


def train(trainer: Trainer, log: Path) -> int:
    """Steps until the recipe's seconds have passed; a line of JSON every 50 steps. Returns how many steps."""
    began, index, progress, losses = time.monotonic(), 0, 0.0, []
    with log.open("w") as lines:
        while progress < 1.0:
            losses.append(trainer.step(progress, index))
            index += 1
            if index % 50 == 0:
                loss = float(torch.stack(losses).mean())
                losses.clear()
                seconds = time.monotonic() - began
                lines.write(json.dumps({"step": index, "seconds": round(seconds, 1), "loss": round(loss, 5)}) + "\n")
                lines.flush()
            progress = (time.monotonic() - began) / trainer.recipe.seconds
    return index


def _arguments() -> argparse.Namespace:
    recipe, sizes = Recipe(440.0), ModelConfig()
    parser = argparse.ArgumentParser(prog="quantwm_eval.demo.train", description="Train the demo world model.")
    parser.add_argument("--seconds", type=float, default=recipe.seconds, help="wall-clock budget of the training loop")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--resume", type=Path, help="weights to continue from, in place of fresh ones")
    parser.add_argument("--seed", type=int, default=recipe.seed, help="of weights, noise and episodes, 0 to 61")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--batch", type=int, default=recipe.batch)
    parser.add_argument("--frames", type=int, default=recipe.frames)
    parser.add_argument(
        "--pool", type=int, default=recipe.pool, help="episodes walked at once, a multiple of the batch"
    )
    parser.add_argument("--muon-rate", type=float, default=recipe.muon_rate)
    parser.add_argument("--adamw-rate", type=float, default=recipe.adamw_rate)
    parser.add_argument("--own-context-from", type=float, default=recipe.own_context_from, help="share of the run")
    parser.add_argument("--decay-from", type=float, default=recipe.decay_from, help="share of the run")
    parser.add_argument("--width", type=int, default=sizes.width)
    parser.add_argument("--heads", type=int, default=sizes.heads)
    parser.add_argument("--blocks", type=int, default=sizes.blocks)
    parser.add_argument("--mlp-width", type=int, default=sizes.mlp_width)
    return parser.parse_args()


def _initial_model(arguments: argparse.Namespace) -> VideoTransformer:
    if arguments.resume is not None:
        return load(arguments.resume, dtype=torch.float32).model.requires_grad_(True)
    with torch.random.fork_rng():  # module constructors draw from the global generator
        torch.manual_seed(arguments.seed)
        sizes = ("width", "heads", "blocks", "mlp_width")
        return VideoTransformer(ModelConfig(**{name: getattr(arguments, name) for name in sizes}))


def main() -> None:
    """The command line."""
    arguments = _arguments()
    names = ("seconds", "batch", "frames", "seed", "pool", "muon_rate", "adamw_rate", "own_context_from", "decay_from")
    recipe = Recipe(**{name: getattr(arguments, name) for name in names})
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Flex attention needs compilation to be worth having, and has no backward pass on a CPU.
    dense_mask = not arguments.compile or arguments.device == "cpu"
    trainer = Trainer(_initial_model(arguments), recipe, arguments.device, dense_mask)
    if arguments.compile:
        for block in trainer.model.blocks:
            block.compile(dynamic=False)
    began = time.monotonic()
    trainer.warm_up()
    print(
        f"ready after {time.monotonic() - began:.0f} s, {sum(p.numel() for p in trainer.model.parameters())} parameters"
    )
    steps = train(trainer, arguments.out / "log.jsonl")
    notes = {"steps": str(steps), "recipe": json.dumps(asdict(recipe))}
    save(trainer.average, arguments.out / "room.safetensors", notes)
    print(f"{steps} steps in {recipe.seconds:.0f} s")


if __name__ == "__main__":
    main()
