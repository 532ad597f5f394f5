"""HY-World 1.5's 5B model: a prompt, a first picture if wanted, and a camera path to video of 704 x 1280.

``checkout`` is a clone of github.com/Tencent-Hunyuan/HY-WorldPlay whose requirements are installed here. ``weights`` is a folder
that holds ``wan_transformer`` and ``wan_distilled_model`` as its instructions download them, and the base model
``Wan2.2-TI2V-5B-Diffusers``. The distilled weights were released as a pickle, ``model.pt``: save its entry ``generator`` once
as ``wan_distilled_model/model.safetensors``. Scenes need a prompt; ``pose.txt`` is a camera path in the host's words
(``w-8, right-4, d-11``), ``pose.json`` one as its ``assets/pose``; without either the camera moves forward, as in its script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval import checkout
from quantwm_eval.checkout_given import POSITIONS, check_size, check_weights, given, lengths, part, refuse_config
from quantwm_eval.checkout_host import CheckoutHost, levels, load_weights
from quantwm_eval.evidence import Frames
from quantwm_eval.hosts import Setup
from quantwm_eval.latents import latents_of
from quantwm_eval.suite import Scene

HEIGHT, WIDTH = 704, 1280
CHUNK = 4  # latent frames
CONTEXT = 16
BASE = "Wan2.2-TI2V-5B-Diffusers"


class HyWorldHost(CheckoutHost):
    """The host's ``WanPipeline``, a call a chunk.

    Args:
        pipeline: It.
        scenes: The suite.
        device: Where it runs.
        poses: The host's module that turns words and files to cameras.
    """

    name = "hy_world"
    frames, frame_rate = 93, 16
    chunk, most_chunks = CHUNK, POSITIONS // CHUNK

    def __init__(self, pipeline: Any, scenes: tuple[Scene, ...], device: torch.device, poses: Any) -> None:
        super().__init__(pipeline, scenes, device)
        self._poses = poses

    def check_scene(self, scene: Scene, frames: int) -> None:
        """Raise where it has no prompt, or its camera path is too short."""
        scene.need_prompt(self.name)
        self._cameras(scene, frames)

    def video(self, scene: Scene, frames: int, number: int, progress: Callable[[], None]) -> Frames:
        """Generate with the settings of the host's own ``generate.py``."""
        cameras, image = self._cameras(scene, frames), scene.parts.get("image")
        generator, made = torch.Generator(self.device).manual_seed(number), []
        with alone():
            for chunk in range(len(cameras[0]) // CHUNK):
                views, intrinsics, actions = (
                    each[None, chunk * CHUNK : (chunk + 1) * CHUNK].to(self.device) for each in cameras
                )
                video, _ = self.pipeline(
                    prompt=scene.prompt,
                    height=HEIGHT,
                    width=WIDTH,
                    num_frames=frames,
                    guidance_scale=1.0,
                    few_step=True,
                    first_chunk_size=CHUNK,
                    return_dict=False,
                    image_path=None if image is None else str(image.resolve()),
                    use_memory=True,
                    context_window_length=CONTEXT,
                    generator=generator,
                    chunk_i=chunk,
                    viewmats=views,
                    Ks=intrinsics,
                    action=actions,
                    output_type="np",
                )
                made.append(np.asarray(video[0]))
                progress()
        return levels(np.concatenate(made))

    def _cameras(self, scene: Scene, frames: int) -> tuple[Any, ...]:
        """View matrices, intrinsics and actions of every latent frame.

        Raises:
            FormatError: The path cannot be read.
            ParameterError: It is too short.
        """
        latents, path = latents_of(frames), scene.parts.get("pose")
        where = scene.place if path is None else path
        try:
            steps = self._path(path, latents)
            if not isinstance(steps, dict):
                raise TypeError(f"need an object, a camera for each latent frame; got {type(steps).__name__}")
            if len(steps) >= latents:
                return tuple(self._poses.pose_to_input(dict(list(steps.items())[:latents]), latents))
        except (ValueError, LookupError, TypeError) as error:
            raise FormatError(f"{where}: no camera path of the host: {error}") from error
        raise ParameterError(
            f"{where}: {len(steps)} cameras; {frames} frames are {latents} latent frames, the first of which stands still"
        )

    def _path(self, path: Path | None, latents: int) -> Any:
        """A camera path as a file has it, or one that moves forward."""
        if path is None:
            return self._poses.pose_string_to_json(f"w-{latents - 1}")
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else self._poses.pose_string_to_json(text.strip())


def load(setup: Setup) -> HyWorldHost:
    """Build the host's pipeline as its own ``generate.py`` does, in one process.

    Raises:
        ParameterError: A path is missing, the checkout is another one or lacks a library, or the size is not the host's.
        FormatError: The weights are not this model's, or there is no scene.
    """
    name = HyWorldHost.name
    check_size(name, setup, ("720p",), f"makes {HEIGHT} x {WIDTH} alone: 880 tokens a frame are written into its code")
    refuse_config(name, setup)
    root, weights, scenes = given(name, setup, fits=lengths(CHUNK))
    base, architecture = part(weights, BASE), part(weights, "wan_transformer")
    trained = part(weights, "wan_distilled_model/model.safetensors")
    check_weights(trained)
    device, dtype = torch.device(setup.device), torch.bfloat16
    with checkout.inside(root, "wan"):
        poses = checkout.module(root, "hyvideo.generate")  # believes in one process; the rest is told of none
    with checkout.inside(root, "wan"), alone():
        kind = checkout.module(root, "wan.inference.pipeline_wan_w_mem_relative_rope").WanPipeline
        model_kind = checkout.module(root, "wan.models.dits.arwan_w_action_w_mem_relative_rope").WanTransformer3DModel
        vae_kind = checkout.module(root, "wan.inference.helper").MyVAE
        local = {"torch_dtype": dtype, "local_files_only": True}
        vae = vae_kind.from_pretrained(str(base), subfolder="vae", **local).eval().requires_grad_(False)
        pipeline = kind.from_pretrained(str(base), vae=vae, transformer=None, **local)
        model = model_kind.from_pretrained(str(architecture), use_safetensors=True, **local)
        model.add_discrete_action_parameters()
    load_weights(model, trained, _released)
    pipeline.transformer = model.to(dtype).eval().requires_grad_(False)
    return HyWorldHost(pipeline.to(device), scenes, device, poses)


@contextmanager
def alone() -> Iterator[None]:
    """Without parallel processes, which the host believes in where this variable is anything but 0."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = "0"
    try:
        yield
    finally:
        os.environ.pop("WORLD_SIZE", None)
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def _released(name: str) -> str:
    """A weight's name in the model, from that in the released file."""
    return name.removeprefix("model.").removeprefix("_fsdp_wrapped_module.")


LOAD = load
