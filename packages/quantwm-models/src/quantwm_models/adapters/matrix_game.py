"""``matrix_game``: Matrix-Game 2 (``CausalInferencePipeline`` and ``CausalInferenceStreamingPipeline``).

Keys are cached after RoPE with absolute positions. The caches of the action modules stay the host's own; those of layers
without such a module, which the host allocates and never touches, take no memory while attached. With the stock window
of six frames, three of which are active, at most half of the cache is ever sealed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quantwm_core.errors import ParameterError
from quantwm_models.action_caches import ActionCaches
from quantwm_models.errors import HostError
from quantwm_models.options import check_count
from quantwm_models.patching import Setting, attached_already, called_by, named
from quantwm_models.rolling_dict import MakeCache, RollingDict, hook
from quantwm_models.rotary import turning_of

_ACTION_ALLOCATOR = "_initialize_kv_cache_mouse_and_keyboard"
_ACTIONS = {"kv_cache_mouse": "enable_mouse", "kv_cache_keyboard": "enable_keyboard"}


@dataclass(frozen=True)
class MatrixGame:
    """The adapter, with its option.

    Attributes:
        window: Latent frames that the host attends to, active chunk included; None leaves what its configuration says.
            The released models were trained with six (four for ``gta_drive``).
    """

    window: int | None = None

    def __post_init__(self) -> None:
        check_count("window", self.window, optional=True)

    def matches(self, pipeline: object) -> bool:
        """Whether an object is one of these pipelines, or derived from one."""
        return named(pipeline, "CausalInferencePipeline", "CausalInferenceStreamingPipeline") and hasattr(
            pipeline, _ACTION_ALLOCATOR
        )

    def attach(self, pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
        """Replace the pipeline's two allocators and the attention function of its self-attention layers' module.

        Raises:
            HostError: The object lacks what the pipelines have.
            StateError: It has a cache under it already.
            ParameterError: ``window`` is less than a chunk.
        """
        try:
            model = pipeline.generator.model
            blocks = list(model.blocks)
            layers = [block.self_attn for block in blocks]
            actions = [block.action_model for block in blocks]
            chunk = int(pipeline.num_frame_per_block)
        except AttributeError as error:
            raise HostError(
                f"{type(pipeline).__qualname__}: need .num_frame_per_block and .generator.model.blocks of .self_attn and "
                f".action_model: {error}"
            ) from error
        allocate = getattr(pipeline, _ACTION_ALLOCATOR, None)
        if isinstance(allocate, ActionCaches):
            raise attached_already(pipeline)
        if not callable(allocate) or "device" not in inspect.signature(allocate).parameters:
            raise HostError(f"{type(pipeline).__qualname__}: need a method {_ACTION_ALLOCATOR}(..., device)")
        if self.window is not None and self.window < chunk:
            raise ParameterError(f"window={self.window}: need at least the {chunk} frames of a chunk")
        module, attention = called_by(layers[0], "attention")
        sparing = ActionCaches(
            allocate, actions, lambda _: ((enabled, getattr(pipeline, name)) for name, enabled in _ACTIONS.items())
        )
        return hook(
            RollingDict(
                pipeline,
                [module],
                attention=attention,
                lists=("kv_cache1",),
                sink=lambda _: int(layers[0].sink_size * pipeline.frame_seq_length),
                turning=lambda _: turning_of(getattr(model, "freqs", None), int(pipeline.frame_seq_length)),
                kept=(*_ACTIONS, "crossattn_cache"),
                settings=(Setting(pipeline, _ACTION_ALLOCATOR, sparing), *self._window(pipeline, blocks)),
            ),
            make_cache,
        )

    def _window(self, pipeline: Any, blocks: list[Any]) -> Iterator[Setting]:
        """What says how much the host attends to."""
        if self.window is None:
            return
        yield Setting(pipeline, "local_attn_size", self.window)
        for block in blocks:
            yield Setting(block.self_attn, "local_attn_size", self.window)
            yield Setting(block.self_attn, "max_attention_size", self.window * pipeline.frame_seq_length)
            if block.action_model is not None:
                yield Setting(block.action_model, "local_attn_size", self.window)


matches = MatrixGame().matches
attach = MatrixGame().attach
