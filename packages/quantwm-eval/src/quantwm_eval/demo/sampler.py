"""The live pipeline: chunk after chunk of video from a few real frames and a sequence of actions.

The cache follows the protocol of the large hosts of this family. ``_initialize_kv_cache`` gives one dict per block;
every denoising call and the clean pass of a chunk write the same slots; the first call of a chunk that does not fit
rolls the window. Whoever wants another cache replaces that method and ``quantwm_eval.demo.model.attention``.

>>> from quantwm_eval.demo.episodes import constant_program
>>> world = load()
>>> start, actions, _ = constant_program(torch.tensor([1]), ACTIONS.index("left"), 4)
>>> world.generate(start, actions, seeds=[1]).shape
torch.Size([1, 4, 64, 64, 3])
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantwm_core.errors import ParameterError
from quantwm_eval.demo.config import ModelConfig, denormalize, normalize
from quantwm_eval.demo.model import NO_ACTION, LayerCache, VideoTransformer
from quantwm_eval.demo.rendering import IMAGE_SIZE
from quantwm_eval.demo.room import ACTIONS

BUNDLED_WEIGHTS = "room.safetensors"
Progress = Callable[[int, int], None]


class WorldInputError(ParameterError):
    """An argument of the world model that it cannot use; the message says what came and what to do."""


class WorldPipeline:
    """Model, window and cache protocol of one demo world.

    Attributes:
        model: the transformer.
        dtype: of weights, activations and cache.
        local_attn_chunks: past chunks that the cache holds beside the current one, 1 to ``config.past_chunks``.
        sink_frames: frames at the front of the window that eviction leaves alone; they are part of the window.
        last_level: noise level of the last Euler step; the others lie evenly between it and 1.
    """

    def __init__(self, model: VideoTransformer, dtype: torch.dtype = torch.bfloat16) -> None:
        cos, sin = model.cos, model.sin  # the table stays float32 whatever the weights are
        self.model = model.to(dtype).eval().requires_grad_(False)
        self.model.cos, self.model.sin = cos, sin
        self.dtype = dtype
        self.config = model.config
        self.local_attn_chunks = model.config.past_chunks
        self.sink_frames = 0
        self.last_level = model.config.last_level

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed.weight.device

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: torch.device | str) -> list[LayerCache]:
        """A fresh cache: per block ``k`` and ``v`` ``[batch, tokens, heads, head_dim]`` and the two end indices."""
        config = self.config
        tokens = (self.local_attn_chunks + 1) * config.chunk_tokens
        shape = (batch_size, tokens, config.heads, config.head_dim)
        return [
            {
                "k": torch.zeros(shape, dtype=dtype, device=device),
                "v": torch.zeros(shape, dtype=dtype, device=device),
                "global_end_index": torch.zeros(1, dtype=torch.int64, device=device),
                "local_end_index": torch.zeros(1, dtype=torch.int64, device=device),
            }
            for _ in range(config.blocks)
        ]

    @torch.no_grad()
    def generate(
        self,
        first_frames: Tensor,
        actions: Tensor,
        *,
        seeds: Sequence[int] | None = None,
        noise: Tensor | None = None,
        steps: int = 2,
        progress: Progress | None = None,
    ) -> Tensor:
        """Video that follows four real frames under a sequence of actions; the same arguments give the same video.

        Args:
            first_frames: uint8 ``[B, 4, 64, 64, 3]``, RGB.
            actions: int64 ``[B, T]``, index into ``ACTIONS``, T a multiple of 4; action t leads to new frame t.
            seeds: one number a scene, from which its noise is drawn; 0 to B-1 when neither seeds nor noise is given.
            noise: float ``[B, T, 64, 64, 3]`` of unit deviation, in place of seeds.
            steps: Euler steps a chunk.
            progress: called with (chunks made, chunks to make) after every chunk.

        Returns:
            uint8 ``[B, T, 64, 64, 3]`` on the device of the weights, the first frames not among them.

        Raises:
            WorldInputError: wrong shapes, types, action numbers, window or number of steps, or too many frames.
        """
        self._check(first_frames, actions, steps)
        if noise is None:
            noise = draw_noise(range(len(actions)) if seeds is None else seeds, actions.shape[1])
        elif seeds is not None:
            raise WorldInputError("both seeds and noise were given; give one of them")
        expected = (*actions.shape, IMAGE_SIZE, IMAGE_SIZE, 3)
        if noise.shape != expected or not noise.is_floating_point():
            raise WorldInputError(
                f"noise must be floating point {expected}, one seed or row a scene; got {noise.dtype} {tuple(noise.shape)}"
            )
        actions, noise = actions.to(self.device), noise.to(self.device)
        start = normalize(first_frames.to(self.device), self.config)
        chunks = self.roll_out(start, actions, noise, steps=steps, progress=progress)
        return denormalize(chunks, self.config)

    def roll_out(
        self, start: Tensor, actions: Tensor, noise: Tensor, *, steps: int = 2, progress: Progress | None = None
    ) -> Tensor:
        """``generate`` on normalized frames, arguments unchecked: float32 ``[B, T, 64, 64, 3]``."""
        size = self.config.chunk_frames
        for block in self.model.blocks:
            block.attention.sink_tokens = self.sink_frames * self.config.frame_tokens  # type: ignore[union-attr]  # ModuleList yields Module
        kv_cache = self._initialize_kv_cache(len(start), self.dtype, self.device)
        self.model.denoise(start, 0.0, torch.full_like(actions[:, :size], NO_ACTION), kv_cache, 0)
        made: list[Tensor] = []
        count = actions.shape[1] // size
        for chunk in range(count):
            here = slice(chunk * size, (chunk + 1) * size)
            current_start = (chunk + 1) * self.config.chunk_tokens
            frames = self._denoise_chunk(noise[:, here].float(), actions[:, here], kv_cache, current_start, steps)
            self.model.denoise(frames, 0.0, actions[:, here], kv_cache, current_start)
            made.append(frames)
            if progress is not None:
                progress(chunk + 1, count)
        return torch.cat(made, dim=1)

    def _denoise_chunk(
        self, frames: Tensor, actions: Tensor, kv_cache: list[LayerCache], current_start: int, steps: int
    ) -> Tensor:
        """Euler steps from noise to a clean chunk; with a predicted clean picture a step is an interpolation."""
        levels = [1.0 + (self.last_level - 1.0) * i / max(1, steps - 1) for i in range(steps)] + [0.0]
        for level, lower in pairwise(levels):
            predicted = self.model.denoise(frames, level, actions, kv_cache, current_start)
            frames = predicted + (lower / level) * (frames - predicted)
        return frames

    def _check(self, first_frames: Tensor, actions: Tensor, steps: int) -> None:
        size, config = self.config.chunk_frames, self.config
        expected = (size, IMAGE_SIZE, IMAGE_SIZE, 3)
        if first_frames.dtype != torch.uint8 or first_frames.dim() != 5 or first_frames.shape[1:] != expected:
            raise WorldInputError(
                f"first_frames must be uint8 [B, {size}, {IMAGE_SIZE}, {IMAGE_SIZE}, 3], "
                f"got {first_frames.dtype} {list(first_frames.shape)}"
            )
        if actions.dtype != torch.int64 or actions.dim() != 2 or len(actions) != len(first_frames):
            raise WorldInputError(
                f"actions must be int64 [B={len(first_frames)}, T], got {actions.dtype} {list(actions.shape)}"
            )
        if not len(actions):
            raise WorldInputError("B must be at least 1, a scene each; got first frames and actions of none")
        frames = actions.shape[1]
        if frames == 0 or frames % size:
            raise WorldInputError(
                f"T must be a positive multiple of {size}, got {frames}; pad with noop (0) and cut after"
            )
        if frames + size > config.max_frames:
            raise WorldInputError(f"at most {config.max_frames - size} new frames fit the RoPE table, got {frames}")
        if int(actions.min()) < 0 or int(actions.max()) >= len(ACTIONS):
            raise WorldInputError(
                f"actions must lie in 0 to {len(ACTIONS) - 1} ({', '.join(ACTIONS)}), "
                f"got {int(actions.min())} to {int(actions.max())}"
            )
        if steps < 1:
            raise WorldInputError(f"steps must be at least 1, got {steps}")
        if not 1 <= self.local_attn_chunks <= config.past_chunks:
            raise WorldInputError(
                f"local_attn_chunks must be 1 to {config.past_chunks}, what training showed; got {self.local_attn_chunks}"
            )
        if not 0 <= self.sink_frames <= (self.local_attn_chunks - 1) * size:
            raise WorldInputError(
                f"sink_frames must leave a chunk of the window free: 0 to {(self.local_attn_chunks - 1) * size}, "
                f"got {self.sink_frames}"
            )


def draw_noise(seeds: Sequence[int], frames: int) -> Tensor:
    """Noise of each scene from its own generator, float32 ``[len(seeds), frames, 64, 64, 3]`` on the CPU.

    A scene's noise does not depend on the other scenes, nor its first frames on how many follow.
    """
    noise = torch.empty(len(seeds), frames, IMAGE_SIZE, IMAGE_SIZE, 3)
    for seed, row in zip(seeds, noise, strict=True):
        generator = torch.Generator().manual_seed(int(seed))
        for frame in row:
            torch.randn(frame.shape, generator=generator, out=frame)
    return noise


def save(model: VideoTransformer, path: Path, notes: dict[str, str] | None = None) -> None:
    """Writes BF16 weights with the configuration in the metadata, as safetensors."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(tensors, path, metadata={"config": json.dumps(asdict(model.config)), **(notes or {})})


def load(
    path: str | Path | None = None, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> WorldPipeline:
    """The pipeline with the bundled weights, or with those of another file that ``save`` wrote.

    Raises:
        WorldInputError: a file without the configuration of a demo world.
        FileNotFoundError: no such file.
    """
    if path is not None:
        return WorldPipeline(_read(Path(path)).to(device), dtype)
    bundled = resources.files("quantwm_eval.demo") / "weights" / BUNDLED_WEIGHTS
    with resources.as_file(bundled) as file:
        return WorldPipeline(_read(file).to(device), dtype)


def _read(path: Path) -> VideoTransformer:
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "config" not in metadata:
            raise WorldInputError(f"{path} has no 'config' in its metadata; weights must come from demo.sampler.save")
        model = VideoTransformer(ModelConfig(**json.loads(metadata["config"])))
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  # not a mapping
    return model
