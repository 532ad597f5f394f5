"""``fastvideo``: FastVideo's causal Wan and Matrix-Game 2, as the stage of a pipeline that denoises.

These are ``CausalDMDDenosingStage`` and ``MatrixGame2CausalDenoisingStage``. FastVideo's LingBot-World 2 is served by
``lingbot_world``, its LongCat-Video by ``longcat_video``. Keys are cached after RoPE, as ``rope_cache_policy="absolute"``
has them; the other policy caches them before, and rotates them anew for each read, and is refused. The caches of
Matrix-Game's action modules stay the host's own; those of layers that have no use for them take no memory while attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from quantwm_models.action_caches import ActionCaches
from quantwm_models.errors import HostError
from quantwm_models.patching import Setting, forward_of, named
from quantwm_models.rolling_dict import MakeCache, RollingDict, hook

_POLICY = "absolute"
_STAGES = {
    "CausalDMDDenosingStage": "CausalWanTransformer3DModel",
    "MatrixGame2CausalDenoisingStage": "CausalMatrixGame2WanModel",
}
_ACTION_ALLOCATOR = "_initialize_action_kv_cache"
_ENABLING = ("enable_mouse", "enable_keyboard")
_DENSE = "scaled_dot_product_attention"


def matches(pipeline: object) -> bool:
    """Whether an object is one of these stages, or derived from one, around its transformer."""
    transformer = getattr(pipeline, "transformer", None)
    return any(named(pipeline, stage) and named(transformer, model) for stage, model in _STAGES.items())


def attach(pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
    """Replace the stage's allocator and the attention of each self-attention layer.

    Raises:
        HostError: The object lacks what the stage has, caches keys before RoPE, or has two transformers.
    """
    try:
        layers = [block.attn1 for block in pipeline.transformer.blocks]
        attending = [layer.attn for layer in layers]
        policies = {layer.rope_cache_policy for layer in layers}
    except AttributeError as error:
        raise HostError(
            f"{type(pipeline).__qualname__}: need .transformer with .blocks of .attn1 with .attn and .rope_cache_policy: "
            f"{error}"
        ) from error
    if policies != {_POLICY}:
        raise HostError(
            f"{type(pipeline).__qualname__}: rope_cache_policy {sorted(policies)}: keys that are cached before RoPE are not "
            f"served; need {_POLICY!r}"
        )
    if getattr(pipeline, "transformer_2", None) is not None:
        raise HostError(f"{type(pipeline).__qualname__}: two transformers with a cache each are not served")
    if _DENSE in forward_of(layers[0]).__code__.co_names:
        attending = []  # PyTorch's function reads the ranges itself; the module beside it serves training

    def sink(slots: int) -> int:
        frames = pipeline.local_attn_size if pipeline.local_attn_size != -1 else pipeline.sliding_window_num_frames
        return int(layers[0].sink_size * (slots // frames))

    settings = tuple(_spared(pipeline))
    return hook(RollingDict(pipeline, (), attending=attending, sink=sink, settings=settings), make_cache)


def _spared(pipeline: Any) -> Iterator[Setting]:
    """Matrix-Game's allocator of action caches, which returns two lists."""
    allocate = getattr(pipeline, _ACTION_ALLOCATOR, None)
    if callable(allocate) and not isinstance(allocate, ActionCaches):
        actions = [getattr(block, "action_model", None) for block in pipeline.transformer.blocks]
        sparing = ActionCaches(allocate, actions, lambda lists: zip(_ENABLING, lists, strict=True))
        yield Setting(pipeline, _ACTION_ALLOCATOR, sparing)
