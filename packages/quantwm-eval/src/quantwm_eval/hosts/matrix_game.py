"""Matrix-Game 2: a picture and actions to video of 352 x 640, from a checkout and released weights.

``checkout`` is the folder ``Matrix-Game-2`` of github.com/SkyworkAI/Matrix-Game, its requirements installed here; ``weights`` is
the folder of the released models, ``Matrix-Game-2.0``. ``config`` is one of the checkout's ``configs/inference_yaml``, the
universal model's unless told otherwise. Scenes are pictures, as in the checkout's ``demo_images``. Their actions are an
``.npz`` of ``keyboard`` ``[frames, keys]`` and, where the model has one, ``mouse`` ``[frames, 2]``; without it the host's own
benchmark draws them, by scene and seed.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval import checkout
from quantwm_eval.checkout_given import POSITIONS, check_size, given, part
from quantwm_eval.checkout_host import CheckoutHost, levels, load_weights, watched
from quantwm_eval.evidence import Frames
from quantwm_eval.footage import picture
from quantwm_eval.hosts import Setup
from quantwm_eval.latents import latents_of
from quantwm_eval.suite import Scene

CONFIG = Path("configs/inference_yaml/inference_universal.yaml")
CHECKPOINTS = {
    "universal": "base_distilled_model/base_distill.safetensors",
    "gta_drive": "gta_distilled_model/gta_keyboard2dim.safetensors",
    "templerun": "templerun_distilled_model/templerun_7dim_onlykey.safetensors",
}
"""Of the released folder, by the mode that a configuration names."""
HEIGHT, WIDTH = 352, 640
STRIDE = 8  # pixels of a side of a latent's
TILES = {"tiled": True, "tile_size": [44, 80], "tile_stride": [23, 38]}
"""How the host's own script encodes a picture."""


