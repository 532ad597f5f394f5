"""``demo``: the small world model that quantwm-eval bundles (``quantwm_eval.demo.sampler.WorldPipeline``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quantwm_core.rotary import Turning
from quantwm_models.errors import HostError
from quantwm_models.patching import module_of
from quantwm_models.rolling_dict import MakeCache, RollingDict, hook


def matches(pipeline: object) -> bool:
    """Whether an object is the demo's pipeline, or derived from it."""
    return any(
        kind.__name__ == "WorldPipeline" and kind.__module__.startswith("quantwm_eval.demo.")
        for kind in type(pipeline).__mro__
    )


def attach(pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
    """Replace the pipeline's allocator and the ``attention`` of its model's module.

    Raises:
        HostError: The object lacks what the demo's pipeline has.
    """
    try:
        module = module_of(pipeline.model)
        frame_tokens = int(pipeline.config.frame_tokens)
        sink_frames = pipeline.sink_frames
    except AttributeError as error:
        raise HostError(f"{type(pipeline).__qualname__}: need .model, .config.frame_tokens and .sink_frames") from error
    del sink_frames  # read again at each allocation, since a user may set it in between
    return hook(
        RollingDict(
            pipeline,
            [module],
            sink=lambda _: int(pipeline.sink_frames) * frame_tokens,
            turning=lambda _: _turning(pipeline.model, frame_tokens),
        ),
        make_cache,
    )


def _turning(model: Any, frame_tokens: int) -> Turning:
    """By how much queries of frame 1 are turned whose row and column are 0."""
    return Turning(frame_tokens, tuple(torch.atan2(model.sin[1, 0], model.cos[1, 0]).tolist()))
