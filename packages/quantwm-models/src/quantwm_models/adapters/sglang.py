"""``sglang``: SGLang's causal video models, as the stage of a pipeline that denoises (``CausalDMDDenoisingStage``).

A layer hands new keys and values to an object of its own, ``update_and_get_attention_kv``, and gets back those to attend to.
The objects stay the host's; their two tensors become stores, so that windows, sinks and pinned chunks are moved by the
host's own code. Keys are cached after RoPE with absolute positions. What the host puts together from several ranges (a sink and
a shorter window, a pinned chunk) is reconstructed range by range; its queries count, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantwm_models.errors import HostError
from quantwm_models.patching import Setting, named
from quantwm_models.rolling_dict import MakeCache, RollingDict, hook

_ALLOCATOR = "_allocate_causal_kv_cache"
_LISTS = ("causal_kv_cache", "causal_kv_cache_neg")
_PAIR = "_new_causal_cache_pair"
# By these LingBot-World's layers attend where the sequence is shared out among GPUs.
_SHARDED = ("ulysses_attn", "full_head_attn")


def matches(pipeline: object) -> bool:
    """Whether an object is the stage, or derived from it."""
    return named(pipeline, "CausalDMDDenoisingStage") and hasattr(pipeline, _ALLOCATOR)


def attach(pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
    """Replace the stage's allocator and the attention of each self-attention layer.

    Raises:
        HostError: The object lacks what the stage has, or packs its cache itself.
    """
    try:
        layers = [block.attn1 for block in pipeline.transformer.blocks]
        attending = [layer.attn for layer in layers]
        attending += [getattr(layer, name) for layer in layers for name in _SHARDED if hasattr(layer, name)]
        sink = pipeline._get_causal_sink_tokens  # noqa: SLF001  # the host's own, which tells it to its cache
    except AttributeError as error:
        raise HostError(
            f"{type(pipeline).__qualname__}: need ._get_causal_sink_tokens and .transformer with .blocks of .attn1 with "
            f".attn: {error}"
        ) from error
    if getattr(getattr(pipeline, "_kv_quant_args", None), "enabled", False):
        raise HostError(
            f"{type(pipeline).__qualname__}: the host packs its cache itself; switch its kv_cache_quant off"
        )
    second = _SecondPair(getattr(pipeline, _PAIR, None))
    return hook(
        RollingDict(
            pipeline,
            (),
            allocator=_ALLOCATOR,
            attending=attending,
            lists=_LISTS,
            branch=lambda: "neg" if second.running else "",
            sink=lambda _: int(sink()),
            settings=() if second.make is None else (Setting(pipeline, _PAIR, second),),
            assembling=layers,
        ),
        make_cache,
    )


class _SecondPair:
    """The method that makes caches for the negative prompt, beside those that the stage has."""

    def __init__(self, make: Callable[..., Any] | None) -> None:
        self.make = make
        self.running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.make is None:
            raise HostError(f"the host has no {_PAIR}")
        self.running = True
        try:
            return self.make(*args, **kwargs)
        finally:
            self.running = False
