"""PSAC: principal-subspace attention compensation, the key error along the top query directions (paper, PSAC section).

``E = K - K^`` is projected on the stored BF16 basis ``U [D, r]``. BF16 rounding leaves ``U`` not quite orthonormal, so
the coefficients are least squares, and each direction gets one symmetric INT8 scale::

    A = E U (U^T U)^-1      a_i = max_n |A_ni| / 127, rounded up to BF16      A^ = a * round(A / a)
    K~ = K^ + A^ U^T

INT4 coefficients (ours) clip instead what lies beyond three times the root mean square, ``a_i = min(max_n |A_ni|, 3 rms_n A_ni) / 7``:
seven steps are too few to spend them on outliers. Two share a byte, direction ``2j`` in its low half, and they are always dense.

INT8 coefficients are stored dense, or sparse when that is smaller. Sparse, per stream::

    bitmap    ceil(N r / 8) bytes: bit n*r + i tells that coefficient (n, i) is non-zero, least significant bit first
    values    the non-zero INT8 values in the order of the bitmap
    counts    int32 per 64 tokens: how many values lie before them, over all sparse streams of the unit in order
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import BFloat16, Bool, Float32, Int8, Int32, UInt8

from quantwm_core import packing
from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16, check_finite, round_up
from quantwm_core.errors import ParameterError, ShapeError

COEFFICIENT_MAX = {4: 7, 8: 127}
"""Largest step by bits of a coefficient."""
CLIPPED_RMS = 3.0
TOKENS_PER_COUNT = 64


@dataclass(frozen=True)
class PsacCode:
    """Coefficients of a unit's streams, flattened to one axis in row-major order.

    Attributes:
        scales: BF16 ``[*streams, r]``.
        dense: int8 ``[dense streams, N, r]``, or uint8 ``[streams, N, ceil(r / 2)]`` of INT4.
        layout: uint8 ``[*streams]``, 1 where a stream is sparse; empty ``[0]`` when none is.
        bitmap: uint8 ``[sparse streams, ceil(N r / 8)]``.
        values: int8 ``[non-zero values]``.
        counts: int32 ``[sparse streams, ceil(N / 64)]``.
    """

    scales: BFloat16[np.ndarray, "*streams rank"]
    dense: Int8[np.ndarray, "dense tokens rank"] | UInt8[np.ndarray, "dense tokens pairs"]
    layout: UInt8[np.ndarray, "..."]
    bitmap: UInt8[np.ndarray, "sparse bytes"]
    values: Int8[np.ndarray, " values"]
    counts: Int32[np.ndarray, "sparse blocks"]


def check_bits(bits: int, threshold: float) -> None:
    """Raise :class:`ParameterError` unless coefficients of ``bits`` bits can be stored, sparse ones for a threshold.

    >>> check_bits(4, 0.0)
    """
    if bits not in COEFFICIENT_MAX or (bits == 4 and threshold > 0):
        raise ParameterError(
            f"coefficients of {bits} bits with threshold {threshold}: need 8 bits, or 4 without a threshold"
        )


def dense_size(tokens: int, rank: int, bits: int = 8) -> int:
    """Bytes of a stream's dense coefficients.

    >>> dense_size(4680, 8), dense_size(4680, 8, bits=4)
    (37440, 18720)
    """
    return tokens * (rank if bits == 8 else packing.nibble_size(rank))


def sparse_size(tokens: int, rank: int, non_zero: int) -> int:
    """Bytes of a stream's sparse coefficients, index included.

    >>> sparse_size(4680, 8, 1000)
    5976
    """
    return -(-tokens * rank // 8) + non_zero + 4 * -(-tokens // TOKENS_PER_COUNT)


def project(
    error: Float32[np.ndarray, "*streams tokens channels"], basis: BFloat16[np.ndarray, "*streams channels rank"]
) -> Float32[np.ndarray, "*streams tokens rank"]:
    """Least-squares coefficients of ``error`` in the columns of ``basis``; zero where the basis is zero.

    >>> basis = np.float32([[[0.5], [0.0]]]).astype(BF16)
    >>> project(np.float32([[[1.0, 7.0]]]), basis)
    array([[[2.]]], dtype=float32)
    """
    wide = basis.astype(np.float32)
    gram = np.swapaxes(wide, -1, -2) @ wide
    empty = np.abs(wide).max(axis=(-2, -1), keepdims=True) == 0
    gram = np.where(empty, np.eye(gram.shape[-1], dtype=np.float32), gram)
    return error @ (wide @ np.linalg.inv(gram))


def encode(
    error: Float32[np.ndarray, "*streams tokens channels"],
    basis: BFloat16[np.ndarray, "*streams channels rank"],
    energies: Float32[np.ndarray, "*streams rank"],
    threshold: float = 0.0,
    bits: int = 8,
) -> PsacCode:
    """Code the key error along the basis.

    Args:
        error: FP32 ``K - K^``, before ``K^`` is rounded to BF16.
        basis: Stored BF16 basis.
        energies: Eigenvalues that belong to the basis, used by ``threshold``.
        threshold: Coefficients whose effect on a logit, ``|A^_ni| sqrt(energy_i / D)`` in standard deviations, stays
            below this are set to zero.
        bits: Of a coefficient, 8 or 4.

    Raises:
        ParameterError: See :func:`check_bits`.
        DomainError: A number is NaN or infinite.

    >>> code = encode(
    ...     np.float32([[[1.0, 7.0], [-0.5, 0.0]]]),
    ...     np.float32([[[1.0], [0.0]]]).astype(BF16),
    ...     np.ones((1, 1), np.float32),
    ... )
    >>> code.dense.ravel(), code.layout.size
    (array([126, -63], dtype=int8), 0)
    """
    check_bits(bits, threshold)
    coefficients = project(error, basis)
    most = COEFFICIENT_MAX[bits]
    largest = np.abs(coefficients).max(axis=-2)
    check_finite(largest, "coefficients")
    if bits == 4:
        largest = np.minimum(largest, _clipping_point(coefficients, largest))
    scales = round_up(largest / np.float32(most), 8).astype(BF16)
    step = scales.astype(np.float32)[..., None, :]
    ratio = coefficients / np.where(step > 0, step, np.float32(np.inf))
    steps = np.clip(np.rint(ratio), -most, most)
    if threshold > 0:
        check_finite(energies, "energies")
        effect = np.abs(steps) * step * np.sqrt(energies / error.shape[-1])[..., None, :]
        steps = np.where(effect < threshold, np.float32(0), steps)
    whole = steps.astype(np.int8)
    return _packed(whole, scales) if bits == 4 else _choose_layout(whole, scales)


def decode(
    code: PsacCode, tokens: int, start: int = 0, stop: int | None = None
) -> Float32[np.ndarray, "*streams tokens rank"]:
    """Coefficients ``A^`` of tokens ``start`` to ``stop`` of a unit of ``tokens``, FP32.

    >>> code = encode(np.float32([[[1.0], [0.5]]]), np.float32([[[1.0]]]).astype(BF16), np.ones((1, 1), np.float32))
    >>> decode(code, 2, start=1)
    array([[[0.49987793]]], dtype=float32)
    """
    stop = tokens if stop is None else stop
    *streams, rank = code.scales.shape
    if code.dense.dtype == np.uint8:
        whole = packing.unpack_nibbles(code.dense[:, start:stop], rank)
        return _scaled(whole.reshape(*streams, stop - start, rank), code.scales)
    steps = np.empty((int(np.prod(streams)), stop - start, rank), np.int8)
    sparse = np.zeros(len(steps), bool) if code.layout.size == 0 else code.layout.ravel().astype(bool)
    steps[~sparse] = code.dense[:, start:stop]
    if sparse.any():
        steps[sparse] = _expand(code, tokens, rank)[:, start:stop]
    return _scaled(steps.reshape(*streams, stop - start, rank), code.scales)


def correction(
    code: PsacCode, basis: BFloat16[np.ndarray, "*streams channels rank"], tokens: int, start: int, stop: int
) -> Float32[np.ndarray, "*streams tokens channels"]:
    """What is added to ``K^``: ``A^ U^T`` for tokens ``start`` to ``stop``."""
    return decode(code, tokens, start, stop) @ np.swapaxes(basis.astype(np.float32), -1, -2)


def _scaled(
    steps: Int8[np.ndarray, "*streams tokens rank"], scales: BFloat16[np.ndarray, "*streams rank"]
) -> Float32[np.ndarray, "*streams tokens rank"]:
    """Coefficients of whole steps."""
    return steps.astype(np.float32) * scales.astype(np.float32)[..., None, :]


def _clipping_point(
    coefficients: Float32[np.ndarray, "*streams tokens rank"], largest: Float32[np.ndarray, "*streams rank"]
) -> Float32[np.ndarray, "*streams rank"]:
    """Three times the root mean square of each direction; taken relative to the largest, so that no square vanishes."""
    divisor = np.where(largest > 0, largest, np.float32(1))
    relative = coefficients / divisor[..., None, :]
    mean = np.square(relative).mean(axis=-2, dtype=np.float64)
    return (CLIPPED_RMS * np.sqrt(mean)).astype(np.float32) * divisor


def _packed(steps: Int8[np.ndarray, "*streams tokens rank"], scales: BFloat16[np.ndarray, "..."]) -> PsacCode:
    """INT4 steps, two a byte."""
    tokens, rank = steps.shape[-2:]
    dense = packing.pack_nibbles(steps.reshape(-1, tokens, rank))
    return PsacCode(scales, dense, *no_sparse_parts(tokens, rank))


def no_sparse_parts(tokens: int, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Layout, bitmap, values and counts of a unit without sparse streams."""
    bitmap = np.zeros((0, -(-tokens * rank // 8)), np.uint8)
    counts = np.zeros((0, -(-tokens // TOKENS_PER_COUNT)), np.int32)
    return np.zeros(0, np.uint8), bitmap, np.zeros(0, np.int8), counts


def _choose_layout(steps: Int8[np.ndarray, "*streams tokens rank"], scales: BFloat16[np.ndarray, "..."]) -> PsacCode:
    """Split the streams into dense and sparse ones; the smaller size wins, a tie goes to dense."""
    *streams, tokens, rank = steps.shape
    flat = steps.reshape(-1, tokens, rank)
    non_zero: Bool[np.ndarray, "streams tokens rank"] = flat != 0
    per_stream = non_zero.sum(axis=(1, 2))
    sparse = np.array([sparse_size(tokens, rank, int(n)) < dense_size(tokens, rank) for n in per_stream])
    layout = sparse.astype(np.uint8).reshape(streams) if sparse.any() else np.zeros(0, np.uint8)
    kept = non_zero[sparse]
    bitmap = np.packbits(kept.reshape(len(kept), tokens * rank), axis=-1, bitorder="little")
    blocks = np.add.reduceat(kept.sum(axis=2), np.arange(0, tokens, TOKENS_PER_COUNT), axis=1)
    counts = np.cumsum(blocks.ravel()) - blocks.ravel()
    return PsacCode(
        scales, flat[~sparse], layout, bitmap, flat[sparse][kept], counts.reshape(blocks.shape).astype(np.int32)
    )


def _expand(code: PsacCode, tokens: int, rank: int) -> Int8[np.ndarray, "sparse tokens rank"]:
    """Dense coefficients of the sparse streams. The bitmap alone orders the values; ``counts`` serve random access."""
    bits = np.unpackbits(code.bitmap, axis=-1, count=tokens * rank, bitorder="little").astype(bool)
    if code.bitmap.shape[-1] != -(-tokens * rank // 8) or np.count_nonzero(bits) != code.values.size:
        raise ShapeError(f"{code.values.size} values and bitmap {code.bitmap.shape} of {tokens} tokens, rank {rank}")
    steps = np.zeros(bits.shape, np.int8)
    steps[bits] = code.values
    return steps.reshape(-1, tokens, rank)


explain_errors(globals())
