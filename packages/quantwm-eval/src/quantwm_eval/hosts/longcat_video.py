"""LongCat-Video: continuation of a video, segment by segment, at 480p or 720p, from a checkout and released weights.

``checkout`` is a clone of github.com/meituan-longcat/LongCat-Video whose requirements are installed here, ``weights`` the folder
of the released model (``tokenizer``, ``text_encoder``, ``vae``, ``scheduler``, ``dit``). Scenes need a prompt. A scene's ``video``
(a file, or a folder of frames) is continued; where it has none, the host makes the beginning itself, from ``image`` or from
the prompt alone, without any cache. Only the frames that follow count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import torch

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval import checkout, footage
from quantwm_eval.checkout_given import check_size, given, part, refuse_config
from quantwm_eval.checkout_host import CheckoutHost, levels
from quantwm_eval.evidence import Frames
from quantwm_eval.hosts import Setup
from quantwm_eval.suite import Scene

SEGMENT, GIVEN = 93, 73
"""Frames of a segment, and those of them that it is given: 19 latent frames, whose cache the paper measures."""
STEPS, GUIDANCE = 50, 4.0
BLURRED = (
    "blurred, overexposed, grey, static, still picture, worst quality, low quality, compression artefacts, subtitles, "
    "deformed, fused fingers, messy background"
)
"""What the picture is led away from."""
SIZES = ("480p", "720p")


class LongCatVideoHost(CheckoutHost):
    """The host's ``LongCatVideoPipeline``; a chunk is a segment.

    Args:
        pipeline: It.
        scenes: The suite.
        device: Where it runs.
        size: ``"480p"`` or ``"720p"``; height and width follow from the proportions of what is given.
    """

    name = "longcat_video"
    frames, frame_rate = SEGMENT - GIVEN, 15

    def __init__(self, pipeline: Any, scenes: tuple[Scene, ...], device: torch.device, size: str) -> None:
        super().__init__(pipeline, scenes, device)
        self._size = size
        self._begun: tuple[tuple[str, int], list[PIL.Image.Image]] | None = None

    def frames_of(self, chunks: int) -> int:
        """New frames that so many segments make."""
        return chunks * (SEGMENT - GIVEN)

    def check_scene(self, scene: Scene, frames: int) -> None:
        """Raise where it has no prompt, or a video that is too short."""
        scene.need_prompt(self.name)
        if "video" in scene.parts:
            self._given(scene)

    def video(self, scene: Scene, frames: int, number: int, progress: Callable[[], None]) -> Frames:
        """Continue, with the settings of the host's own script for long videos."""
        generator = torch.Generator(self.device).manual_seed(number)
        told = {
            "prompt": scene.prompt,
            "negative_prompt": BLURRED,
            "num_frames": SEGMENT,
            "num_inference_steps": STEPS,
            "guidance_scale": GUIDANCE,
            "generator": generator,
        }
        history, made = self._beginning(scene, number, told), []
        generator.manual_seed(number)  # what follows does not depend on where the beginning came from
        for _ in range(frames // self.frames_of(1)):
            found = self.pipeline.generate_vc(
                video=history, resolution=self._size, num_cond_frames=GIVEN, use_kv_cache=True, **told
            )
            segment = levels(found[0])
            made.append(segment[GIVEN:])
            history = list(map(PIL.Image.fromarray, segment))
            progress()
        return np.concatenate(made)

    def _beginning(self, scene: Scene, number: int, told: dict[str, Any]) -> list[PIL.Image.Image]:
        """What is continued; the host makes it without a cache, so it is kept for the methods that follow."""
        if "video" in scene.parts:
            return self._given(scene)
        key = (scene.place, number)
        if self._begun is None or self._begun[0] != key:
            if "image" in scene.parts:
                found = self.pipeline.generate_i2v(
                    image=footage.picture(scene.parts["image"]), resolution=self._size, **told
                )
            else:
                found = self.pipeline.generate_t2v(height=480, width=832, **told)
            self._begun = key, list(map(PIL.Image.fromarray, levels(found[0])))
        return self._begun[1]

    def _given(self, scene: Scene) -> list[PIL.Image.Image]:
        """The end of the scene's video.

        Raises:
            FormatError: It cannot be read, or there are several.
            ParameterError: It is too short.
        """
        path = scene.parts["video"]
        found = footage.find(path)
        if len(found) > 1:
            raise FormatError(f"{path}: holds {len(found)} videos, {', '.join(found)}; keep the one to be continued")
        (film,) = found.values()
        end = deque(film.frames(), maxlen=GIVEN)  # a long film never lies in memory as a whole
        if len(end) < GIVEN:
            raise ParameterError(f"{film.path}: has {len(end)} frames, a segment is given {GIVEN}")
        return list(map(PIL.Image.fromarray, end))


def load(setup: Setup) -> LongCatVideoHost:
    """Build the host's pipeline as its own scripts do, in one process.

    Raises:
        ParameterError: A path is missing, or the checkout is another one or lacks a library.
        FormatError: There is no scene.
    """
    name = LongCatVideoHost.name
    check_size(name, setup, SIZES, "makes 480p and 720p")
    refuse_config(name, setup)
    fits = [(1 + segment) * (SEGMENT - GIVEN) for segment in range(LongCatVideoHost.most_chunks)]
    root, weights, scenes = given(name, setup, fits=fits)
    folders = {name: part(weights, name) for name in ("tokenizer", "text_encoder", "vae", "scheduler", "dit")}
    device = torch.device(setup.device)
    with checkout.inside(root):
        transformers = checkout.library(root, "transformers")
        kinds: dict[str, Any] = {
            "tokenizer": transformers.AutoTokenizer,
            "text_encoder": transformers.UMT5EncoderModel,
            "vae": _own(root, "modules.autoencoder_kl_wan").AutoencoderKLWan,
            "scheduler": _own(root, "modules.scheduling_flow_match_euler_discrete").FlowMatchEulerDiscreteScheduler,
            "dit": _own(root, "modules.longcat_video_dit").LongCatVideoTransformer3DModel,
        }
        parts = {
            name: kind.from_pretrained(str(folders[name]), local_files_only=True, **_options(name))
            for name, kind in kinds.items()
        }
        pipeline = _own(root, "pipeline_longcat_video").LongCatVideoPipeline(**parts)
    for model in (pipeline.text_encoder, pipeline.vae, pipeline.dit):
        model.eval().requires_grad_(False)
    pipeline.to(device)
    return LongCatVideoHost(pipeline, scenes, device, setup.size or SIZES[0])


def _own(root: Any, name: str) -> Any:
    return checkout.module(root, f"longcat_video.{name}")


def _options(name: str) -> dict[str, Any]:
    dtype = {} if name in ("tokenizer", "scheduler") else {"torch_dtype": torch.bfloat16}
    return dtype | ({"cp_split_hw": [1, 1]} if name == "dit" else {})


LOAD = load
