"""A sealed unit: named arrays of a layer's keys and values, their exact byte count, and the file that holds them.

A file is one safetensors file, so any safetensors library reads it. Arrays are called
``layer.L.chunk.I.keys.NAME`` and ``layer.L.chunk.I.values.NAME``; the metadata hold ``format = quantwm/1`` and, under
``chunks``, the method, parameters, shape and token range of every chunk as JSON.

An array whose name begins with :data:`SHARED` may be one and the same in several units, such as the basis of a transform
code. Memory and files hold it once: a method takes it from the unit before, a file names the unit that holds it.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex, cast

import numpy as np

from quantwm_core.arguments import explain_errors
from quantwm_core.errors import FormatError, ParameterError, RangeError, ShapeError
from quantwm_core.stream import is_whole
from quantwm_core.tensor_file import make_header, read_header, replaced

FORMAT_VERSION = 1
Kind = Literal["keys", "values"]
KINDS: tuple[Kind, Kind] = ("keys", "values")
Parameter = int | float | str | bool | None
SHARED = "shared_"
"""How the names of arrays begin that several units may have in common."""


@dataclass(frozen=True)
class SealedTensor:
    """Keys or values of one sealed unit.

    Attributes:
        method: Public name of the method that wrote it and can read it.
        parameters: The method's settings, enough to decode.
        shape: ``(B, H, N, D)`` of the BF16 tensor it stands for.
        arrays: Storage, each array by name; an absent part is missing.
    """

    method: str
    parameters: Mapping[str, Parameter]
    shape: tuple[int, int, int, int]
    arrays: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of storage: the sum over all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def shared(self) -> dict[str, np.ndarray]:
        """Arrays that other units may have, too."""
        return {name: array for name, array in self.arrays.items() if name.startswith(SHARED)}

    @property
    def shared_nbytes(self) -> int:
        """Bytes of :attr:`shared`, which are among :attr:`nbytes`."""
        return sum(array.nbytes for array in self.shared.values())

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of the BF16 tensor it stands for."""
        return 2 * int(np.prod(self.shape))

    def token_range(self, start: int, stop: int | None, *by_token: str) -> tuple[int, int]:
        """Check a token range inside the unit and return it with its end filled in.

        Args:
            start: First token.
            stop: Position after the last one; None for the unit's end.
            by_token: Names of arrays ``[B, H, N, ...]``, which must hold as many streams and tokens as the unit claims.

        Raises:
            RangeError: The range does not lie inside the unit, or is not of whole numbers.
            ShapeError: An array holds other streams or tokens.
        """
        for name in by_token:
            if self.arrays[name].shape[:3] != self.shape[:3]:
                raise ShapeError(f"{name} {self.arrays[name].shape} of a unit of {self.shape}")
        tokens = self.shape[2]
        end = tokens if stop is None else stop
        if not is_whole(start) or not is_whole(end) or not 0 <= start <= end <= tokens:
            raise RangeError(
                f"tokens {start!r} to {end!r} of a sealed unit of {tokens}: need 0 <= start <= stop <= {tokens} in whole numbers"
            )
        return start, end


@dataclass(frozen=True)
class SealedChunk:
    """Keys and values of one layer's sealed unit.

    Attributes:
        keys, values: The two tensors; methods may differ.
        start: Absolute position of the first token, counted from the beginning of the stream.
        version: Format version.
    """

    keys: SealedTensor
    values: SealedTensor
    start: int = 0
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.keys.shape[:3] != self.values.shape[:3]:
            raise ShapeError(f"keys {self.keys.shape} and values {self.values.shape} hold different tokens")

    @property
    def tokens(self) -> int:
        """Tokens of the unit."""
        return self.keys.shape[2]

    @property
    def stop(self) -> int:
        """Absolute position after the last token."""
        return self.start + self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the arrays that other units may have, too; they are among :attr:`nbytes`."""
        return self.keys.shared_nbytes + self.values.shared_nbytes

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of the BF16 keys and values it stands for."""
        return self.keys.bf16_nbytes + self.values.bf16_nbytes


