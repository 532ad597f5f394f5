"""What every adapter must prove under a live host, and a look at all that a host is made of."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantwm_models import Attachment, adapters, attach
from quantwm_models.errors import UnknownHostError
from tests.models.chunks import bits

# Attributes in which the lineage's allocators leave what they made.
LISTS = {
    "_initialize_kv_cache": ("kv_cache1", "kv_cache_pos", "kv_cache_neg", "kv_cache_clean"),
    "_initialize_kv_cache_mouse_and_keyboard": ("kv_cache_mouse", "kv_cache_keyboard"),
}


@dataclass(frozen=True)
class Live:
    """A host that can be asked for a video.

    Attributes:
        pipeline: The object that an adapter attaches to.
        modules: The host's modules, whose globals must come back.
        video: Makes one, given a seed and a number of chunks.
        notes: Attributes that the host itself sets when it runs, and that have nothing to do with a cache.
    """

    pipeline: Any
    modules: tuple[ModuleType, ...]
    video: Callable[[int, int], Tensor]
    notes: tuple[str, ...] = ()


def sdpa(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """Dense attention on ``[B, tokens, heads, head_dim]``, in the place of a kernel that a CPU does not have."""
    queries, keys, values = (tensor.to(v.dtype).transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(queries, keys, values).transpose(1, 2).to(q.dtype)


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Random weights throughout: a host's zero-initialised head would let any test pass."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for weight in model.parameters():
        scale = 0.3 if weight.ndim < 2 else weight[0].numel() ** -0.5
        drawn = torch.randn(weight.shape, generator=generator, device=device)
        weight.data.copy_(drawn * scale + (weight.ndim < 2))


def smaller(pipeline: Any, allocator: str, tokens: int, heads: int, channels: int) -> None:
    """Let a host whose allocator has the released model's sizes written into it allocate for a small one."""
    allocate = getattr(pipeline, allocator)

    def allocate_less(batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        allocate(batch_size=batch_size, dtype=dtype, device=device)
        for entries in (entries for name in LISTS[allocator] for entries in getattr(pipeline, name, None) or []):
            for half in ("k", "v"):
                entries[half] = entries[half][:, :tokens, :heads, :channels].contiguous()

    setattr(pipeline, allocator, allocate_less)


def footprint(live: Live) -> dict[str, Any]:
    """Every attribute of the host's objects and modules, by identity; dicts and lists by what they hold."""
    parts: list[tuple[str, object]] = [("pipeline", live.pipeline)]
    parts += [(module.__name__, module) for module in live.modules]
    for name, value in list(vars(live.pipeline).items()):
        if isinstance(value, torch.nn.Module):
            parts += [(f"{name}.{path}", module) for path, module in value.named_modules()]
    if isinstance(live.pipeline, torch.nn.Module):
        parts += list(live.pipeline.named_modules())
    return {
        f"{part}.{name}": (id(value), tuple(map(id, _held(value))))
        for part, owner in parts
        for name, value in vars(owner).items()
        if name not in live.notes
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two looks at a host."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _held(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return value if isinstance(value, list) else ()


def formula_nbytes(attachment: Attachment) -> Iterator[tuple[int, int]]:
    """Of each sealed unit the bytes that its method states, and those that it stores."""
    scheme = attachment.scheme
    for cache in attachment.caches:
        for chunk in cache.chunks:
            assert cache._geometry
            batch, heads, channels, _, _ = cache._geometry
            shape = (batch, heads, chunk.stop - chunk.start, channels)
            first = "basis" not in chunk.keys.arrays
            stated = scheme.keys.nbytes("keys", shape, first) + scheme.values.nbytes("values", shape, first)
            yield stated, chunk.nbytes


def prove(make: Callable[[], Live], chunks: tuple[int, ...], adapter: Any = None) -> Attachment:
    """Hold an adapter against the acceptance, over one video after the other of so many chunks.

    Returns:
        What the last of them left, under ``quantwm``.
    """
    live = make()
    plain = [bits(live.video(seed, count)) for seed, count in enumerate(chunks)]
    assert len(set(plain)) == len(plain), "the host's output does not depend on its input"
    fresh = make()
    before = footprint(fresh)
    for host in (live, fresh):  # one that ran before, and one that did not
        untouched = footprint(host)
        with attach(host.pipeline, "bf16", adapter=adapter):
            assert [bits(host.video(seed, count)) for seed, count in enumerate(chunks)] == plain
        differences = changed(untouched, footprint(host))
        assert not differences, differences
    with attach(fresh.pipeline, "quantwm", adapter=adapter, iterations=2) as attachment:
        quantized = [fresh.video(seed, count) for seed, count in enumerate(chunks)]
    assert footprint(fresh) == before
    assert bits(fresh.video(0, chunks[0])) == plain[0]
    assert all(video.isfinite().all() for video in quantized)
    assert [bits(video) for video in quantized] != plain
    report, units = attachment.report(), list(formula_nbytes(attachment))
    assert units
    assert all(stated == stored for stated, stored in units)
    assert report.sealed_nbytes == sum(stored for _, stored in units)
    return attachment


def refuses_others() -> None:
    """An object of no known host gets the list of adapters."""
    with pytest.raises(UnknownHostError, match=f"known: .*{', .*'.join(adapters.names())}"):
        attach(object())
