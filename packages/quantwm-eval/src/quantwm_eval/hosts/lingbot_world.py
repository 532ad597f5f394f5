"""LingBot-World v2: a picture, a prompt and a camera path to video at 480p or 720p, from a checkout and released weights.

``checkout`` is a clone of github.com/robbyant/lingbot-world-v2 whose requirements are installed here. ``weights`` is the folder
that its ``generate.py`` takes as ``--ckpt_dir``; the distilled model is taken where the folder holds it, else the pretrained
one. Scenes are laid out as the checkout's ``examples``: ``image.*``, ``prompt.txt``, ``poses.npy``, ``intrinsics.npy``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numpy.lib.format import open_memmap

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval import checkout
from quantwm_eval.checkout_given import POSITIONS, check_size, given, lengths, part, refuse_config
from quantwm_eval.checkout_host import CheckoutHost, levels, watched
from quantwm_eval.evidence import Frames
from quantwm_eval.footage import picture
from quantwm_eval.hosts import Setup
from quantwm_eval.suite import Scene

TASK = "i2v-A14B"
AREAS = {"480p": "480*832", "720p": "720*1280"}
"""What the host calls its sizes: areas, which the picture's own proportions divide into height and width."""
WINDOW, SINK, CHUNK = 18, 6, 4
"""Latent frames, as the host's instructions run the distilled model."""


class LingBotWorldHost(CheckoutHost):
    """The host's ``WanI2VCausal``.

    Args:
        pipeline: It.
        scenes: The suite.
        area: Pixels of a frame.
    """

    name = "lingbot_world"
    frames, frame_rate = 93, 16
    chunk, most_chunks = CHUNK, POSITIONS // CHUNK

    def __init__(self, pipeline: Any, scenes: tuple[Scene, ...], area: int) -> None:
        super().__init__(pipeline, scenes, pipeline.device)
        self._area = area

    def check_scene(self, scene: Scene, frames: int) -> None:
        """Raise where it has no prompt, no picture, or no camera for so many frames."""
        scene.need_prompt(self.name)
        scene.need(self.name, "image", "image.jpg")
        intrinsics = scene.need(self.name, "intrinsics", "intrinsics.npy")
        if len(shape := _shape(intrinsics)) != 2 or shape[0] < 1 or shape[1] != 4:
            raise ParameterError(f"{intrinsics}: got shape {shape}, need [1 or more, 4]: fx, fy, cx, cy")
        poses = scene.need(self.name, "poses", "poses.npy")
        shape = _shape(poses)
        if shape[1:] != (4, 4) or shape[0] < frames:
            raise ParameterError(f"{poses}: got shape {shape}, need [{frames} or more, 4, 4], camera to world")

    def video(self, scene: Scene, frames: int, number: int, progress: Callable[[], None]) -> Frames:
        """Generate, with the host's own steps and its own generator."""
        with watched(self.pipeline.model, progress):
            made = self.pipeline.generate(
                scene.prompt,
                picture(scene.parts["image"]),
                str(scene.parts["poses"].parent.resolve()),
                chunk_size=CHUNK,
                max_area=self._area,
                frame_num=frames,
                shift=self.pipeline.config.sample_shift,
                seed=number,
                offload_model=False,
            )
        return levels(made.permute(1, 2, 3, 0), -1, 1)


def load(setup: Setup) -> LingBotWorldHost:
    """Build the host's pipeline as its own ``generate.py`` does on one GPU.

    Raises:
        ParameterError: A path is missing, the checkout is another one or lacks a library, or the device is no GPU.
        FormatError: There is no scene.
    """
    name = LingBotWorldHost.name
    check_size(name, setup, tuple(AREAS), "makes 480p and 720p")
    refuse_config(name, setup)
    device = gpu(setup.device)
    root, weights, scenes = given(name, setup, fits=lengths(CHUNK))
    with checkout.inside(root):
        configs = checkout.module(root, "wan.configs")
        pipeline = checkout.module(root, "wan").WanI2VCausal(
            config=configs.WAN_CONFIGS[TASK],
            checkpoint_dir=str(weights),
            device_id=device,
            rank=0,
            local_attn_size=WINDOW,
            sink_size=SINK,
            infer_mode=mode_of(weights, configs.WAN_CONFIGS[TASK]),
        )
    return LingBotWorldHost(pipeline, scenes, configs.MAX_AREA_CONFIGS[AREAS[setup.size or "480p"]])


def _shape(path: Path) -> tuple[int, ...]:
    """The shape of an array in a file, of which no more than that is read.

    Raises:
        FormatError: It is no ``.npy``.
    """
    try:
        return open_memmap(path, mode="r").shape
    except (ValueError, EOFError) as error:
        raise FormatError(f"{path}: no array that can be read: {error}") from error


def gpu(device: str) -> int:
    """The number of a GPU.

    Raises:
        ParameterError: It is none.
    """
    found = torch.device(device)
    if found.type != "cuda":
        raise ParameterError(f"--device {device}: the code of {LingBotWorldHost.name} is written for CUDA")
    return found.index or 0


def mode_of(weights: Path, config: Any) -> str:
    """Which of the host's two models a folder holds.

    Raises:
        ParameterError: None of them.
    """
    if (weights / config.fast_checkpoint).is_dir():
        return "causal_fast"
    part(weights, config.causal_checkpoint)
    return "causal_pretrain"


LOAD = load
