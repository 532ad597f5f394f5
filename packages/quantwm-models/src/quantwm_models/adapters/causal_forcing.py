"""``causal_forcing``: Causal-Forcing, its ``long_video`` variant, and Self-Forcing, which it descends from.

Recognised are ``CausalInferencePipeline`` and ``CausalDiffusionInferencePipeline``, the latter with a cache each for the
prompt and the negative prompt. Keys are cached after RoPE with absolute positions, and queries pass attention in the same
frame. In ``long_video`` the first block's keys are cached before RoPE and rotated anew for each read: the cache returns
them as they were written, and they are sealed before there are query statistics, so that no foreign frame weights them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantwm_core.errors import ParameterError
from quantwm_models.errors import HostError
from quantwm_models.options import check_count
from quantwm_models.patching import Setting, called_by, named
from quantwm_models.rolling_dict import MakeCache, RollingDict, hook
from quantwm_models.rotary import turning_of

_LISTS = ("kv_cache1", "kv_cache_pos", "kv_cache_neg", "kv_cache_clean")
_CROSS_ATTENTION = ("crossattn_cache", "crossattn_cache_pos", "crossattn_cache_neg")


@dataclass(frozen=True)
class CausalForcing:
    """The adapter, with its option.

    Attributes:
        frames: Latent frames to make room for where the host keeps all; None leaves it at what the host allows. Stock
            code stops at 32760 tokens, 21 frames of 480 x 832, although it can attend to more.

    >>> CausalForcing(frames=24).matches(object())
    False
    """

    frames: int | None = None

    def __post_init__(self) -> None:
        check_count("frames", self.frames, optional=True)

    def matches(self, pipeline: object) -> bool:
        """Whether an object is one of these pipelines, or derived from one."""
        return (
            named(pipeline, "CausalInferencePipeline", "CausalDiffusionInferencePipeline")
            and hasattr(pipeline, "generator")
            and any(name in vars(pipeline) for name in _LISTS)
            and not hasattr(pipeline, "kv_cache_mouse")  # a relative, which has an adapter of its own
        )

    def attach(self, pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
        """Replace the pipeline's allocator and the attention function of its self-attention layers' module.

        Raises:
            HostError: The object lacks what the pipelines have.
            ParameterError: ``frames`` for a host with a window, or beyond its positions.
        """
        try:
            model = pipeline.generator.model
            layers = [block.self_attn for block in model.blocks]
            frame_tokens, window, positions = int(pipeline.frame_seq_length), model.local_attn_size, len(model.freqs)
        except AttributeError as error:
            raise HostError(
                f"{type(pipeline).__qualname__}: need .frame_seq_length and .generator.model with .blocks of .self_attn, "
                f".local_attn_size and .freqs: {error}"
            ) from error
        module, attention = called_by(layers[0], "attention")
        rolling = hasattr(pipeline, "inference_rolling_forcing")
        capacity = None
        if self.frames is not None:
            capacity = self._capacity(self.frames, frame_tokens, window != -1 or rolling, positions)

        def sink(_: int) -> int:
            first = layers[0]
            return int(first.block_length if rolling else first.sink_size * pipeline.frame_seq_length)

        return hook(
            RollingDict(
                pipeline,
                [module],
                attention=attention,
                lists=tuple(name for name in _LISTS if name in vars(pipeline)),
                sink=sink,
                turning=lambda _: None if rolling else turning_of(model.freqs, frame_tokens),
                slots=lambda allocated: allocated if capacity is None else capacity,
                kept=_CROSS_ATTENTION,
                settings=() if capacity is None else _unlimited(layers, capacity),
                assembling=layers if rolling else (),
            ),
            make_cache,
        )

    def _capacity(self, frames: int, frame_tokens: int, windowed: bool, positions: int) -> int:
        if windowed:
            raise ParameterError(f"frames={frames} for a host with a window; it makes room only where all are kept")
        if frames > positions:
            raise ParameterError(f"frames={frames}: need 1 to {positions}, the host's temporal positions")
        return frames * frame_tokens


def _unlimited(layers: list[Any], capacity: int) -> tuple[Setting, ...]:
    """Let each layer attend to all that the cache has room for."""
    return tuple(Setting(layer, "max_attention_size", capacity) for layer in layers)


matches = CausalForcing().matches
attach = CausalForcing().attach
