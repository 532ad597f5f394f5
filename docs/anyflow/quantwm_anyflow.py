"""An adapter for diffusers' AnyFlow FAR: ``AnyFlowFARPipeline``, or its transformer alone.

After each chunk the host makes its whole cache anew in one pass: the latest frames as they are, older ones from larger
patches. Both are written before RoPE, into two tensors of a layer's dict, and read at every denoising step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.errors import HostError
from quantwm_models.patching import attached_already, hooked, named
from quantwm_models.rebuilt import rebuild
from quantwm_models.rolling_dict import MakeCache
from quantwm_models.rotary import before_rotation, turned
from quantwm_models.workspace import Workspace

# The two tensors of a layer, [2, B, H, tokens, D] with keys first, in the order in which a read joins them.
PARTS = ("compressed_cache", "full_cache")


def matches(pipeline: object) -> bool:
    """Whether an object is the pipeline or its transformer, or derived from one."""
    return named(pipeline, "AnyFlowFARPipeline", "AnyFlowFARTransformer3DModel")


def attach(pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
    """Take what each layer writes, and learn from its queries.

    Raises:
        HostError: The object lacks what the transformer has.
        StateError: It has a cache under it already.
    """
    try:
        blocks = list(getattr(pipeline, "transformer", pipeline).blocks)
        norms = [(block.attn1.norm_q, block.attn1.heads) for block in blocks]
    except AttributeError as error:
        raise HostError(f"{type(pipeline).__qualname__}: need .blocks of .attn1 with .norm_q and .heads") from error
    if hooked(blocks[0], Layer):
        raise attached_already(pipeline)
    workspace = Workspace()
    with ExitStack() as stack:
        for number, (block, (norm, heads)) in enumerate(zip(blocks, norms, strict=True)):
            layer = Layer(make_cache(number, workspace=workspace, rebuilt=True), heads)
            for handle in (
                block.register_forward_pre_hook(layer.enter),
                norm.register_forward_hook(layer.asked),
                block.register_forward_hook(layer.leave),
            ):
                stack.callback(handle.remove)
        return stack.pop_all().close


class Layer:
    """One layer: what it writes and asks while it runs, and its cache."""

    def __init__(self, cache: LayerCache, heads: int) -> None:
        self.cache = cache
        self.heads = heads
        self.written: dict[tuple[str, int], Tensor] = {}
        self.split = 0  # tokens of the first part
        self.queries: Tensor | None = None

    @uncompiled
    def enter(self, block: Any, args: tuple[Any, ...]) -> None:
        """The block begins; its sixth argument is the cache, which a new video brings as tensors."""
        if len(args) < 7:
            raise HostError(f"{type(block).__qualname__}: need the cache and its flags as sixth and seventh argument")
        entry, self.queries = args[5], None
        self.written.clear()
        if entry is not None and isinstance(entry[PARTS[0]], Tensor):
            self.cache.clear()
            entry.update({name: Part(self, name, entry[name]) for name in PARTS})

    @uncompiled
    def asked(self, norm: Any, args: Any, output: Tensor) -> None:
        """Queries ``[B, N, H D]`` before RoPE."""
        self.queries = output.unflatten(2, (self.heads, -1)).transpose(1, 2)

    @uncompiled
    def leave(self, block: Any, args: tuple[Any, ...], output: Any) -> None:
        """The block is done: seal what it wrote, or let the cache know what it asked."""
        if args[5] is None or self.queries is None:
            return
        queries = turned(self.queries, angles(args[3]["query"]))
        if self.written:
            self.build(queries, angles(args[3]["key"]))
        elif self.cache.tokens:
            self.cache.observe(queries)
        else:
            self.cache.foresee(queries)  # of the first chunk, before there is anything to attend to

    def build(self, queries: Tensor, positions: Tensor) -> None:
        """Seal a cache that was made anew, older frames and latest frames as a unit each."""
        keys, values = (torch.cat([self.written[name, half] for name in PARTS], dim=2) for half in range(2))
        tokens = [self.written[name, 0].shape[2] for name in PARTS]
        self.written.clear()
        self.cache.key_frame = lambda moment, span: before_rotation(moment, positions[slice(*span)])
        rebuild(self.cache, keys, values, queries, [count for count in tokens if count])
        self.split = tokens[0]


class Part:
    """What the host sees in place of one of the two tensors."""

    def __init__(self, layer: Layer, name: str, tensor: Tensor) -> None:
        self.layer = layer
        self.name = name
        self.empty = tensor[0, :, :, :0].clone()  # the rest of the tensor's memory goes

    def __setitem__(self, key: tuple[Any, ...], tensor: Tensor) -> None:
        """``part[half, :, :, :n, :] = tensor``: keys or values of all frames of this kind."""
        self.layer.written[self.name, key[0]] = tensor

    def __getitem__(self, key: tuple[Any, ...]) -> Tensor:
        """``part[half, :, :, :n, :]``: the same, read back."""
        cache, count = self.layer.cache, key[3].stop
        if not count:
            return self.empty
        first = 0 if self.name == PARTS[0] else self.layer.split
        both: Tensor = cache.read()[key[0]]  # of one range, so that four reads of a step reconstruct it once
        return both[:, :, first : first + count].to(self.empty.dtype)


def angles(rotations: Tensor) -> Tensor:
    """Angles ``[N, D / 2]`` of the host's complex rotations ``[1, 1, N, D / 2]``."""
    return rotations[0, 0].angle().float()
