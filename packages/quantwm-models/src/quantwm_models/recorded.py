"""What a cache holds <-> what JSON can say of it, and named tensors of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantwm_core.chunk import FORMAT_VERSION, KINDS, SHARED, Kind
from quantwm_core.errors import FormatError
from quantwm_core.stream import Span
from quantwm_kernels.chunk import SealedChunk, SealedTensor, described, description
from quantwm_kernels.description import describe
from quantwm_kernels.recipe import READABLE
from quantwm_kernels.statistics import QueryMoment
from quantwm_kernels.tensor_file import TensorFile
from quantwm_models.bookkeeping import (
    check_cover,
    check_groups,
    check_sealing,
    listed,
    seconds,
    sizes_told,
    span_told,
    stream_told,
    whole,
)
from quantwm_models.cache import LayerCache
from quantwm_models.causality import CausalQueries, Group
from quantwm_models.contents import Contents, Exact, Unit, serials
from quantwm_models.geometry import Geometry

# What of a stream is no setting.
_STREAM = ("ends", "active", "live", "units", "sealed_end")


class Recorder:
    """Collects the tensors of a cache, each once, and says the rest.

    Args:
        prefix: How the names of its tensors begin.

    Attributes:
        tensors: Those that were said to be there, by name.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def record(self, cache: LayerCache) -> dict[str, Any]:
        """What JSON can say of a cache."""
        contents, geometry = cache.contents, cache.geometry
        exact = [
            {"span": piece.span} | {kind: self._put(f"exact.{number}.{kind}", getattr(piece, kind)) for kind in KINDS}
            for number, piece in enumerate(contents.exact)
        ]
        groups = [
            {"start": group.start, "moment": self._moment(f"{number}", group.moment)}
            for number, group in enumerate(contents.queries.groups)
        ]
        past = self._moment("past", contents.queries.past)
        devices = [tensor.device for tensor in self.tensors.values()]  # before units, which may be in host memory
        return {
            "geometry": None if geometry is None else geometry[:4],
            "device": str(geometry.device if geometry is not None else (*devices, "cpu")[0]),
            "stream": {name: getattr(contents.stream, name) for name in _STREAM},
            "exact": exact,
            "past": past,
            "groups": groups,
            "units": [self._unit(each, contents.units[span].chunk) for each, span in enumerate(contents.stream.units)],
            "chunks_sealed": contents.chunks_sealed,
            "chunks_evicted": contents.chunks_evicted,
            "seal_seconds": contents.seal_seconds,
        }

    def _put(self, name: str, tensor: Tensor) -> str:
        """What a tensor is called in the file."""
        identity = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        known = self._names.setdefault(identity, self.prefix + name)
        self.tensors[known] = tensor
        return known

    def _unit(self, number: int, chunk: SealedChunk) -> dict[str, Any]:
        told: dict[str, Any] = {"start": chunk.start, "version": chunk.version}
        for kind in KINDS:
            sealed: SealedTensor = getattr(chunk, kind)
            files = [self._put(f"unit.{number}.{kind}.{name}", tensor) for name, tensor in sealed.arrays.items()]
            fields = description(sealed.method, sealed.parameters, sealed.shape, sealed.arrays)
            told[kind] = fields | {"files": files}
        return told

    def _moment(self, name: str, moment: QueryMoment | None) -> dict[str, Any] | None:
        if moment is None:
            return None
        return {"queries": moment.queries, "file": self._put(f"queries.{name}", moment.mean)}


