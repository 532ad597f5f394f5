"""Causal-Forcing and Self-Forcing: text to video at 480p, from a checkout and released weights.

``checkout`` is a clone of github.com/thu-ml/Causal-Forcing or github.com/guandeh17/Self-Forcing whose requirements are
installed here and in which ``wan_models/Wan2.1-T2V-1.3B`` lies, as its own instructions say. ``weights`` is the generator's
state dict as safetensors (released as a pickle, whose entry ``generator`` or ``generator_ema`` is to be saved once). ``inputs``
is a text file with a prompt a line. ``config`` is a file of the checkout, the chunk-wise one unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quantwm_core.errors import FormatError, ParameterError
from quantwm_core.method import Scheme
from quantwm_eval import checkout, prompts
from quantwm_eval.attached import AttachedCache
from quantwm_eval.evidence import Frames
from quantwm_eval.host import Episode
from quantwm_eval.hosts import Setup
from quantwm_models.attach import attach
from quantwm_models.observer import CacheObserver

CONFIG = Path("configs/causal_forcing_dmd_chunkwise.yaml")
LATENT = (16, 60, 104)
"""Channels, height and width of a latent frame of 480 x 832."""
PIXELS = (480, 832)
FRAMES_PER_LATENT = 4  # the first latent frame is one frame of video
STOCK_LATENTS = 21
"""What the host's cache holds where it has no window: 32760 tokens."""
POSITIONS = 1024
NOISE_STRIDE = 1 << 24


