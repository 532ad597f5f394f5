"""``oscar``: INT2 in a rotation by the second moment of queries, after OSCAR (arXiv 2605.17757).

Keys are rotated by the eigenvectors of ``M = E[q q^T]`` and a Hadamard matrix, so that all coordinates matter alike and
none sticks out, each token is clipped to a share of its range, and quantized to two bits with a scale and a minimum:
2.25 bits an element with one group of 128 channels (2.28 with the tokens that the paper keeps exact). Where it deviates
from its paper: the rotation is fitted online to past queries, once there are any, instead of offline; values are rotated
by their own second moment, because no method here sees the attention scores that the paper weights it with; the share
is searched per unit and head instead of calibrated per layer; and no token stays exact.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import BFloat16, Bool, Float32, Float64, UInt8

from quantwm_core import basis, minmax, packing, transform
from quantwm_core.allocation import check_channels
from quantwm_core.basis import Basis
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.domain import BF16, binary_exponent
from quantwm_core.errors import ParameterError, ShapeError
from quantwm_core.statistics import QueryMoment

SHARED_PARTS = ("shared_fitted", *basis.PARTS)
PARTS = ("codes", "scales", "minima", *SHARED_PARTS)
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a token's range that are tried; the first of equals is taken."""


@dataclass(frozen=True)
class Oscar:
    """Rotated INT2.

    Attributes:
        group_size: Rotated channels that share a scale and a minimum; None takes all of a token's.
    """

    group_size: int | None = None
    name = "oscar"
    recent_tokens = 0

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise ParameterError(f"oscar group size {self.group_size}: need at least 1")

    def uses_queries(self, kind: Kind) -> bool:
        """For keys."""
        return kind == "keys"

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """Codes with scale and minimum, and the rotation."""
        return PARTS

    def seal(
        self,
        kind: Kind,
        values: BFloat16[np.ndarray, "batch heads tokens channels"],
        moment: QueryMoment | None = None,
        previous: SealedTensor | None = None,
    ) -> SealedTensor:
        """Encode a unit's keys or values.

        Raises:
            ShapeError: The head dimension is no multiple of eight.

        >>> unit = np.ones((1, 1, 32, 128), "bfloat16")
        >>> sealed = METHOD().seal("keys", unit)
        >>> shared = sum(array.nbytes for name, array in sealed.arrays.items() if name.startswith("shared"))
        >>> 8 * (sealed.nbytes - shared) / unit.size
        2.25
        """
        batch, heads, tokens, channels = values.shape
        check_channels(channels, self.name)
        moments, known = _moments(kind, values, moment)
        kept = transform.kept_basis(previous, self.name, (batch, heads), channels, SHARED_PARTS)
        before = previous.arrays["shared_fitted"] if kept is not None and previous is not None else known * np.uint8(0)
        fitted, shared = _rotation(kept, before, moments, known)
        coded = [
            self._encode(values[place], moments[place], basis.wide(*stream))
            for place, stream in zip(np.ndindex(batch, heads), shared.streams(), strict=True)
        ]
        codes, scales, minima = (np.stack(part).reshape(batch, heads, tokens, -1) for part in zip(*coded, strict=True))
        arrays = {"codes": codes, "scales": scales, "minima": minima, "shared_fitted": fitted, **shared.arrays}
        return SealedTensor(self.name, asdict(self), (batch, heads, tokens, channels), arrays)

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """BF16 coordinates times the BF16 rotation, summed in FP32 and rounded to BF16."""
        first, last = sealed.token_range(start, stop, "codes", "scales", "minima")
        batch, heads, tokens, channels = sealed.shape
        if sealed.arrays["shared_fitted"].shape != (batch, heads):
            raise ShapeError(
                f"rotations of streams {sealed.arrays['shared_fitted'].shape} for a unit of {sealed.shape}"
            )
        begin, end = transform.tiles_of(first, last)
        rows = np.s_[:, :, begin : min(end, tokens)]
        codes = packing.unpack(sealed.arrays["codes"][rows], channels)
        size = self.group_size or channels
        scales, minima = sealed.arrays["scales"][rows], sealed.arrays["minima"][rows]
        coordinates = np.zeros((batch, heads, end - begin, channels), np.float32)
        coordinates[:, :, : codes.shape[2]] = minmax.decode_groups(codes, scales, minima, size).astype(BF16)
        decoded = np.empty((batch, heads, last - first, channels), BF16)
        for place, (own, scale) in zip(np.ndindex(batch, heads), Basis.of(sealed.arrays).streams(), strict=True):
            matrix = basis.wide(own, scale).astype(np.float32).astype(BF16)
            decoded[place] = transform.product(coordinates[place], matrix)[first - begin : last - begin]
        return decoded

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """Codes, scale and minimum of every group, and the rotation."""
        batch, heads, tokens, channels = shape
        check_channels(channels, self.name)
        groups = -(-channels // (self.group_size or channels))
        own = tokens * (packing.packed_size(channels) + 4 * groups)
        return batch * heads * (own + channels * (channels + 2) + 2)

    def _encode(
        self,
        values: BFloat16[np.ndarray, "tokens channels"],
        moment: Float64[np.ndarray, "channels channels"],
        rows: Float64[np.ndarray, "channels channels"],
    ) -> tuple[
        UInt8[np.ndarray, "tokens bytes"],
        BFloat16[np.ndarray, "tokens groups"],
        BFloat16[np.ndarray, "tokens groups"],
    ]:
        """Codes, scales and minima of a stream with the share whose error costs least under the moment."""
        forward = basis.projector(rows, np.eye(len(rows)))
        exponent = int(binary_exponent(values).item())
        rotated = np.ldexp(np.ascontiguousarray(values, np.float64), -exponent) @ forward.T
        size = self.group_size or len(rows)
        tried = [minmax.encode_groups(_clipped(rotated, size, share), size) for share in SHARES]
        errors = [(minmax.decode_groups(*coded, size) - rotated) @ rows for coded in tried]
        costs = [np.einsum("nd,de,ne->", error, moment, error, optimize=True) for error in errors]
        codes, scales, minima = tried[int(np.argmin(costs))]
        wide = [np.ldexp(part.astype(np.float32), exponent).astype(BF16) for part in (scales, minima)]
        return packing.pack(codes), wide[0], wide[1]


def _clipped(
    rotated: Float64[np.ndarray, "tokens channels"], group_size: int, share: float
) -> Float32[np.ndarray, "tokens channels"]:
    """Every group of a token cut to the middle ``share`` of its range."""
    starts = np.arange(0, rotated.shape[1], group_size)
    low, high = (reduce.reduceat(rotated, starts, axis=1) for reduce in (np.minimum, np.maximum))
    cut = (high - low) * (1 - share) / 2
    bounds = [np.repeat(end, group_size, axis=1)[:, : rotated.shape[1]] for end in (low + cut, high - cut)]
    return np.clip(rotated, *bounds).astype(np.float32)


def hadamard(channels: int) -> Float64[np.ndarray, "channels channels"]:
    """Orthogonal matrix whose entries are of one magnitude, or zero where ``channels`` is no power of two.

    Then its blocks are of the largest power that divides it, and each mixes every so many directions, so that all of them
    have some of the strongest.

    >>> hadamard(2) * np.sqrt(2)
    array([[ 1.,  1.],
           [ 1., -1.]])
    """
    matrix = np.ones((1, 1))
    while channels % (2 * len(matrix)) == 0:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(matrix, np.eye(channels // len(matrix))) / np.sqrt(len(matrix))


def _moments(
    kind: Kind, values: BFloat16[np.ndarray, "batch heads tokens channels"], moment: QueryMoment | None
) -> tuple[Float64[np.ndarray, "batch heads channels channels"], Bool[np.ndarray, "batch heads"]]:
    """What each rotation is fitted to, and whether that is known: the moment of past queries, or of the values."""
    batch, heads, tokens, channels = values.shape
    if kind == "values":
        scaled = np.ldexp(np.ascontiguousarray(values, np.float64), -binary_exponent(values))
        own = np.swapaxes(scaled, -1, -2) @ scaled / tokens
    else:
        own = np.zeros((batch, heads, channels, channels)) if moment is None else moment.mean.astype(np.float64)
    moments, average = basis.normalised(own)
    return moments, average > 0


def _rotation(
    kept: Basis | None,
    before: UInt8[np.ndarray, "batch heads"],
    moments: Float64[np.ndarray, "batch heads channels channels"],
    known: Bool[np.ndarray, "batch heads"],
) -> tuple[UInt8[np.ndarray, "batch heads"], Basis]:
    """Which streams' rotations are fitted, and these: those of the unit before unless more can be fitted now."""
    if kept is not None and not (known & (before == 0)).any():
        return before, kept
    batch, heads, channels, _ = moments.shape
    mix = hadamard(channels)
    streams = [mix @ basis.fit(moments[place], np.eye(channels)) for place in np.ndindex(batch, heads)]
    return known.astype(np.uint8), basis.store(streams, (batch, heads))


METHOD = Oscar