class MatrixGameHost(CheckoutHost):
    """The host's ``CausalInferencePipeline``.

    Args:
        pipeline: It.
        scenes: The suite.
        device: Where it runs.
        vae: The host's encoder of pictures, with its CLIP.
        actions: Draws the actions of so many frames by the host's own benchmark; None where it has none for this model.
    """

    name = "matrix_game"
    frames, frame_rate = 93, 12
    chunks_per_seal = 1  # the stock window holds one past chunk

    def __init__(
        self,
        pipeline: Any,
        scenes: tuple[Scene, ...],
        device: torch.device,
        vae: Any,
        actions: Callable[[int], Mapping[str, Tensor]] | None,
    ) -> None:
        super().__init__(pipeline, scenes, device)
        self._vae, self._actions = vae, actions
        self.chunk, self._mode = int(pipeline.num_frame_per_block), str(pipeline.args.mode)
        self.most_chunks = POSITIONS // self.chunk

    def check_scene(self, scene: Scene, frames: int) -> None:
        """Raise where it has no picture, or no actions for so many frames."""
        scene.need(self.name, "image", "a picture")
        if "actions" in scene.parts or self._actions is None:
            self._read(scene.need(self.name, "actions", f"an .npz: the host draws none for {self._mode}"), frames)

    def video(self, scene: Scene, frames: int, number: int, progress: Callable[[], None]) -> Frames:
        """Generate as the host's own ``inference.py`` does; its noise comes from PyTorch's global generators."""
        dtype = torch.bfloat16
        given = picture(scene.parts["image"])
        first = given.crop(_middle(*given.size))
        pixels = torch.from_numpy(np.array(first.resize((WIDTH, HEIGHT), PIL.Image.Resampling.BILINEAR))).permute(
            2, 0, 1
        )
        image = (pixels / 127.5 - 1)[None, :, None].to(self.device, dtype)
        latents = latents_of(frames)
        padded = torch.cat([image, torch.zeros_like(image).repeat(1, 1, frames - 1, 1, 1)], dim=2)
        encoded = self._vae.encode(padded, device=self.device, **TILES).to(self.device)
        mask = torch.ones_like(encoded)
        mask[:, :, 1:] = 0
        conditions = {
            "cond_concat": torch.cat([mask[:, :4], encoded], dim=1),
            "visual_context": self._vae.clip.encode_video(image),
            **self._conditions(scene, frames),
        }
        noise = torch.randn(1, 16, latents, HEIGHT // STRIDE, WIDTH // STRIDE, device=self.device, dtype=dtype)
        with watched(self.pipeline.generator, progress):
            made = self.pipeline.inference(
                noise=noise,
                conditional_dict={name: each.to(self.device, dtype) for name, each in conditions.items()},
                mode=self._mode,
            )
        return levels(torch.cat(list(made), dim=1)[0].movedim(1, -1), -1, 1)

    def _conditions(self, scene: Scene, frames: int) -> dict[str, Tensor]:
        if "actions" in scene.parts or self._actions is None:
            return self._read(scene.need(self.name, "actions", "an .npz"), frames)
        drawn = self._actions(frames)
        return {f"{name}_cond": drawn[f"{name}_condition"][None] for name in self._inputs()}

    def _inputs(self) -> dict[str, int]:
        """What the model is told of, and by how many numbers."""
        settings = self.pipeline.generator.model.action_config
        sizes = {"keyboard": int(settings["keyboard_dim_in"])}
        return sizes | ({"mouse": int(settings["mouse_dim_in"])} if settings["enable_mouse"] else {})

    def _read(self, path: Path, frames: int) -> dict[str, Tensor]:
        """Actions of a file, ``[1, frames, numbers]``.

        Raises:
            FormatError: It is no ``.npz``, lacks an array, or one is of another shape.
        """
        try:
            with path.open("rb") as file:
                found = np.load(file, allow_pickle=False)
                if not isinstance(found, np.lib.npyio.NpzFile):
                    raise TypeError("it is a single array")
                held = {name: np.asarray(found[name], np.float32) for name in self._inputs()}
        except (KeyError, TypeError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise FormatError(f"{path}: no .npz of {', '.join(self._inputs())}: {error}") from error
        for name, size in self._inputs().items():
            if held[name].ndim != 2 or held[name].shape[0] < frames or held[name].shape[1] != size:
                raise FormatError(f"{path}: {name} has shape {held[name].shape}, need [{frames} or more, {size}]")
        return {f"{name}_cond": torch.from_numpy(array[:frames])[None] for name, array in held.items()}


def load(setup: Setup) -> MatrixGameHost:
    """Build the host's pipeline as its own ``inference.py`` does; its decoder is not compiled.

    Raises:
        ParameterError: A path is missing, the checkout is another one or lacks a library, or the size is not the host's.
        FormatError: The weights are not this model's, the configuration is no YAML, or there is no scene.
    """
    name = MatrixGameHost.name
    check_size(name, setup, (), f"makes {HEIGHT} x {WIDTH} alone")
    root, weights, scenes = given(name, setup)
    chosen = checkout.configuration(root, setup.config, CONFIG)
    device = torch.device(setup.device)
    with checkout.inside(root):
        config = checkout.config(root, chosen)
        if not (hasattr(config, "mode") and hasattr(config, "model_kwargs")):
            raise ParameterError(f"--config {chosen}: names no mode and no model_kwargs; need one of {CONFIG.parent}")
        checkpoint = part(weights, CHECKPOINTS.get(str(config.mode), str(config.mode)))
        wrapper = checkout.module(root, "utils.wan_wrapper").WanDiffusionWrapper
        generator = wrapper(**dict(config.model_kwargs), is_causal=True)
        vae = checkout.module(root, "wan.vae.wanx_vae").get_wanx_vae_wrapper(str(weights), torch.float16)
        decoder = checkout.module(root, "demo_utils.vae_block3").VAEDecoderWrapper()
        kind = checkout.module(root, "pipeline").CausalInferencePipeline
        pipeline = kind(config, generator=generator, vae_decoder=decoder)
        conditions = checkout.module(root, "utils.conditions")
    load_weights(pipeline.generator, checkpoint)
    decoder.load_state_dict(_decoding(vae.vae.model.state_dict()))
    pipeline = pipeline.to(device=device, dtype=torch.bfloat16).eval().requires_grad_(False)
    pipeline.vae_decoder.to(torch.float16)
    draw = getattr(conditions, f"Bench_actions_{config.mode}", None)
    return MatrixGameHost(pipeline, scenes, device, vae.to(device, torch.bfloat16), draw)


def _decoding(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a whole VAE serves its decoder."""
    return {name: tensor for name, tensor in state.items() if name.startswith(("decoder.", "conv2."))}


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    """The largest box of the host's proportions in the middle of a picture."""
    if height / width > HEIGHT / WIDTH:
        new_width, new_height = width, int(width * HEIGHT / WIDTH)
    else:
        new_width, new_height = int(height * WIDTH / HEIGHT), height
    left, top = (width - new_width) / 2, (height - new_height) / 2
    return left, top, left + new_width, top + new_height


LOAD = load
