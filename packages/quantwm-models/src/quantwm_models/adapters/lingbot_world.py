"""``lingbot_world``: LingBot-World v2 (``WanI2VCausal``), distilled and pretrained, on one GPU or with Ulysses.

FastVideo's stage that generates (``LingBotWorld2CausalFastGenerationStage``) has the same allocator and layers.

Keys are cached after RoPE with absolute positions; with sequence parallelism after the exchange of heads, so that each
rank holds all tokens of its own heads and seals them alone. The dicts live as long as one ``generate`` call; FSDP hands
copies of them to the model, which hold the same stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from quantwm_core.rotary import Turning
from quantwm_models.errors import HostError
from quantwm_models.geometry import shared_by
from quantwm_models.patching import Setting, called_by, named
from quantwm_models.rolling_dict import MakeCache, RollingDict, hook
from quantwm_models.rotary import turning_of

_GUIDED = "_generate_causal_pretrain"


def matches(pipeline: object) -> bool:
    """Whether an object is the pipeline or the stage, or derived from one."""
    return named(pipeline, "WanI2VCausal", "LingBotWorld2CausalFastGenerationStage")


def attach(pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
    """Replace the pipeline's allocator and the attention function that its self-attention layers call.

    Raises:
        HostError: The object lacks what the pipeline has.
    """
    name = "transformer" if hasattr(pipeline, "transformer") else "model"
    try:
        model = getattr(pipeline, name)
        layers = [block.self_attn for block in model.blocks]
        first = layers[0]
        sizes = (first.sink_size, first.local_attn_size)
    except (AttributeError, IndexError) as error:
        raise HostError(
            f"{type(pipeline).__qualname__}: need .{name}.blocks of .self_attn with .sink_size and .local_attn_size: "
            f"{error}"
        ) from error
    del sizes  # read again at each allocation, since a user may set them in between
    module, attention = called_by(first, "attention", "flash_attention")

    def sink(slots: int) -> int:
        # A window is allocated as a whole number of frames, whose size follows the image.
        return int(first.sink_size * slots // first.local_attn_size) if first.local_attn_size > 0 else 0

    def turning(slots: int) -> Turning | None:
        frames = int(first.local_attn_size)
        return turning_of(getattr(model, "freqs", None), slots // frames) if frames > 0 else None

    guidance = _Guidance(getattr(pipeline, _GUIDED, None))
    return hook(
        RollingDict(
            pipeline,
            [module],
            allocator="_initialize_self_kv_cache",
            attention=attention,
            branch=guidance.branch,
            sink=sink,
            ranks=lambda heads: shared_by(first.num_heads, heads) if hasattr(first, "num_heads") else 1,
            turning=turning,
            settings=() if guidance.generate is None else (Setting(pipeline, _GUIDED, guidance),),
        ),
        make_cache,
    )


class _Guidance:
    """The method that generates with guidance, which allocates a second list, for the negative prompt."""

    def __init__(self, generate: Callable[..., Any] | None) -> None:
        self.generate = generate
        self._branches: Iterator[str] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.generate is None:
            raise HostError(f"the host has no {_GUIDED}")
        self._branches = itertools.chain(["cond", "uncond"], itertools.repeat(""))
        try:
            return self.generate(*args, **kwargs)
        finally:
            self._branches = None

    def branch(self) -> str:
        """Name of the list that is being allocated."""
        return "" if self._branches is None else next(self._branches)
