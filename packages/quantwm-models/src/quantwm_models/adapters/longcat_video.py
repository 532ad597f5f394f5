"""``longcat_video``: LongCat-Video (``LongCatVideoPipeline``), or its transformer alone, also DiffSynth's and FastVideo's.

A segment's conditioning history is built in one pass and read at every denoising step. Keys are cached before RoPE and
rotated on each read, at positions that stay the same: the moment of the rotated queries is turned back to them, unit by
unit. Within the first segment a history is sealed in several units, so that the later ones know the queries of the earlier;
from then on the statistics of the segments before serve, and a history is one unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantwm_core.stream import Span
from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.errors import HostError
from quantwm_models.observer import Shown
from quantwm_models.offload import Offload
from quantwm_models.options import check_count
from quantwm_models.patching import attached_already, hooked, named, restored
from quantwm_models.rebuilt import Sealed, rebuild
from quantwm_models.rolling_dict import MakeCache
from quantwm_models.rotary import before_rotation, turned
from quantwm_models.workspace import Workspace


@dataclass(frozen=True)
class LongCatVideo:
    """The adapter, with its option.

    Attributes:
        first_units: Units of whole latent frames that the first segment's history is sealed in.

    >>> LongCatVideo(first_units=4).matches(object())
    False
    """

    first_units: int = 2

    def __post_init__(self) -> None:
        check_count("first_units", self.first_units)

    def matches(self, pipeline: object) -> bool:
        """Whether an object is the pipeline or its transformer, or derived from one."""
        return named(pipeline, "LongCatVideoPipeline", "LongCatVideoTransformer3DModel", "LongCatTransformer3DModel")

    def attach(self, pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
        """Seal each layer's history as soon as its block has made it, and learn from the queries that are rotated.

        Raises:
            HostError: The object lacks what the transformer has.
            StateError: It has a cache under it already.
        """
        try:
            blocks = list(getattr(pipeline, "dit", pipeline).blocks)
            rotations = [(block.attn if hasattr(block, "attn") else block.self_attn).rope_3d for block in blocks]
            frequencies = [rotation.freqs_dict for rotation in rotations]
        except AttributeError as error:
            raise HostError(
                f"{type(pipeline).__qualname__}: need .blocks of .attn or .self_attn with .rope_3d.freqs_dict: {error}"
            ) from error
        if any(hooked(rotation, _Layer) for rotation in rotations):
            raise attached_already(pipeline)
        workspace, offload, angles = Workspace(), Offload(), _Angles()
        with ExitStack() as stack:
            stack.enter_context(restored(pipeline, "kv_cache_dict"))
            for number, (block, rotation) in enumerate(zip(blocks, rotations, strict=True)):
                cache = make_cache(number, workspace=workspace, rebuilt=True)
                layer = _Layer(cache, frequencies[number], angles, self.first_units, offload)
                stack.callback(rotation.register_forward_hook(layer.rotated).remove)
                stack.enter_context(_followed(block, layer))
            return stack.pop_all().close


class _Layer:
    """One layer: what it was asked, and its cache."""

    def __init__(
        self, cache: LayerCache, frequencies: Mapping[Any, Tensor], angles: _Angles, first_units: int, offload: Offload
    ) -> None:
        self.cache = cache
        self.chosen, self.offload = cache.offload, cache.offload or offload
        self.frequencies = frequencies
        self.angles = angles
        self.assured: _Assured | None = None
        self.first_units = first_units
        self.reading = False
        self.batch = 1
        self.passed: tuple[Tensor, Tensor] | None = None
        cache.observers[:] = [Shown(each, self._shown) for each in cache.observers]

    @uncompiled
    def rotated(self, _: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Queries and keys ``[B, H, N, D]`` were rotated; on a read, those of the history lead, its queries void."""
        if self.reading:
            past = self.cache.tokens
            self.cache.observe(_pooled(output[0][:, :, past:], self.batch))
            self._tell(output[0][:, :, past:], output[1][:, :, :past])
        else:
            self.passed = output

    def build(self, keys: Tensor, values: Tensor, shape: Any) -> tuple[Sealed, Sealed]:
        """Seal a history of ``shape`` (frames, height, width), keys before rotation."""
        frames, self.batch = int(shape[0]), keys.shape[0]
        self.cache.rewind()
        self.cache.store_in(self.chosen)  # the host says for each history whether it is moved away
        if not self.cache.scheme.uses_queries or self.passed is None:
            return rebuild(self.cache, keys, values, None, [keys.shape[2]], self.offload)
        queries, rotated = self.passed
        angles = self._angles(tuple(shape), keys, rotated)
        self.cache.key_frame = lambda moment, span: before_rotation(moment, angles[slice(*span)])
        known = self.cache.queries.folded().past is not None
        tokens = [keys.shape[2] // frames * part for part in _shares(frames, 1 if known else self.first_units)]
        return rebuild(self.cache, keys, values, queries, tokens, self.offload)

    def _shown(self, span: Span, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys as attention sees them: as the host rotated them when it made the history."""
        return keys if self.passed is None else self.passed[1][:, :, slice(*span)], values

    def _tell(self, queries: Tensor, keys: Tensor) -> None:
        """Tell those who look on what each prompt asked of the history, whose ``keys`` were rotated."""
        if self.cache.observers:
            _, values = self.cache.read()
            for asked, past in zip(queries.split(self.batch), keys.split(self.batch), strict=True):
                self.cache.tell_attended(asked, past, values)

    def _angles(self, shape: tuple[int, ...], keys: Tensor, rotated: Tensor) -> Tensor:
        """Angles of rotation, ``[N, D / 2]``, and the assurance that they are what the host rotates by."""
        if shape not in self.frequencies:
            raise HostError(f"layer {self.cache.layer}: rope_3d.freqs_dict has no entry for the grid {shape}")
        table = self.frequencies[shape]
        if self.assured is not None and self.assured.is_of(table, keys.device):
            return self.assured.angles
        angles = self.angles.on(keys.device, table)
        ours, theirs = turned(keys[:, :, -1:], angles[-1:]), rotated[:, :, -1:].float()
        if ours.shape != theirs.shape or not torch.allclose(
            ours, theirs, rtol=0.02, atol=0.02 * float(ours.abs().max())
        ):
            raise HostError(
                f"layer {self.cache.layer}: the host rotates keys in another way than by neighbouring channels and "
                "rope_3d.freqs_dict"
            )
        self.assured = None if table.is_inference() else _Assured(table, table._version, angles)  # noqa: SLF001  # torch counts changes nowhere else
        return angles


class _Assured(NamedTuple):
    """Angles by which a layer was seen to rotate, and the host's table that says them, as it was then."""

    table: Tensor
    version: int
    angles: Tensor

    def is_of(self, table: Tensor, device: torch.device) -> bool:
        """Whether a table is still that one; to ask the GPU would be to wait for it in each layer."""
        return table is self.table and table._version == self.version and device == self.angles.device  # noqa: SLF001  # as above


class _Angles:
    """Angles of rotation on a device, once for all layers, each of which has a table of its own that says the same."""

    def __init__(self) -> None:
        self._made: weakref.ref[Tensor] | None = None

    def on(self, device: torch.device, table: Tensor) -> Tensor:
        """Those of a table ``[N, D]``, ``[N, D / 2]`` in FP32."""
        angles = table.to(device).float()[:, ::2].contiguous()
        made = None if self._made is None else self._made()
        if made is not None and made.device == device and torch.equal(made, angles):
            return made
        self._made = weakref.ref(angles)
        return angles


@contextmanager
def _followed(block: Any, layer: _Layer) -> Iterator[None]:
    """Know what a block is about to do, and take the history that it made."""

    @uncompiled
    def before(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        pairs = (each for each in (*args, *kwargs.values()) if isinstance(each, tuple) and each)
        layer.reading, layer.passed = any(isinstance(pair[0], Sealed) for pair in pairs), None

    @uncompiled
    def after(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        try:
            if not (isinstance(output, tuple) and isinstance(output[1], tuple)):
                return output
            keys, values = output[1]
            return output[0], layer.build(keys, values, kwargs["latent_shape"] if "latent_shape" in kwargs else args[4])
        finally:
            layer.reading, layer.passed = False, None

    with ExitStack() as stack:
        stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _pooled(queries: Tensor, batch: int) -> Tensor:
    """Queries of prompts that share a history of ``batch`` videos, side by side along the tokens."""
    if queries.shape[0] == batch:
        return queries
    return queries.unflatten(0, (-1, batch)).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _shares(frames: int, units: int) -> list[int]:
    """Frames of each unit, as equal as can be."""
    count = min(units, frames)
    return [frames // count + (unit < frames % count) for unit in range(count)]


matches = LongCatVideo().matches
attach = LongCatVideo().attach