def stored_nbytes(chunks: Iterable[SealedChunk]) -> tuple[int, int]:
    """Bytes of units together: what is each one's own, and what they share, every array once.

    >>> tensor = SealedTensor("klt", {}, (1, 1, 2, 8), {"codes": np.zeros(4, np.uint8), "shared_basis": np.zeros(64)})
    >>> stored_nbytes([SealedChunk(tensor, tensor, 0), SealedChunk(tensor, tensor, 2)])
    (16, 512)
    """
    several = list(chunks)
    shared = {id(array): array.nbytes for each in several for kind in KINDS for array in _shared(each, kind).values()}
    return sum(each.nbytes - each.shared_nbytes for each in several), sum(shared.values())


def _shared(chunk: SealedChunk, kind: Kind) -> dict[str, np.ndarray]:
    tensor: SealedTensor = getattr(chunk, kind)
    return tensor.shared


def save(
    path: str | os.PathLike[str],
    layers: Mapping[int, Sequence[SealedChunk]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write sealed chunks to one safetensors file; a file that was there is replaced only once the new one is whole.

    The same chunks give the same bytes.

    Args:
        path: Where to.
        layers: Chunks of every layer, in order.
        metadata: Further text entries; ``format`` and ``chunks`` are reserved.

    Raises:
        FormatError: ``metadata`` uses a reserved key or holds what is no text, or ``path`` is a folder, a device, a pipe or a
            socket.
        ParameterError: A layer, a start, a version or a size is no whole number.
    """
    extra = dict(metadata or {})
    if odd := [item for item in extra.items() if not all(isinstance(part, str) for part in item)]:
        raise FormatError(f"metadata {odd[0][0]!r}: {odd[0][1]!r}: need text for text")
    if extra.keys() & {"format", "chunks"}:
        raise FormatError("metadata keys 'format' and 'chunks' are reserved; choose others")
    header: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for layer, chunks in layers.items():
        held: dict[tuple[Kind, str, int], int] = {}  # which chunk of the layer holds a shared array
        for number, chunk in enumerate(chunks):
            numbers = {"layer": layer, "chunk": number, "start": chunk.start, "version": chunk.version}
            entry: dict[str, Any] = {name: _whole(name, given) for name, given in numbers.items()}
            for kind in KINDS:
                tensor: SealedTensor = getattr(chunk, kind)
                shape = [_whole(f"size of {kind}", size) for size in tensor.shape]
                entry[kind] = {"method": tensor.method, "parameters": dict(tensor.parameters), "shape": shape}
                holders = {
                    name: held.setdefault((kind, name, id(array)), number) for name, array in tensor.shared.items()
                }
                elsewhere = {name: holder for name, holder in holders.items() if holder != number}
                if elsewhere:
                    entry[kind]["shared"] = elsewhere
                prefix = f"layer.{entry['layer']}.chunk.{number}.{kind}."
                arrays |= {prefix + name: array for name, array in tensor.arrays.items() if name not in elsewhere}
            header.append(entry)
    write_arrays(path, arrays, extra | {"format": f"quantwm/{FORMAT_VERSION}", "chunks": json.dumps(header)})


def _whole(name: str, number: object) -> int:
    """A whole number of any type, NumPy's included, as JSON writes it."""
    try:
        return operator.index(cast("SupportsIndex", number))
    except TypeError as error:
        raise ParameterError(f"{name} {number!r}: need a whole number") from error


def load(path: str | os.PathLike[str]) -> tuple[dict[int, list[SealedChunk]], dict[str, str]]:
    """Read what :func:`save` wrote.

    Returns:
        Chunks by layer, and the further metadata.

    Raises:
        FormatError: The file is truncated, no quantwm file, or of a newer format version.
        OSError: The file cannot be read.
    """
    arrays, metadata = read_arrays(path)
    stated = metadata.pop("format", "")
    name, _, version = stated.partition("/")
    if name != "quantwm" or not version.isdecimal():
        raise FormatError(f"{path}: not a quantwm file (format {stated!r}); 'compress' makes one from BF16 tensors")
    if int(version) > FORMAT_VERSION:
        raise FormatError(
            f"{path}: format version {version}, this release reads up to {FORMAT_VERSION}; upgrade quantwm"
        )
    try:
        table = json.loads(metadata.pop("chunks"))
    except KeyError as error:
        raise FormatError(f"{path}: the chunk table is missing") from error
    except (RecursionError, ValueError) as error:
        raise FormatError(f"{path}: the chunk table is damaged: it is no JSON ({error})") from error
    if not isinstance(table, list):
        raise FormatError(f"{path}: the chunk table is damaged: it is {type(table).__name__} in JSON, no list")
    layers: dict[int, list[SealedChunk]] = {}
    for number, entry in enumerate(table):
        damaged = f"{path}: the chunk table is damaged: its entry {number}"
        try:
            _take(entry, arrays, layers)
        except KeyError as error:
            raise FormatError(f"{damaged} lacks {error}") from error
        except (TypeError, ValueError) as error:
            raise FormatError(f"{damaged} cannot be read: {error}") from error
    if arrays:
        raise FormatError(f"{path}: arrays that no chunk names: {sorted(arrays)[:3]}")
    return layers, metadata


def _take(entry: Any, arrays: dict[str, np.ndarray], layers: dict[int, list[SealedChunk]]) -> None:
    """Put the chunk that ``entry`` describes at the end of its layer."""
    earlier = layers.get(entry["layer"], [])
    tensors = {kind: _tensor(entry, kind, arrays, earlier) for kind in KINDS}
    layer, start, version = (operator.index(entry[name]) for name in ("layer", "start", "version"))
    layers.setdefault(layer, []).append(SealedChunk(**tensors, start=start, version=version))


def _tensor(
    entry: dict[str, Any], kind: Kind, arrays: dict[str, np.ndarray], earlier: Sequence[SealedChunk]
) -> SealedTensor:
    """Take one tensor's arrays out of ``arrays``; those that it shares, from the ``earlier`` chunk that holds them."""
    prefix = f"layer.{entry['layer']}.chunk.{entry['chunk']}.{kind}."
    names = [name for name in arrays if name.startswith(prefix)]
    method, parameters = entry[kind]["method"], entry[kind]["parameters"]
    batch, heads, tokens, channels = (operator.index(size) for size in entry[kind]["shape"])
    shared = entry[kind].get("shared", {})
    tables = isinstance(parameters, dict) and isinstance(shared, dict)
    if not isinstance(method, str) or not tables or min(batch, heads, tokens, channels) < 1:
        raise ValueError(f"{prefix}* is described as {entry[kind]}")
    if not names:
        raise KeyError(f"{prefix}*")
    own = {name.removeprefix(prefix): arrays.pop(name) for name in names}
    for name, holder in shared.items():
        if not 0 <= operator.index(holder) < len(earlier):
            raise ValueError(f"{prefix}{name} is said to be in chunk {holder}, which does not stand before it")
        own[name] = _shared(earlier[holder], kind)[name]
    return SealedTensor(method, parameters, (batch, heads, tokens, channels), own)


def write_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named arrays, BF16 and E4M3 included, as safetensors; replaces ``path`` only when the file is whole.

    Arrays and metadata stand in a fixed order (the safetensors library writes metadata in a random one).

    Raises:
        DtypeError: An array holds a number format that the files do not know.
        FormatError: ``path`` is a folder, a device, a pipe or a socket.
        OSError: The folder cannot be written; an older file stays as it was.
    """
    text, order = make_header({name: (array.dtype, array.shape) for name, array in arrays.items()}, metadata)
    with replaced(path) as file:
        file.write(text)
        for name in order:
            file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read every array of a safetensors file, and its metadata.

    Raises:
        FormatError: The file is truncated or no safetensors file, or holds a number format that none of ours has.
        OSError: The file cannot be read.
    """
    places, metadata = read_header(path)
    blob = memoryview(Path(path).read_bytes())
    arrays = {
        name: np.frombuffer(blob[place.start : place.stop], place.dtype).reshape(place.shape)
        for name, place in places.items()
    }
    return arrays, metadata


explain_errors(globals())
