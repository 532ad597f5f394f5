"""Bytes of a sealed unit by formula: the storage table of the format, one function per tensor.

The formula and the arrays of a sealed chunk give the same number; a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantwm_core import affine, allocation, codebook, integer_table, psac
from quantwm_core.arguments import explain_errors
from quantwm_core.packing import packed_size

BITS_PER_BYTE = 8


def clustered_nbytes(tokens: int, channels: int, group_size: int, centroids: int, centroid_bits: int = 16) -> int:
    """Bytes of one stream's residual codes, scales, zero-points, index, centroids and super-scale.

    Args:
        tokens: ``N`` of the unit.
        channels: Head dimension ``D``.
        group_size: Channels per group ``G``.
        centroids: Codebook size ``C``; at most ``N`` rows are stored.
        centroid_bits: Of an entry of the codebook.

    >>> clustered_nbytes(29640, 128, 64, 256)
    1117760
    """
    groups = affine.check_group_size(channels, group_size) * tokens
    table = integer_table.table_size(min(centroids, tokens), channels, centroid_bits)
    return packed_size(tokens * channels) + groups + packed_size(groups) + tokens + table + 4


def psac_nbytes(tokens: int, channels: int, rank: int, bits: int = 8) -> int:
    """Bytes of one stream's basis, dense coefficients and coefficient scales.

    >>> psac_nbytes(29640, 128, 8)
    239184
    """
    return 2 * channels * rank + psac.dense_size(tokens, rank, bits) + 2 * rank


def quantwm_nbytes(
    tokens: int,
    channels: int,
    group_size: int | None = None,
    centroids: int | None = None,
    rank: int = 8,
    coefficient_bits: int = 8,
    centroid_bits: int = 16,
) -> tuple[int, int]:
    """Bytes of one stream's keys and values under the ``quantwm`` method, from the second unit on.

    >>> keys, values = quantwm_nbytes(29640, 128)
    >>> round(2 * 2 * 29640 * 128 / (keys + values), 2)
    6.13
    """
    size = affine.default_group_size(channels) if group_size is None else group_size
    rows = codebook.default_size(tokens, centroid_bits) if centroids is None else centroids
    values = clustered_nbytes(tokens, channels, size, rows, centroid_bits)
    return values + (psac_nbytes(tokens, channels, rank, coefficient_bits) if rank else 0), values


def transform_nbytes(tokens: int, channels: int, counts: Sequence[int], directions: int) -> tuple[int, int]:
    """Bytes of one stream under a transform code: of the unit alone, and of the basis that units share.

    Args:
        tokens: ``N`` of the unit.
        channels: Head dimension ``D``.
        counts: Blocks of eight directions that get 8, 4 and 2 bits.
        directions: Directions in the basis, a multiple of eight.

    >>> own, shared = transform_nbytes(29640, 128, (1, 4, 4), 72)
    >>> round(2 * 29640 * 128 / (own + shared), 2)
    7.92
    """
    coded = allocation.directions(counts)
    own = tokens * allocation.token_bytes(counts) + len(counts) + 3 * coded + 2 * channels
    return own, directions * (channels + 2) + 1


def transform_most_nbytes(tokens: int, channels: int, token_bytes: int) -> int:
    """Bytes of one stream, basis included, where as many directions as possible share a token's bytes.

    >>> transform_most_nbytes(29640, 128, 32)
    965764
    """
    blocks = min(channels // allocation.BLOCK, token_bytes // 2)
    own, shared = transform_nbytes(tokens, channels, (0, 0, blocks), allocation.BLOCK * blocks)
    return own + shared + tokens * (token_bytes - 2 * blocks)


def bits_per_element(nbytes: int, tokens: int, channels: int) -> float:
    """Bits an element of one stream's tensor.

    >>> bits_per_element(64, 2, 128)
    2.0
    """
    return BITS_PER_BYTE * nbytes / (tokens * channels)


def rank_increment(tokens: int, channels: int, low: int, high: int) -> float:
    """Bits an element that a higher PSAC rank costs, as a mean over keys and values (the paper's rank sweep).

    Two chunks of three frames of Causal-Forcing, and of four frames of HY-World 1.5 with both halves as one stream:

    >>> round(rank_increment(9360, 128, 8, 16), 4), round(rank_increment(7040, 256, 8, 16), 4)
    (0.2569, 0.1341)
    """
    extra = psac_nbytes(tokens, channels, high) - psac_nbytes(tokens, channels, low)
    return bits_per_element(extra, tokens, channels) / 2


explain_errors(globals())
