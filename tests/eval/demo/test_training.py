"""The training loop at toy sizes: optimizer, batches, steps."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

from quantwm_eval.demo.config import ModelConfig
from quantwm_eval.demo.model import VideoTransformer
from quantwm_eval.demo.muon import Muon, orthogonalize
from quantwm_eval.demo.sampler import load
from quantwm_eval.demo.trainer import Recipe, Trainer

TINY = ModelConfig(width=24, heads=1, blocks=1, mlp_width=16, past_chunks=2)
RECIPE = Recipe(1.0, batch=2, frames=8, pool=4, own_context_batches=1, own_context_from=0.0)


def trainer(recipe: Recipe = RECIPE) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Trainer(VideoTransformer(TINY), recipe, "cpu", dense_mask=True)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices, rounds=8).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muon_descends_a_quadratic() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(12, 4, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(12, 4))
    muon = Muon([weight], weight_decay=0.0)
    start = float(target.square().sum())
    for _ in range(60):
        weight.grad = (weight - target).detach()
        muon.step(0.05)
    assert float((weight.detach() - target).square().sum()) < 0.2 * start


def test_training_starts_from_noise_and_gets_better() -> None:
    run = trainer(dataclasses.replace(RECIPE, own_context_from=1.0, muon_rate=0.02, warmup_steps=1))
    losses = [float(run.step(0.0, index)) for index in range(24)]
    assert median(losses[-8:]) < 0.7 * median(losses[:4])  # medians: a low noise level can outweigh all others


def test_an_own_context_keeps_the_first_chunk_real() -> None:
    run = trainer()
    batch = run._own_batch()
    assert torch.equal(batch.context[:, :4], batch.truth[:, :4])
    assert not torch.equal(batch.context[:, 4:], batch.truth[:, 4:])
    assert torch.isfinite(run.step(0.9, 0))


def test_two_runs_of_one_seed_are_the_same() -> None:
    one, other = trainer(), trainer()
    assert [float(one.step(0.5, i)) for i in range(2)] == [float(other.step(0.5, i)) for i in range(2)]


def test_the_command_line_writes_weights_that_load(tmp_path: Path) -> None:
    sizes = [
        "--width",
        "24",
        "--heads",
        "1",
        "--blocks",
        "1",
        "--mlp-width",
        "16",
        "--batch",
        "1",
        "--frames",
        "8",
        "--pool",
        "2",
    ]
    command = [
        sys.executable,
        "-m",
        "quantwm_eval.demo.train",
        "--seconds",
        "0.1",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
    ]
    subprocess.run([*command, *sizes], check=True, capture_output=True)
    assert load(tmp_path / "room.safetensors").config.width == 24