class CausalForcingHost:
    """A few-step pipeline of the host, with prompts for scenes.

    Args:
        pipeline: The host's ``CausalInferencePipeline``.
        suite: Prompts; scene ``n`` is the n-th, from 0.
        latent: Channels, height and width of a latent frame.
        pixels: Height and width of a frame.
    """

    name = "causal_forcing"
    kinds: tuple[str, ...] = ("prompt",)
    frame_rate = 16
    makes_batches = False  # what the host draws for one video would depend on the others
    frames = 81

    def __init__(
        self,
        pipeline: Any,
        suite: Sequence[str],
        latent: tuple[int, int, int] = LATENT,
        pixels: tuple[int, int] = PIXELS,
    ) -> None:
        self.pipeline, self.suite, self._latent, self._pixels = pipeline, suite, latent, pixels
        self.device = next(pipeline.generator.parameters()).device

    def frames_of(self, chunks: int) -> int:
        """Frames of video that so many chunks make."""
        return FRAMES_PER_LATENT * (chunks * int(self.pipeline.num_frame_per_block) - 1) + 1

    def check(self, scenes: Sequence[int], frames: int, degrees: int) -> None:
        """Raise where there are not so many prompts, frames do not fill chunks, or the host's own cache does not hold them.

        Raises:
            ParameterError: The message says what would do.
        """
        if not all(0 <= scene < len(self.suite) for scene in scenes):
            raise ParameterError(
                f"scenes {min(scenes)} to {max(scenes)}: the suite has prompts 0 to {len(self.suite) - 1}"
            )
        most = STOCK_LATENTS if self.pipeline.generator.model.local_attn_size == -1 else POSITIONS
        fits = [self.frames_of(1 + n) for n in range(most // int(self.pipeline.num_frame_per_block))]
        if frames not in fits:
            raise ParameterError(
                f"frames {frames}: the host makes whole chunks and its own cache holds {most} latent frames; "
                f"need one of {', '.join(map(str, fits[:8]))}{', ...' if len(fits) > 8 else ''} up to {fits[-1]}"
            )

    def episodes(self, kind: str, scenes: Sequence[int], frames: int, degrees: int) -> tuple[Episode, ...]:
        """An episode for each prompt; nothing is done in it.

        Raises:
            ParameterError: As :meth:`check`.
        """
        self.check(scenes, frames, degrees)
        none = np.zeros((0, *self._pixels, 3), np.uint8)
        still = np.zeros(frames, np.int64)
        return tuple(Episode(kind, scene, none, still, prompt=self.suite[scene]) for scene in scenes)

    @contextmanager
    def attach(
        self, scheme: Scheme, observers: Sequence[CacheObserver], window: int | None = None
    ) -> Iterator[AttachedCache]:
        """Put a cache under the pipeline for the length of a ``with`` block.

        Raises:
            ParameterError: ``window``: the host's is part of its weights.
        """
        if window is not None:
            raise ParameterError(f"window {window}: the window of causal_forcing is part of its configuration")
        with attach(self.pipeline, scheme, adapter=self.name, observers=tuple(observers)) as attachment:
            yield AttachedCache(attachment)

    def generate(self, episodes: Sequence[Episode], seeds: Sequence[int], progress: Callable[[], None]) -> list[Frames]:
        """Generate one video.

        Noise depends on scene and seed only. The host draws more of it between steps from PyTorch's global generators,
        which are seeded for the video and put back afterwards.

        Args:
            episodes: One.
            seeds: Its seed.
            progress: Called after every chunk.
        """
        (episode,), number = episodes, NOISE_STRIDE * seeds[0] + episodes[0].scene
        latents = (len(episode.actions) - 1) // FRAMES_PER_LATENT + 1
        shape = (1, latents, *self._latent)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(self.device, torch.bfloat16)
        devices = range(torch.cuda.device_count())
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad(), self._watched(progress):
            torch.manual_seed(number)
            video = self.pipeline.inference(noise=noise, text_prompts=[episode.prompt])
        clear = getattr(getattr(self.pipeline.vae, "model", None), "clear_cache", None)
        if clear is not None:  # the host's decoder keeps the end of a video
            clear()
        return [(video[0].float() * 255).round().to(torch.uint8).movedim(1, -1).cpu().numpy()]

    @contextmanager
    def _watched(self, progress: Callable[[], None]) -> Iterator[None]:
        """Tell of every chunk as soon as the next one, or the end, shows that it is done."""
        begun: set[int] = set()

        def called(_module: object, _arguments: object, named: dict[str, Any]) -> None:
            if begun and named["current_start"] not in begun:
                progress()
            begun.add(named["current_start"])

        handle = self.pipeline.generator.register_forward_pre_hook(called, with_kwargs=True)
        try:
            yield
            progress()
        finally:
            handle.remove()


def load(setup: Setup) -> CausalForcingHost:
    """Build the host's pipeline as its own ``inference.py`` does, and load the generator's weights.

    Raises:
        ParameterError: A path is missing, the checkout is another one or lacks a library, or the size is not the host's.
        FormatError: The weights are not this generator's, or there is no prompt.
    """
    if setup.size not in ("", "480p"):
        raise ParameterError(f"--size {setup.size}: the code of causal_forcing is written for 480p")
    root, weights, suite = (setup.need(CausalForcingHost.name, part) for part in ("checkout", "weights", "inputs"))
    chosen = CONFIG if setup.config is None else setup.config.resolve()
    weights = weights.resolve()
    loaded = prompts.read(suite)
    with checkout.inside(root):
        if not chosen.is_file():
            raise ParameterError(f"--config {chosen}: there is no such file in {root}; name one with --config")
        omegaconf = checkout.library(root, "omegaconf")
        config = omegaconf.OmegaConf.merge(
            *(omegaconf.OmegaConf.load(x) for x in ("configs/default_config.yaml", chosen))
        )
        if not hasattr(config, "denoising_step_list"):
            raise ParameterError(f"--config {chosen}: names no denoising_step_list; only few-step pipelines are loaded")
        pipeline = checkout.module(root, "pipeline").CausalInferencePipeline(config, device=torch.device(setup.device))
    _load_generator(pipeline.generator, weights)
    pipeline = pipeline.to(device=setup.device, dtype=torch.bfloat16).eval().requires_grad_(False)
    return CausalForcingHost(pipeline, loaded, LATENT, PIXELS)


def _load_generator(generator: torch.nn.Module, weights: Path) -> None:
    try:
        state = load_file(weights)
    except SafetensorError as error:
        raise FormatError(
            f"--weights {weights}: not safetensors: {error}; save the state dict of a pickle once"
        ) from error
    plain = {name.replace("model._fsdp_wrapped_module.", "model.", 1): tensor for name, tensor in state.items()}
    try:
        generator.load_state_dict(plain)
    except RuntimeError as error:
        raise FormatError(f"--weights {weights}: not the generator's: {str(error)[:500]}") from error


LOAD = load
