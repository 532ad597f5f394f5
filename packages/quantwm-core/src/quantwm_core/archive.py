"""Dumped caches <-> sealed chunks: a whole recording of keys, values and queries, compressed as a stream would be.

A dump is a safetensors file of ``keys``, ``values`` and optionally ``queries``, ``[B, H, N, D]`` in BF16, FP16 or FP32,
plain or prefixed ``layer.L.``. Query token ``t`` belongs to the chunk of key token ``t``. Chunks are sealed in order with
the statistics of earlier chunks only, exactly as while a video is generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from quantwm_core import domain, method, methods, rotary
from quantwm_core.arguments import explain_errors
from quantwm_core.chunk import SealedChunk
from quantwm_core.errors import FormatError, ParameterError, ShapeError
from quantwm_core.method import Scheme
from quantwm_core.rotary import Turning
from quantwm_core.statistics import QueryMoment, QueryStatistics, second_moment
from quantwm_core.stream import Stream

_NAME = re.compile(r"(?:layer\.(\d+)\.)?(keys|values|queries)")


@dataclass(frozen=True)
class Dump:
    """One layer's recording; ``queries`` may have more heads than ``keys``."""

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray | None = None


def collect(arrays: Mapping[str, np.ndarray]) -> dict[int, Dump]:
    """Sort a dump's arrays by layer; names without a layer belong to layer 0.

    Raises:
        FormatError: A name is foreign, or a layer lacks keys or values.

    >>> one = np.ones((1, 1, 4, 8), np.float32)
    >>> sorted(collect({"layer.3.keys": one, "layer.3.values": one}))
    [3]
    """
    layers: dict[int, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise FormatError(f"array {name!r}: need 'keys', 'values' or 'queries', plain or as 'layer.N.keys'")
        layer = layers.setdefault(int(match[1] or 0), {})
        if match[2] in layer:
            raise FormatError(f"array {name!r}: layer {int(match[1] or 0)} has {match[2]} twice, plain and prefixed")
        layer[match[2]] = array
    for number, parts in layers.items():
        if missing := {"keys", "values"} - parts.keys():
            raise FormatError(f"layer {number} lacks {' and '.join(sorted(missing))}")
    if not layers:
        raise FormatError("the file holds no arrays")
    return {number: Dump(**parts) for number, parts in sorted(layers.items())}


def compress(
    dump: Dump, scheme: Scheme, chunk_tokens: int, layer: int = 0, turning: Turning | None = None
) -> list[SealedChunk]:
    """Seal a recording chunk by chunk.

    Args:
        dump: Keys, values and queries of one layer.
        scheme: How they are stored.
        chunk_tokens: Tokens that the model generates at once; a shorter last chunk is fine.
        layer: Number, for messages.
        turning: How positions turn queries, for schemes that look ahead (``frames_ahead``).

    Returns:
        Sealed units in order; what no unit takes in (an incomplete unit, KIVI's newest tokens) follows as BF16.

    Raises:
        ShapeError, DtypeError, DomainError: The recording cannot be sealed.
        ParameterError: ``chunk_tokens`` is below 1, or the scheme looks ahead without a turning.

    >>> rng = np.random.default_rng(0)
    >>> keys = rng.normal(size=(1, 2, 96, 32)).astype(np.float32)
    >>> [chunk.keys.method for chunk in compress(Dump(keys, keys), method.scheme("kivi", residual_length=32), 32)]
    ['kivi', 'kivi', 'bf16']
    """
    if chunk_tokens < 1:
        raise ParameterError(f"chunk of {chunk_tokens} tokens: need at least 1")
    scheme.check_turning(turning)
    ahead = turning if scheme.frames_ahead else None
    _check(dump, chunk_tokens, layer)
    statistics = QueryStatistics()
    pasts: list[tuple[int, QueryMoment | None]] = []  # what was known when each group of chunks began
    chunks: list[SealedChunk] = []
    stream = Stream(scheme.chunks_per_seal, scheme.recent_tokens)
    tokens = dump.keys.shape[2]
    for number, begin in enumerate(range(0, tokens, chunk_tokens)):
        if number % scheme.chunks_per_seal == 0:
            statistics = statistics.sealed(scheme.decay)
            pasts.append((begin, statistics.past))
        end = min(begin + chunk_tokens, tokens)
        stream = stream.append(end - begin).complete()
        if dump.queries is not None:
            asked = dump.queries[:, :, begin:end]
            statistics = statistics.observe(_moment(asked, dump.keys.shape[1], begin, ahead))
        for unit in stream.due():
            label = f"layer {layer}, tokens {unit.start} to {unit.stop}"
            keys, values = dump.keys[:, :, slice(*unit)], dump.values[:, :, slice(*unit)]
            past = next(known for start, known in reversed(pasts) if start <= unit.start)
            if ahead is not None and past is not None:
                past = rotary.coming_moment(past, unit.stop, scheme.frames_ahead, ahead)
            chunks.append(scheme.seal(keys, values, past, chunks[-1] if chunks else None, unit.start, label))
        stream = stream.sealed()
    if stream.sealed_end < tokens:
        plain = replace(scheme, keys=methods.get("bf16"), values=methods.get("bf16"))
        rest = np.s_[:, :, stream.sealed_end :]
        chunks.append(plain.seal(dump.keys[rest], dump.values[rest], start=stream.sealed_end, label=f"layer {layer}"))
    return chunks


def restore(chunks: list[SealedChunk]) -> Dump:
    """Keys and values of a layer's chunks, BF16 ``[B, H, N, D]``.

    Raises:
        FormatError: There is no chunk, the chunks do not follow one another, or one of them is damaged.
    """
    if not chunks:
        raise FormatError("no chunks to restore")
    end = 0
    for chunk in chunks:
        if chunk.start != end:
            raise FormatError(f"a chunk starts at token {chunk.start}, the one before ended at {end}")
        end = chunk.stop
        if chunk.keys.shape[:2] != chunks[0].keys.shape[:2]:
            raise FormatError(f"chunks of {chunk.keys.shape[:2]} and {chunks[0].keys.shape[:2]} streams")
    keys, values = zip(*(method.decode(chunk) for chunk in chunks), strict=True)
    return Dump(np.concatenate(keys, axis=2), np.concatenate(values, axis=2))


def rows(layers: Mapping[int, list[SealedChunk]]) -> Iterator[dict[str, int | str | float]]:
    """What a file holds, a row per chunk: layer, tokens, methods, bytes and ratio to BF16.

    ``shared_bytes``, which are among ``bytes``, are of arrays that stand in this chunk and may serve later ones.
    """
    for layer, chunks in layers.items():
        known: set[int] = set()
        for chunk in chunks:
            arrays = {id(array): array.nbytes for part in (chunk.keys, chunk.values) for array in part.shared.values()}
            shared = sum(nbytes for array, nbytes in arrays.items() if array not in known)
            known |= arrays.keys()
            nbytes = chunk.nbytes - chunk.shared_nbytes + shared
            yield {
                "layer": layer,
                "start": chunk.start,
                "stop": chunk.stop,
                "keys": chunk.keys.method,
                "values": chunk.values.method,
                "bytes": nbytes,
                "shared_bytes": shared,
                "bf16_bytes": chunk.bf16_nbytes,
                "ratio": round(chunk.bf16_nbytes / nbytes, 3),
            }


def _moment(queries: np.ndarray, kv_heads: int, start: int, turning: Turning | None) -> QueryMoment:
    """Of queries from token ``start``: as they were asked, or as in frame 0."""
    if turning is None:
        return second_moment(queries, kv_heads)
    return rotary.still_moment(queries, kv_heads, start, turning)


def _check(dump: Dump, chunk_tokens: int, layer: int) -> None:
    """Refuse what could not be sealed before any work is done."""
    given = {"keys": dump.keys, "values": dump.values} | ({} if dump.queries is None else {"queries": dump.queries})
    for name, array in given.items():
        domain.check_kind(array, f"layer {layer}, {name}", rank=4)
    if dump.keys.shape[:3] != dump.values.shape[:3]:
        raise ShapeError(f"layer {layer}: keys {dump.keys.shape} and values {dump.values.shape} hold different tokens")
    if dump.queries is not None:
        queries = dump.queries.shape
        if queries[::3] != dump.keys.shape[::3] or queries[2] != dump.keys.shape[2] or queries[1] % dump.keys.shape[1]:
            raise ShapeError(f"layer {layer}: queries {queries} do not fit keys {dump.keys.shape}")
    for number, begin in enumerate(range(0, dump.keys.shape[2], chunk_tokens)):
        for name, array in given.items():
            domain.check_domain(array[:, :, begin : begin + chunk_tokens], f"layer {layer}, chunk {number}, {name}")


explain_errors(globals())
