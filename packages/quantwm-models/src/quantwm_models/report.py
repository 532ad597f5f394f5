"""What a cache holds and what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from quantwm_kernels.chunk import storage_nbytes, stored_nbytes
from quantwm_models.contents import Contents
from quantwm_models.geometry import Geometry


@dataclass(frozen=True)
class CacheReport:
    """Bytes counted from storage, and units and times counted since the cache last began anew.

    It does so by ``clear()``, ``restart()``, ``rewind()`` and ``rebuild()``: under a host that makes its history anew again and
    again, units and times are those of the last history.

    Attributes:
        tokens: Live tokens; the sum over layers where several are totalled.
        sealed_tokens: Those that are stored sealed.
        sealed_bf16_nbytes: Bytes that the live sealed tokens would take as BF16.
        sealed_nbytes: Bytes of the sealed units that hold a live token, arrays that units share counted once.
        shared_nbytes: Those of arrays that units share, such as a basis; the rest grows with the tokens.
        host_nbytes: Those of them that lie in host memory, because the units are offloaded.
        staging_nbytes: Bytes of the device memory that offloaded units pass through, counted once where layers share it.
        active_nbytes: Bytes of BF16 chunks: the active one, and completed ones that are not due yet.
        state_nbytes: Bytes of query statistics.
        workspace_nbytes: Bytes of the shared workspace, counted once where layers share it.
        chunks_sealed: Units sealed.
        chunks_evicted: Sealed units whose last live token was evicted.
        seal_seconds: Time that sealing took.
        decode_seconds: Time that reconstructing reads took. Both are by the host's clock on a CPU, and by events in its stream
            on a GPU, so work that was queued before does not count; there one read in seven is timed and stands for all. Reads
            that a CUDA graph captured are not timed.
    """

    tokens: int = 0
    sealed_tokens: int = 0
    sealed_bf16_nbytes: int = 0
    sealed_nbytes: int = 0
    shared_nbytes: int = 0
    host_nbytes: int = 0
    staging_nbytes: int = 0
    active_nbytes: int = 0
    state_nbytes: int = 0
    workspace_nbytes: int = 0
    chunks_sealed: int = 0
    chunks_evicted: int = 0
    seal_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """BF16 bytes over stored bytes of the sealed tokens; 1 while nothing is sealed.

        >>> CacheReport(sealed_bf16_nbytes=600, sealed_nbytes=100, active_nbytes=100).ratio
        6.0
        """
        return self.sealed_bf16_nbytes / self.sealed_nbytes if self.sealed_nbytes else 1.0

    @property
    def own_bits(self) -> float:
        """Bits an element of the sealed tokens that grow with them: all stored bytes but those that units share.

        >>> report = CacheReport(sealed_bf16_nbytes=1600, sealed_nbytes=250, shared_nbytes=50)
        >>> report.own_bits, report.shared_bits
        (2.0, 0.5)
        """
        return self._bits(self.sealed_nbytes - self.shared_nbytes)

    @property
    def shared_bits(self) -> float:
        """Bits an element of what units share, such as bases, each counted once; the fewer, the longer the video."""
        return self._bits(self.shared_nbytes)

    @property
    def state_bits(self) -> float:
        """Likewise of query statistics, which are kept beside the cache to compress with."""
        return self._bits(self.state_nbytes)

    def _bits(self, nbytes: int) -> float:
        return 16 * nbytes / self.sealed_bf16_nbytes if self.sealed_bf16_nbytes else 0.0

    @property
    def ratio_with_active(self) -> float:
        """The same with the BF16 chunks on both sides.

        >>> CacheReport(sealed_bf16_nbytes=600, sealed_nbytes=100, active_nbytes=100).ratio_with_active
        3.5
        """
        stored = self.sealed_nbytes + self.active_nbytes
        return (self.sealed_bf16_nbytes + self.active_nbytes) / stored if stored else 1.0


def held(contents: Contents, geometry: Geometry | None) -> CacheReport:
    """What is to be said of one layer's contents; reads, and what layers share, are not among them."""
    sealed = sum(piece.span.tokens for piece in contents.stream.read() if piece.unit is not None)
    own, shared = stored_nbytes(unit.chunk for unit in contents.units.values())
    return CacheReport(
        tokens=contents.stream.tokens,
        sealed_tokens=sealed,
        sealed_bf16_nbytes=0 if geometry is None else sealed * geometry.token_nbytes,
        sealed_nbytes=own + shared,
        shared_nbytes=shared,
        active_nbytes=storage_nbytes(tensor for piece in contents.exact for tensor in (piece.keys, piece.values)),
        host_nbytes=sum(unit.block.nbytes for unit in contents.units.values() if unit.block is not None),
        state_nbytes=contents.queries.nbytes,
        chunks_sealed=contents.chunks_sealed,
        chunks_evicted=contents.chunks_evicted,
        seal_seconds=contents.seal_seconds,
    )


def total(reports: Iterable[CacheReport], workspace_nbytes: int, staging_nbytes: int = 0) -> CacheReport:
    """Sum of the layers' reports; workspace and staging memory, which they share, are given apart.

    >>> total([CacheReport(tokens=3, workspace_nbytes=9), CacheReport(tokens=4, workspace_nbytes=9)], 9)
    CacheReport(tokens=7, ..., workspace_nbytes=9, ...)
    """
    several = list(reports)
    sums = {field.name: sum(getattr(report, field.name) for report in several) for field in fields(CacheReport)}
    return replace(CacheReport(**sums), workspace_nbytes=workspace_nbytes, staging_nbytes=staging_nbytes)
