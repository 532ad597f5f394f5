"""Group affine INT2: a group of channels, one scale, one 2-bit zero-point (paper: the residual quantizer).

For a group ``x`` of ``G`` consecutive channels of one token::

    lo = min(0, min x)     hi = max(0, max x)
    s  = (hi - lo) / 3     s' = s after storage (see scales)     z = clip(round(-lo / s'), 0, 3)
    code = clip(round(x / s') + z, 0, 3)                         x^ = (code - z) * s'

Rounding is half-to-even. Zero is always representable, and ``s' = 0`` exactly when the group is all zero.

A scale may be searched: the range is shrunk by eighths, ``lo`` and ``hi`` alike, and the fraction with the smallest squared
error is kept (ours). Clipping the few outermost values of a group pays for a finer grid under all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float8e4m3fn, Float32, UInt8

from quantwm_core import packing, scales
from quantwm_core.arguments import explain_errors
from quantwm_core.errors import ParameterError, ShapeError

LEVELS = 3
MAX_GROUP = 64
FRACTIONS = (1.0, 0.875, 0.75, 0.625)
"""Shares of a group's range that a search tries, in order; FP32 holds them exactly."""


def default_group_size(channels: int) -> int:
    """Largest multiple of 4 that is at most 64 and divides the head dimension.

    Raises:
        ShapeError: The head dimension is not a positive multiple of 4.

    >>> [default_group_size(d) for d in (32, 64, 80, 96, 128, 256)]
    [32, 64, 40, 48, 64, 64]
    """
    if channels < 4 or channels % 4:
        raise ShapeError(f"head dimension {channels}: need a positive multiple of 4")
    return max(size for size in range(4, MAX_GROUP + 1, 4) if channels % size == 0)


def check_group_multiple(group_size: int | None) -> None:
    """Raise :class:`ParameterError` for a group size that fits no head dimension; None, the default, passes.

    >>> check_group_multiple(64)
    """
    if group_size is not None and (group_size < 4 or group_size % 4):
        raise ParameterError(f"group size {group_size}: need a positive multiple of 4")


def check_group_size(channels: int, group_size: int) -> int:
    """Return how many groups a token has, or raise :class:`ParameterError` if they do not fit.

    >>> check_group_size(128, 64)
    2
    """
    if group_size < 4 or group_size % 4 or channels % group_size:
        raise ParameterError(
            f"group size {group_size} does not fit head dimension {channels}: need a multiple of 4 that divides it, "
            f"such as {default_group_size(channels)}"
        )
    return channels // group_size


@dataclass(frozen=True)
class AffineCode:
    """Encoded groups of ``[*streams, tokens, channels]``.

    Attributes:
        codes: uint8 ``[*streams, tokens, channels / 4]``, packed.
        scales: E4M3 ``[*streams, tokens, channels / G]``.
        zero_points: uint8 ``[*streams, ceil(tokens * channels / G / 4)]``, packed row-major over (token, group);
            neighbouring tokens may share a byte.
        super_scale: FP32 ``[*streams]``.
    """

    codes: UInt8[np.ndarray, "*streams tokens quads"]
    scales: Float8e4m3fn[np.ndarray, "*streams tokens groups"]
    zero_points: UInt8[np.ndarray, "*streams packed"]
    super_scale: Float32[np.ndarray, "*streams"]


def group_range(
    values: Float[np.ndarray, "*lead channels"], group_size: int
) -> tuple[Float[np.ndarray, "*lead groups"], Float[np.ndarray, "*lead groups"]]:
    """Lowest and highest value of each group, zero included.

    >>> group_range(np.float32([1, 2, 3, 4, -1, 0, 1, 5]), 4)
    (array([ 0., -1.], dtype=float32), array([4., 5.], dtype=float32))
    """
    groups = values.reshape(*values.shape[:-1], -1, group_size)
    zero = np.float32(0)
    return np.minimum(groups.min(axis=-1), zero), np.maximum(groups.max(axis=-1), zero)


def check_scale_candidates(candidates: int) -> None:
    """Raise :class:`ParameterError` unless so many of :data:`FRACTIONS` can be tried.

    >>> check_scale_candidates(3)
    """
    if not 1 <= candidates <= len(FRACTIONS):
        raise ParameterError(f"scale candidates {candidates}: need 1 (the full range) to {len(FRACTIONS)}")


def encode_groups(
    groups: Float32[np.ndarray, "*streams rows columns size"], scale_candidates: int = 1
) -> tuple[
    UInt8[np.ndarray, "*streams rows columns size"],
    Float8e4m3fn[np.ndarray, "*streams rows columns"],
    UInt8[np.ndarray, "*streams rows columns"],
    Float32[np.ndarray, "*streams"],
]:
    """Quantize values whose groups lie along the last axis; the streams share no scale.

    Args:
        groups: FP32, finite.
        scale_candidates: How many of :data:`FRACTIONS` compete for each scale; ties go to the larger one.

    Returns:
        codes and zero-points (uint8, 0 to 3, not yet packed), E4M3 scales, FP32 super-scale.

    Raises:
        DomainError: A value is NaN or infinite, or the range of a group is.
    """
    zero = np.float32(0)
    low, high = np.minimum(groups.min(axis=-1), zero), np.maximum(groups.max(axis=-1), zero)
    span = (high - low) / np.float32(LEVELS)
    super_scale = scales.super_scale_of(span)
    codes, stored, zero_points = _on_grid(groups, low, span, super_scale)
    if scale_candidates == 1:
        return codes, stored, zero_points, super_scale
    lost = _squared_error(groups, codes, stored, zero_points, super_scale)
    for fraction in np.array(FRACTIONS[1:scale_candidates], np.float32):
        other = _on_grid(groups, low * fraction, span * fraction, super_scale)
        other_lost = _squared_error(groups, *other, super_scale)
        better = other_lost < lost
        lost = np.where(better, other_lost, lost)
        codes = np.where(better[..., None], other[0], codes)
        stored, zero_points = np.where(better, other[1], stored), np.where(better, other[2], zero_points)
    return codes, stored, zero_points, super_scale


