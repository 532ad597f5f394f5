"""One training run: what it is made of, its batches, its loss, its step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.flex_attention import BlockMask

from quantwm_eval.demo.config import normalize
from quantwm_eval.demo.episodes import Walk, random_walk
from quantwm_eval.demo.masking import sequence_mask
from quantwm_eval.demo.model import VideoTransformer
from quantwm_eval.demo.muon import Muon
from quantwm_eval.demo.room import TRAINING_SEEDS
from quantwm_eval.demo.sampler import WorldPipeline


@dataclass(frozen=True)
class Recipe:
    """What a run is made of, apart from the model's sizes.

    Attributes:
        seconds: wall-clock budget of the loop, compilation not counted.
        batch, frames: sequences a step, frames a sequence.
        seed: of weights, noise and episodes.
        pool: episodes walked at once, before their frames are rendered batch by batch.
        look_away_share: share of episodes that begin by looking away from a ball and back.
        near_noise_share: share of noise levels drawn from [0.98, 1].
        near_last_share: share drawn within 0.02 of the sampler's last level; the rest is uniform.
        context_noise: highest level of noise on a blurred context.
        own_context_from: share of the run after which sampled contexts begin.
        own_context_batches: batches that are sampled at once.
        own_context_uses: steps that each of them serves.
        drift_scale: mean squared error of a sampled context, normalized units, at which its target counts half.
        muon_rate, adamw_rate: peak learning rates.
        decay_from: share of the run after which the rates fall linearly to zero.
        warmup_steps: steps over which the rates rise.
        ema: decay of the averaged weights.
    """

    seconds: float
    batch: int = 16
    frames: int = 48
    seed: int = 0
    pool: int = 4096
    look_away_share: float = 0.25
    near_noise_share: float = 0.35
    near_last_share: float = 0.25
    context_noise: float = 0.4
    own_context_from: float = 0.40
    own_context_batches: int = 6
    own_context_uses: int = 2
    drift_scale: float = 0.1
    muon_rate: float = 0.01
    adamw_rate: float = 1e-3
    decay_from: float = 0.5
    warmup_steps: int = 100
    ema: float = 0.999


@dataclass(frozen=True)
class Batch:
    """Normalized true frames float32 ``[B, F, 64, 64, 3]``, actions int64 ``[B, F]``, and the context to condition on.

    ``is_own`` tells a context that the model sampled from one that was rendered.
    """

    truth: Tensor
    actions: Tensor
    context: Tensor
    is_own: bool


class Trainer:
    """Weights, their average, optimizers and the random stream of one run."""

    def __init__(self, model: VideoTransformer, recipe: Recipe, device: str, dense_mask: bool) -> None:
        self.recipe, self.device = recipe, device
        self.model = model.to(device).train()
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.sampler = WorldPipeline(copy.deepcopy(self.model))
        self.generator = torch.Generator(device).manual_seed(recipe.seed)
        self.coin = torch.Generator().manual_seed(recipe.seed)
        matrices = [
            p
            for name, p in model.named_parameters()
            if name.startswith("blocks.") and name.endswith("weight") and p.dim() == 2
        ]
        chosen = {id(p) for p in matrices}
        self.muon = Muon(matrices)
        others: list[Parameter] = [p for p in model.parameters() if id(p) not in chosen]
        self.adamw = torch.optim.AdamW(others, lr=recipe.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0)
        chunks = recipe.frames // model.config.chunk_frames
        self.mask: BlockMask | Tensor = sequence_mask(model.config, chunks, device, dense=dense_mask)
        self.walks = self._walks()
        self.own: list[Batch] = []

    def step(self, progress: float, index: int) -> Tensor:
        """One update; returns the loss, left on the device."""
        recipe = self.recipe
        share = 0.0 if progress < recipe.own_context_from else 0.5 if progress < 0.8 else 0.6
        batch = self._own_batch() if float(torch.rand((), generator=self.coin)) < share else self._true_batch()
        rise = min(1.0, (index + 1) / recipe.warmup_steps)
        fall = min(1.0, (1.0 - progress) / (1.0 - recipe.decay_from))
        loss = self._loss(batch)
        self.adamw.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        self.muon.step(recipe.muon_rate * rise * fall)
        for group in self.adamw.param_groups:
            group["lr"] = recipe.adamw_rate * rise * fall
        self.adamw.step()
        weight = 1.0 - min(recipe.ema, (1.0 + index) / (10.0 + index))
        torch._foreach_lerp_(list(self.average.parameters()), [p.data for p in self.model.parameters()], weight)
        return loss.detach()

    def warm_up(self) -> None:
        """Compiles and checks both kinds of step without changing a weight."""
        for batch in (self._true_batch(), self._own_batch()):
            loss = self._loss(batch)
            loss.backward()
            if not bool(torch.isfinite(loss)):
                raise FloatingPointError(f"loss {float(loss)} before the first step")

    def _loss(self, batch: Batch) -> Tensor:
        """Squared error of the predicted clean frames over the noise level."""
        recipe, config = self.recipe, self.model.config
        chunk = config.chunk_frames
        target = batch.truth[:, chunk:]
        shape = (len(target), target.shape[1] // chunk)
        levels = self._levels(*shape)
        wide = levels.repeat_interleave(chunk, dim=1)[..., None, None, None]
        noisy = (1 - wide) * target + wide * self._normal(target.shape)
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            predicted = self.model(batch.context, noisy, levels, batch.actions, self.mask)
        error = (predicted.float() - target).square().mean(dim=(2, 3, 4), keepdim=True)
        # Where the context has lost its way the target cannot be known; full weight there teaches blur.
        drift = (batch.context - batch.truth)[:, :-chunk].square().mean(dim=(2, 3, 4), keepdim=True)
        trust = recipe.drift_scale / (recipe.drift_scale + drift) if batch.is_own else 1.0
        weighted: Tensor = trust * error / wide.clamp(min=0.05)
        return weighted.mean()

    def _levels(self, *shape: int) -> Tensor:
        """Noise levels, most of them where the sampler of two steps will ask."""
        recipe, last = self.recipe, self.model.config.last_level
        kind, level = self._uniform(*shape), self._uniform(*shape)
        near_last = kind < recipe.near_noise_share + recipe.near_last_share
        level = torch.where(near_last, last + 0.04 * (level - 0.5), level)
        return torch.where(kind < recipe.near_noise_share, 0.98 + 0.02 * self._uniform(*shape), level)

    def _true_batch(self) -> Batch:
        """True context; in half of the sequences blurred by noise, a level a chunk."""
        walk = next(self.walks)
        truth = normalize(walk.video(), self.model.config)
        chunk = self.model.config.chunk_frames
        blurred = (self._uniform(len(truth), 1) < 0.5).float()
        level = blurred * self.recipe.context_noise * self._uniform(len(truth), truth.shape[1] // chunk)
        wide = level.repeat_interleave(chunk, dim=1)[..., None, None, None]
        return Batch(truth, walk.actions, (1 - wide) * truth + wide * self._normal(truth.shape), is_own=False)

    def _own_batch(self) -> Batch:
        """A context that the model made itself from the first chunk on; sampled for several batches at once."""
        if not self.own:
            walks = [next(self.walks) for _ in range(self.recipe.own_context_batches)]
            truth = torch.cat([normalize(walk.video(), self.model.config) for walk in walks])
            actions = torch.cat([walk.actions for walk in walks])
            self.sampler.model.load_state_dict(self.model.state_dict())
            chunk = self.model.config.chunk_frames
            with torch.no_grad():
                start, later = truth[:, :chunk], truth[:, chunk:]
                made = self.sampler.roll_out(start, actions[:, chunk:], self._normal(later.shape))
            context = torch.cat([start, made], dim=1)
            size = self.recipe.batch
            parts = zip(truth.split(size), actions.split(size), context.split(size), strict=True)
            own = [Batch(t, a, c, is_own=True) for t, a, c in parts]
            self.own = own * self.recipe.own_context_uses
        return self.own.pop()

    def _walks(self) -> Iterator[Walk]:
        """Batches of episodes on training seeds, no seed twice in a run."""
        recipe = self.recipe
        drawn = TRAINING_SEEDS.start + recipe.seed * (1 << 26)
        while True:
            seeds = (torch.arange(recipe.pool, device=self.device) + drawn) % (1 << 32)
            walk = random_walk(seeds.clamp(min=TRAINING_SEEDS.start), recipe.frames, recipe.look_away_share)
            drawn += recipe.pool
            for i in range(0, recipe.pool, recipe.batch):
                here = slice(i, i + recipe.batch)
                yield Walk(walk.scene[here], walk.poses[here], walk.actions[here])

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def _normal(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)
