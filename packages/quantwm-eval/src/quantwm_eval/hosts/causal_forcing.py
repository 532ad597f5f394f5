"""Causal-Forcing and Self-Forcing: text to video at 480p, from a checkout and released weights.

``checkout`` is a clone of github.com/thu-ml/Causal-Forcing or github.com/guandeh17/Self-Forcing whose requirements are
installed here and in which ``wan_models/Wan2.1-T2V-1.3B`` lies, as its own instructions say. ``weights`` is the generator's
state dict as safetensors (released as a pickle, whose entry ``generator`` or ``generator_ema`` is to be saved once). Scenes
need prompts. ``config`` is a file of the checkout, the chunk-wise one unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quantwm_core.errors import ParameterError
from quantwm_eval import checkout
from quantwm_eval.checkout_given import POSITIONS, check_size, given
from quantwm_eval.checkout_host import CheckoutHost, levels, load_weights, watched
from quantwm_eval.evidence import Frames
from quantwm_eval.hosts import Setup
from quantwm_eval.latents import latents_of
from quantwm_eval.suite import Scene

DEFAULT_CONFIG = Path("configs/default_config.yaml")
CONFIG = Path("configs/causal_forcing_dmd_chunkwise.yaml")
LATENT = (16, 60, 104)
"""Channels, height and width of a latent frame of 480 x 832."""
STOCK_LATENTS = 21
"""What the host's cache holds where it has no window: 32760 tokens."""


class CausalForcingHost(CheckoutHost):
    """A few-step pipeline of the host, ``CausalInferencePipeline``.

    Args:
        pipeline: It.
        scenes: The suite.
        latent: Channels, height and width of a latent frame.
    """

    name = "causal_forcing"
    frames, frame_rate = 81, 16

    def __init__(self, pipeline: Any, scenes: Sequence[Scene], latent: tuple[int, int, int] = LATENT) -> None:
        super().__init__(pipeline, scenes, next(pipeline.generator.parameters()).device)
        self._latent = latent
        most = STOCK_LATENTS if pipeline.generator.model.local_attn_size == -1 else POSITIONS
        self.chunk = int(pipeline.num_frame_per_block)
        self.most_chunks = most // self.chunk

    def check_scene(self, scene: Scene, frames: int) -> None:
        """Raise where it has no prompt."""
        scene.need_prompt(self.name)

    def video(self, scene: Scene, frames: int, number: int, progress: Callable[[], None]) -> Frames:
        """Generate; the host draws more noise between steps from PyTorch's global generators."""
        shape = (1, latents_of(frames), *self._latent)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(self.device, torch.bfloat16)
        with watched(self.pipeline.generator, progress):
            made = self.pipeline.inference(noise=noise, text_prompts=[scene.prompt])
        clear = getattr(getattr(self.pipeline.vae, "model", None), "clear_cache", None)
        if clear is not None:  # the host's decoder keeps the end of a video
            clear()
        return levels(made[0].movedim(1, -1))


def load(setup: Setup) -> CausalForcingHost:
    """Build the host's pipeline as its own ``inference.py`` does, and load the generator's weights.

    Raises:
        ParameterError: A path is missing, the checkout is another one or lacks a library, or the size is not the host's.
        FormatError: The weights are not this generator's, the configuration is no YAML, or there is no scene.
    """
    check_size(CausalForcingHost.name, setup, ("480p",), "is written for 480p")
    root, weights, scenes = given(CausalForcingHost.name, setup, file=True)
    chosen = checkout.configuration(root, setup.config, CONFIG)
    default = checkout.configuration(root, None, DEFAULT_CONFIG)
    with checkout.inside(root):
        config = checkout.config(root, default, chosen)
        if not hasattr(config, "denoising_step_list"):
            raise ParameterError(f"--config {chosen}: names no denoising_step_list; only few-step pipelines are loaded")
        pipeline = checkout.module(root, "pipeline").CausalInferencePipeline(config, device=torch.device(setup.device))
    load_weights(pipeline.generator, weights, lambda name: name.replace("model._fsdp_wrapped_module.", "model.", 1))
    pipeline = pipeline.to(device=setup.device, dtype=torch.bfloat16).eval().requires_grad_(False)
    return CausalForcingHost(pipeline, scenes, LATENT)


LOAD = load
