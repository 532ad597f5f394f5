"""``hy_world``: HY-World 1.5 (HY-WorldPlay), the 5B model on Wan (``WanPipeline``) and the 8B one on HunyuanVideo 1.5.

Both make their whole cache anew before each chunk, and read it at every denoising step. Their attention runs twice, with
keys after RoPE and after ProPE, by the camera: a token's two keys, and its two values, lie side by side in one stream of
twice the channels, and a query of one kind is zero in the channels of the other, so that each kind weighs its own. The text
cache of the 8B model stays the host's. As an option one stream is stored, of which both kinds are derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantwm_kernels.launch import one_of
from quantwm_kernels.statistics import QueryMoment, second_moment
from quantwm_models.attention_hook import Attention, Replacement, function_replaced
from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.errors import HostError
from quantwm_models.geometry import shared_by
from quantwm_models.options import check_flag
from quantwm_models.patching import attached_already, hooked, module_of, named, restored
from quantwm_models.rebuilt import Sealed
from quantwm_models.rebuilt_layer import RebuiltLayer, Seen
from quantwm_models.rolling_dict import MakeCache
from quantwm_models.workspace import Workspace

_CACHES = ("_kv_cache", "_kv_cache_neg")
_PROJECT, _ROTATE = "prope_qkv", "apply_rotary_emb"
_VISION = "sequence_parallel_attention_vision"


@dataclass(frozen=True)
class HyWorld:
    """The adapter, with its option.

    Attributes:
        once: Store keys and values as they are before RoPE and ProPE, and derive both kinds on each read, which halves the
            cache. A history of which they cannot be derived bit for bit is stored in both kinds, and so is one of a rank that
            shares its tokens with others.

    >>> HyWorld(once=True).matches(object())
    False
    """

    once: bool = False

    def __post_init__(self) -> None:
        check_flag("once", self.once)

    def matches(self, pipeline: object) -> bool:
        """Whether an object is one of the two pipelines, or derived from one."""
        return named(pipeline, "WanPipeline", "HunyuanVideo_1_5_Pipeline") and hasattr(pipeline, "init_kv_cache")

    def attach(self, pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
        """Seal each layer's cache as soon as its block has made it, and learn from the queries that pass attention.

        Raises:
            HostError: The object lacks what the pipelines have.
            StateError: It has a cache under it already.
        """
        transformer = getattr(pipeline, "transformer", None)
        wan = hasattr(transformer, "blocks")
        blocks = list(getattr(transformer, "blocks" if wan else "double_blocks", ()))
        try:
            module = module_of(blocks[0].attn1.processor if wan else blocks[0])
        except (AttributeError, IndexError) as error:
            lacking = (
                "there is no .transformer" if transformer is None else f"its {type(transformer).__qualname__} has none"
            )
            raise HostError(
                f"{type(pipeline).__qualname__}: need .transformer with .blocks of .attn1.processor or with "
                f".double_blocks: {error if blocks else lacking}"
            ) from error
        name = "sageattn" if wan else _VISION
        transforms = (_PROJECT,) if wan else (_PROJECT, _ROTATE)
        for each in (name, *(transforms if self.once else ())):
            if not callable(getattr(module, each, None)):
                raise HostError(f"module {module.__name__}: need a function {each!r}, which is not there")
        if hooked(blocks[0], RebuiltLayer):
            raise attached_already(pipeline)
        workspace = Workspace()
        with ExitStack() as stack:
            for each in _CACHES:
                stack.enter_context(restored(pipeline, each))
            function: Replacement = stack.enter_context(function_replaced(module, name, Attention if wan else _Vision))
            seen = [
                stack.enter_context(function_replaced(module, each, Seen)) for each in (transforms if self.once else ())
            ]
            for number, block in enumerate(blocks):

                def make(branch: str, number: int = number) -> LayerCache:
                    return make_cache(number, branch=branch, workspace=workspace, rebuilt=True)

                layer = _WanLayer(make, function, seen) if wan else RebuiltLayer(make, function, seen)
                stack.enter_context(layer.around(block))
            return stack.pop_all().close


class _WanLayer(RebuiltLayer):
    """One layer of the 5B model; its block takes and returns the cache, past the compiler."""

    def __init__(
        self, make: Callable[[str], LayerCache], function: Replacement, seen: Sequence[Replacement] = ()
    ) -> None:
        super().__init__(make, function, seen)
        self.only = self.shown(make(""))
        self.past: tuple[Tensor, Tensor] | None = None
        self.building = False
        self.watched = False
        self.asked: Tensor | None = None
        self.heads: int | None = None

    @uncompiled
    def enter(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the block tensors; one that makes a cache has no use for the one before."""
        if len(args) < 6:
            raise HostError(
                f"{type(block).__qualname__}: need the cache and whether to make one as fifth and sixth argument"
            )
        entry, self.building, self.rotation = args[4], args[5], args[3]
        self.watched, self.asked, self.past = False, None, None
        self.heads = getattr(block.attn1, "heads", None)
        for each in self.seen:
            each.watching.enter(self, None)
        self.function.watching.enter(self, self.watch)
        if not isinstance(entry, Mapping) or not isinstance(entry.get("k"), Sealed):
            if entry is not None and not self.building and entry.get("k") is None and self.only.tokens:
                self.only.clear()  # the first chunk of another video
            return None
        if not self.building:
            self.past = self.read(entry["k"], entry["v"])
        given = dict(zip("kv", self.past or (None, None), strict=True))
        return (*args[:4], given, *args[5:]), kwargs

    @uncompiled
    def leave(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Take the cache that the block made, and let go of what it read."""
        try:
            return self._take(output)
        finally:
            self.past = self.rotation = None
            super().leave(block, args, kwargs, output)

    def _take(self, output: Any) -> Any:
        asked, self.asked = self.asked, None
        if output is None:
            return None
        hidden, made = output
        if made:
            made = dict(zip("kv", self.build(self.only, made["k"], made["v"]), strict=True))
        if asked is not None:
            _ask(self.only, *asked.chunk(2))
        return hidden, made

    def watch(self, queries: Tensor) -> None:
        """Queries ``[2 B, H, N, D]`` of the block's first attention; the second is on the prompt."""
        if self.watched:
            return
        self.watched = True
        self.only.ranks = shared_by(self.heads or queries.shape[1], queries.shape[1])
        if self.building:
            self.asked = queries  # they count once the cache that they helped to make is sealed
        else:
            _ask(self.only, *queries.chunk(2))
            if self.past is not None:
                _tell(self.only, self.past, *queries.chunk(2))

    def rotation_of(self, calls: Sequence[Any], tokens: int) -> Callable[[Tensor], Tensor] | None:
        """How the host rotated the keys, which it does in a function within another."""
        if self.rotation[0].shape[2] != tokens:  # those of this rank, which the keys of all ranks have joined since
            return None
        cosines, sines = self.rotation[0][..., ::2], self.rotation[1][..., 1::2]

        def rotate(keys: Tensor) -> Tensor:
            rotated, (even, odd) = torch.empty_like(keys), keys.unflatten(-1, (-1, 2)).unbind(-1)
            rotated[..., ::2] = even * cosines - odd * sines
            rotated[..., 1::2] = even * sines + odd * cosines
            return rotated

        return rotate


class _Vision(Replacement):
    """Attention of the 8B model to what is seen: it takes the cache, and returns it where it is made."""

    @uncompiled
    def __call__(
        self, q: Any, k: Any, v: Any, block_idx: int = 0, kv_cache: Any = None, cache_vision: bool = False
    ) -> Any:
        """Attend; queries, keys and values are pairs ``[B, N, H, D]`` after RoPE and after ProPE."""
        layer: RebuiltLayer | None = self.watching.innermost
        if layer is None:
            return self.original(q, k, v, block_idx=block_idx, kv_cache=kv_cache, cache_vision=cache_vision)
        entry = dict(kv_cache[block_idx])
        cache = layer.cache(entry["k_txt"])
        past = None
        if isinstance(entry["k_vision"], Sealed):
            past = None if cache_vision else layer.read(entry["k_vision"], entry["v_vision"])
            entry["k_vision"], entry["v_vision"] = (None, None) if past is None else map(_stacked, past)
        hidden, projected, made = self.original(
            q, k, v, block_idx=block_idx, kv_cache={block_idx: entry}, cache_vision=cache_vision
        )
        if made:
            keys, values = (_side_by_side(made[half]) for half in ("k_vision", "v_vision"))
            made = dict(zip(made, layer.build(cache, keys, values), strict=True))
        asked = [each.transpose(1, 2) for each in q]
        _ask(cache, *asked)
        if past is not None:
            _tell(cache, past, *asked)
        return hidden, projected, made


def _ask(cache: LayerCache, roped: Tensor, projected: Tensor) -> None:
    """Tell a cache of queries ``[B, H, N, D]`` of the two kinds."""
    if cache.tokens and cache.chunks and cache.chunks[0].keys.shape[1] != roped.shape[1]:
        raise HostError(
            f"layer {cache.layer}: {roped.shape[1]} heads ask {cache.chunks[0].keys.shape[1]}; sequence parallelism of "
            "this host is not served"
        )
    if cache.scheme.uses_queries:
        with one_of(cache.ranks):
            moment = _moment(roped, projected)
        cache.observe_moment(moment)


def _moment(roped: Tensor, projected: Tensor) -> QueryMoment:
    """Second moment of queries of both kinds, each zero in the channels of the other: two blocks on the diagonal."""
    heads, channels = roped.shape[1], roped.shape[3]
    halves = [second_moment(each, heads) for each in (roped, projected)]
    mean = halves[0].mean.new_zeros(*halves[0].mean.shape[:2], 2 * channels, 2 * channels)
    for number, half in enumerate(halves):
        block = slice(number * channels, (number + 1) * channels)
        mean[:, :, block, block] = 0.5 * half.mean
    return QueryMoment(mean, sum(half.queries for half in halves))


def _tell(cache: LayerCache, past: tuple[Tensor, Tensor], roped: Tensor, projected: Tensor) -> None:
    """Tell those who look on what queries of the two kinds asked of a cache, ``past`` ``[B, H, N, 2 D]``.

    The stream has twice the channels, so queries are scaled for logits over the root of those to be the host's.
    """
    if cache.observers:
        for kind in _kinds(roped, projected):
            cache.tell_attended(kind * 2**0.5, *past)


def _kinds(roped: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of either kind, zero in the channels of the other."""
    empty = torch.zeros_like(roped)
    return torch.cat([roped, empty], dim=-1), torch.cat([empty, projected], dim=-1)


def _side_by_side(stacked: Tensor) -> Tensor:
    """``[2 B, H, N, D]`` as ``[B, H, N, 2 D]``."""
    return torch.cat(stacked.chunk(2), dim=-1)


def _stacked(stream: Tensor) -> Tensor:
    """``[B, H, N, 2 D]`` as ``[2 B, H, N, D]``; of a batch of one without a copy."""
    return stream.unflatten(-1, (2, -1)).movedim(-2, 0).flatten(0, 1)


matches = HyWorld().matches
attach = HyWorld().attach
