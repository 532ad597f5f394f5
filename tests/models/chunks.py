"""Chunks of keys, values and queries for the cache tests, and a look at all that a cache holds."""

from typing import Any

import torch
from torch import Tensor

from quantwm_kernels.chunk import SealedChunk
from quantwm_models import LayerCache


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Standard normal numbers of their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chunk(seed: int, tokens: int = 16, *, batch: int = 1, heads: int = 2, channels: int = 16) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, N, D]``."""
    keys, values = normal(2, batch, heads, tokens, channels, seed=seed)
    return keys, values


def fill(cache: LayerCache, count: int, tokens: int = 16, *, first: int = 0, queries: bool = True) -> None:
    """Append chunks that depend on nothing but their number, with queries each."""
    for number in range(first, first + count):
        cache.append(*chunk(number, tokens))
        if queries:
            cache.observe(normal(1, 4, 8, 16, seed=1000 + number))


def bits(tensor: Tensor) -> bytes:
    """A tensor's bytes in its order."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def compensated(chunk: SealedChunk) -> bool:
    """Whether PSAC corrects its keys; without a basis there is nothing to correct by."""
    coefficients = chunk.keys.arrays.get("coefficients")
    return "basis" in chunk.keys.arrays and coefficients is not None and bool(coefficients.any())


def snapshot(cache: LayerCache) -> dict[str, Any]:
    """Everything that a cache holds, by value; nothing in it is shared with the cache."""
    contents = cache._contents
    sealed = {
        (span, kind, name): bits(tensor)
        for span, unit in contents.units.items()
        for kind in ("keys", "values")
        for name, tensor in getattr(unit.chunk, kind).arrays.items()
    }
    queries = contents.queries
    moments = [queries.past, *(group.moment for group in queries.groups)]
    return {
        "stream": contents.stream,
        "units": {span: unit.serial for span, unit in contents.units.items()},
        "sealed": sealed,
        "exact": [(piece.serial, piece.span, bits(piece.keys), bits(piece.values)) for piece in contents.exact],
        "moments": [None if moment is None else (moment.queries, bits(moment.mean)) for moment in moments],
        "starts": [group.start for group in queries.groups],
        "counters": (contents.chunks_sealed, contents.chunks_evicted),
        "geometry": cache._geometry,
        "version": cache.version,
    }
