"""What of a stack is run, as a frozen value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quantwm_core.errors import ParameterError
from quantwm_eval.latents import frames_of
from quantwm_eval.true_shapes.hy_world import WanPipeline
from quantwm_eval.true_shapes.hy_world_8b import HunyuanVideo_1_5_Pipeline
from quantwm_eval.true_shapes.layers import Weights
from quantwm_eval.true_shapes.longcat_video import LongCatVideoPipeline
from quantwm_eval.true_shapes.rolling import CausalInferencePipeline, CausalInferenceStreamingPipeline, WanI2VCausal
from quantwm_eval.true_shapes.shape import Shape, tiny
from quantwm_eval.true_shapes.stack import Stack

STACKS: dict[str, Callable[..., Stack]] = {
    "causal_forcing": CausalInferencePipeline,
    "hy_world": WanPipeline,
    "hy_world_8b": HunyuanVideo_1_5_Pipeline,
    "lingbot_world": WanI2VCausal,
    "longcat_video": LongCatVideoPipeline,
    "matrix_game": CausalInferenceStreamingPipeline,
}


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        model: Name of the shape.
        resolution: Of the video; None takes the smallest that the host supports.
        frames: Of the video.
        layers, steps, window: Instead of the model's own; fewer layers and steps are extrapolated from.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        offload: Keep the cache in host memory: LongCat-Video in its own way, under ours packed; the other hosts cannot.
        once: Store keys and values of HY-World before its two encodings, of which both are derived on a read.
        alone: Leave the untouched host out, where it would not fit or takes too long.
        tiny: A stack in small, to try the command.
    """

    model: str
    resolution: str | None = None
    frames: int = 93
    layers: int | None = None
    steps: int | None = None
    window: int | None = None
    device: str = "cpu"
    offload: bool = False
    once: bool = False
    alone: bool = False
    tiny: bool = False

    @property
    def shape(self) -> Shape:
        """The model's, in small if so planned.

        Raises:
            UnknownNameError: There is no such model.
            ParameterError: A window for a host without one, or one that does not hold the sink and a chunk.
        """
        shape = Shape.load(self.model)
        if self.window is not None:
            least = shape.sink + shape.chunk
            if shape.window is None or self.window < least:
                has = "has no window" if shape.window is None else f"needs at least {least}, its sink and a chunk"
                raise ParameterError(f"--window {self.window}: {shape.title} {has}")
            shape = replace(shape, window=self.window)
        return tiny(shape) if self.tiny else shape

    @property
    def depth(self) -> int:
        """Layers that are run."""
        return min(self.shape.layers, self.layers or self.shape.layers)

    @property
    def steps_run(self) -> int:
        """Denoising steps of a chunk that are run."""
        return min(self.shape.steps, self.steps or self.shape.steps)

    def check(self) -> None:
        """Refuse what there is not.

        Raises:
            UnknownNameError: The model, or the resolution for its host.
            ParameterError: The video is too short or no whole chunks, the window holds more than the video, there are not so
                many layers or steps, or there is one encoding.
        """
        shape = self.shape
        if self.once and shape.kinds == 1:
            raise ParameterError(f"--once: {shape.title} has one encoding, which is stored once")
        shape.frame_tokens(self.resolution)
        self._check_length(shape, shape.latents(self.frames))
        for name, given, there in (("layers", self.layers, shape.layers), ("steps", self.steps, shape.steps)):
            if given is not None and given > there:
                small = " in small" if self.tiny else ""
                raise ParameterError(f"--{name} {given}: {shape.title}{small} has {there} {name}; need 1 to {there}")

    def _check_length(self, shape: Shape, latents: int) -> None:
        """Refuse frames that a video would not have, and a window that would not fill."""
        made, longer = frames_of(latents), frames_of(latents + (1 if shape.host == "segments" else shape.chunk))
        if made != self.frames:
            raise ParameterError(f"--frames {self.frames}: {shape.title} makes {made} or {longer}, whole chunks")
        most = shape.history(latents)
        if self.window is not None and self.window > most:
            raise ParameterError(
                f"--window {self.window}: of {self.frames} frames {shape.title} caches {most} latent frames; need at most {most}"
            )

    def build(self, layers: int | None = None) -> Stack:
        """The stack, of another depth if told."""
        shape = self.shape
        sizes: dict[str, Any] = {
            "layers": self.depth if layers is None else layers,
            "latents": shape.latents(self.frames),
            "frame_tokens": shape.frame_tokens(self.resolution),
        }
        if self.offload and shape.host == "segments":
            sizes["offload"] = True
        return STACKS[self.model](shape, Weights(self.device), **sizes)