def _on_grid(
    groups: np.ndarray, low: np.ndarray, span: np.ndarray, super_scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, stored scales and zero-points of groups whose grid starts at ``low`` and has steps of ``span``."""
    stored = scales.store(span, super_scale)
    step = scales.decode(stored, super_scale)
    divisor = np.where(step > 0, step, np.float32(1))  # an all-zero group: any divisor gives code = zero-point = 0
    zero_points = np.clip(np.rint(-low / divisor), 0, LEVELS)
    codes = np.clip(np.rint(groups / divisor[..., None]) + zero_points[..., None], 0, LEVELS)
    return codes.astype(np.uint8), stored, zero_points.astype(np.uint8)


def _squared_error(
    groups: np.ndarray, codes: np.ndarray, stored: np.ndarray, zero_points: np.ndarray, super_scale: np.ndarray
) -> np.ndarray:
    """Of each group, in units of the super-scale's power of two, so that squares neither overflow nor vanish."""
    exponent = np.frexp(super_scale)[1][..., None, None]
    difference = groups - decode_groups(codes, stored, zero_points, super_scale)
    lost: np.ndarray = np.square(np.ldexp(difference, -exponent[..., None])).sum(axis=-1)
    return lost


def decode_groups(
    codes: UInt8[np.ndarray, "*streams rows columns size"],
    stored: Float8e4m3fn[np.ndarray, "*streams rows columns"],
    zero_points: UInt8[np.ndarray, "*streams rows columns"],
    super_scale: Float32[np.ndarray, "*streams"],
) -> Float32[np.ndarray, "*streams rows columns size"]:
    """Inverse of :func:`encode_groups` up to quantization: ``(code - z) * s'``."""
    step = scales.decode(stored, super_scale)
    signed = codes.view(np.int8) - zero_points[..., None].view(np.int8)
    return signed.astype(np.float32) * step[..., None]


def encode(
    values: Float32[np.ndarray, "*streams tokens channels"], group_size: int, scale_candidates: int = 1
) -> AffineCode:
    """Quantize FP32 values to 2 bits in groups of consecutive channels of a token.

    Args:
        values: FP32 ``[*streams, tokens, channels]``, finite.
        group_size: Channels that share a scale; a multiple of 4 that divides ``channels``.
        scale_candidates: How many of :data:`FRACTIONS` compete for each scale.

    Raises:
        ParameterError: The group size does not fit.
        DomainError: A value is NaN or infinite, or the range of a group is.

    >>> code = encode(np.float32([[[0.0, 1.0, 2.0, 3.0]]]), 4)
    >>> packing.unpack(code.codes, 4), code.scales.astype(np.float32) * code.super_scale
    (array([[[0, 1, 2, 3]]], dtype=uint8), array([[[1.]]], dtype=float32))
    """
    groups = check_group_size(values.shape[-1], group_size)
    grouped = values.reshape(*values.shape[:-1], groups, group_size)
    codes, stored, zero_points, super_scale = encode_groups(grouped, scale_candidates)
    flat_zero_points = zero_points.reshape(*super_scale.shape, -1)
    return AffineCode(packing.pack(codes.reshape(values.shape)), stored, packing.pack(flat_zero_points), super_scale)


def decode(
    code: AffineCode, start: int = 0, stop: int | None = None
) -> Float32[np.ndarray, "*streams tokens channels"]:
    """Reconstruct tokens ``start`` to ``stop`` (end by default) in FP32.

    >>> decode(encode(np.float32([[[0.0, 1.0, 2.0, 3.0]]]), 4))
    array([[[0., 1., 2., 3.]]], dtype=float32)
    """
    tokens, groups = code.scales.shape[-2:]
    stop = tokens if stop is None else stop
    channels = code.codes.shape[-1] * packing.CODES_PER_BYTE
    codes = packing.unpack(code.codes[..., start:stop, :], channels)
    zero_points = unpack_rows(code.zero_points, groups, start, stop)
    grouped = codes.reshape(*zero_points.shape, channels // groups)
    return decode_groups(grouped, code.scales[..., start:stop, :], zero_points, code.super_scale).reshape(codes.shape)


def unpack_rows(
    packed: UInt8[np.ndarray, "*streams packed"], columns: int, start: int, stop: int
) -> UInt8[np.ndarray, "*streams tokens columns"]:
    """Rows ``start`` to ``stop`` of a row-major 2-bit matrix whose rows may begin inside a byte.

    >>> unpack_rows(packing.pack(np.uint8([[0, 1, 2, 3, 1, 1]])), 2, 1, 3)
    array([[[2, 3],
            [1, 1]]], dtype=uint8)
    """
    first, last = start * columns, stop * columns
    first_byte = first // packing.CODES_PER_BYTE
    part = packed[..., first_byte : packing.packed_size(last)]
    codes = packing.unpack(part, part.shape[-1] * packing.CODES_PER_BYTE)
    offset = first - first_byte * packing.CODES_PER_BYTE
    return codes[..., offset : offset + last - first].reshape(*packed.shape[:-1], stop - start, columns)


explain_errors(globals())