class Source:
    """Reads a cache from where its tensors are in a file to where they belong.

    Args:
        file: With the tensors.
        told: What :meth:`Recorder.record` said.
        cache: For which; nothing happens to it.
        device: Where it is to be read.
    """

    def __init__(self, file: TensorFile, told: Mapping[str, Any], cache: LayerCache, device: torch.device) -> None:
        self.file = file
        self.told = told
        self.cache = cache
        self.device = device
        sizes = sizes_told(told["geometry"])
        self.geometry = None if sizes is None else Geometry(*sizes, device)
        self._shared: dict[str, Tensor] = {}

    def contents(self) -> Contents:
        """What the cache held, its units where ``cache`` keeps them.

        Raises:
            FormatError: An array is missing, or does not fit what is said of it.
        """
        told = self.told
        stream = stream_told(told["stream"], self.cache.stream)
        if bool(stream.ends) != (self.geometry is not None):
            raise FormatError(
                f"{len(stream.ends)} chunks of [batch, heads, key channels, value channels] {told['geometry']}"
            )
        groups = tuple(
            Group(whole("groups", each["start"]), self._moment(each["moment"]))
            for each in listed("groups", told["groups"])
        )
        check_groups(stream, [group.start for group in groups])
        check_cover(stream, [span_told("exact", each["span"]) for each in listed("exact", told["exact"])])
        units = list(map(self._unit, listed("units", told["units"])))
        contents = Contents(
            stream,
            CausalQueries(self._moment(told["past"]), groups, self.cache.scheme.decay),
            {Span(unit.chunk.start, unit.chunk.stop): unit for unit in units},
            tuple(map(self._exact, told["exact"])),
            chunks_sealed=whole("chunks_sealed", told["chunks_sealed"]),
            chunks_evicted=whole("chunks_evicted", told["chunks_evicted"]),
            seal_seconds=seconds("seal_seconds", told["seal_seconds"]),
        )
        if tuple(contents.units) != stream.units:
            raise FormatError(f"units {list(contents.units)} are there, need {list(stream.units)}")
        if contents.chunks_sealed - contents.chunks_evicted != len(units):
            raise FormatError(
                f"chunks_sealed {contents.chunks_sealed} and chunks_evicted {contents.chunks_evicted}: {len(units)} are there"
            )
        return contents

    def _unit(self, told: Mapping[str, Any]) -> Unit:
        offload = self.cache.offload
        home = self.device if offload is None else torch.device("cpu")
        keys, values = (self._sealed(kind, told[kind], home) for kind in KINDS)
        version = whole("version", told["version"], 1, FORMAT_VERSION)
        chunk = SealedChunk(keys, values, whole("start", told["start"]), version)
        unit = Unit(next(serials), chunk)
        return unit if offload is None else offload.take(unit, self.device)

    def _sealed(self, kind: Kind, told: Mapping[str, Any], home: torch.device) -> SealedTensor:
        """Keys or values of a unit: what is its own at ``home``, what units share where it is read."""
        scheme = self.cache.scheme
        check_sealing(kind, told, scheme.keys if kind == "keys" else scheme.values)
        shape = [whole("shape", each, 1) for each in listed("shape", told["shape"])]
        arrays = []
        for name, file in zip(told["names"], told["files"], strict=True):
            if not name.startswith(SHARED):
                arrays.append(self.file.read(file, home))
                continue
            if file not in self._shared:
                self._shared[file] = self.file.read(file, self.device)
            arrays.append(self._shared[file])
        sealed = SealedTensor(**described({**told, "shape": shape}, arrays))
        batch, heads, channels = self._sizes(kind)
        self._check(f"a unit's {kind}", sealed.shape, (batch, heads, sealed.shape[2], channels))
        if sealed.method in READABLE:  # those that kernels read by address
            describe(sealed.method, sealed.parameters, sealed.shape, sealed.to(home).arrays)
        return sealed

    def _exact(self, told: Mapping[str, Any]) -> Exact:
        span = span_told("exact", told["span"])
        keys, values = (self.file.read(told[kind], self.device) for kind in KINDS)
        for kind, tensor in zip(KINDS, (keys, values), strict=True):
            batch, heads, channels = self._sizes(kind)
            wanted = (torch.bfloat16, batch, heads, span.tokens, channels)
            self._check(told[kind], (tensor.dtype, *tensor.shape), wanted)
        return Exact(next(serials), span, keys, values)

    def _moment(self, told: Mapping[str, Any] | None) -> QueryMoment | None:
        if told is None:
            return None
        mean = self.file.read(told["file"], self.device)
        channels = mean.shape[-1]
        streams = mean.shape[:2] if self.geometry is None else self.geometry[:2]
        self._check(told["file"], (mean.dtype, *mean.shape), (torch.float32, *streams, channels, channels))
        return QueryMoment(mean, whole("queries", told["queries"]))

    def _sizes(self, kind: Kind) -> tuple[int, int, int]:
        """Batch, heads and channels of keys or values."""
        if self.geometry is None:
            raise FormatError(f"{kind} of a cache that is said to be empty")
        batch, heads, key_channels, value_channels, _ = self.geometry
        return batch, heads, key_channels if kind == "keys" else value_channels

    @staticmethod
    def _check(what: str, came: Sequence[Any], needed: Sequence[Any]) -> None:
        if tuple(came) != tuple(needed):
            raise FormatError(f"{what}: got {tuple(came)}, need {tuple(needed)}")
