"""How many bits each direction of a transform code gets: reverse water-filling over blocks of eight directions.

The blocks of a stream come in order of their *energy*, what losing them would cost. A block is coded with 0, 2, 4 or 8
bits a direction, so a token is a whole number of bytes, and more energy never gets fewer bits: three numbers say it all,
how many blocks have 8, 4 and 2 bits (:data:`CODED_WIDTHS`). A width leaves the share :data:`DISTORTION` of an energy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from quantwm_core.arguments import explain_errors
from quantwm_core.domain import check_finite
from quantwm_core.errors import DomainError, ParameterError, ShapeError

BLOCK = 8
"""Directions of a block; with ``w`` bits a direction they take ``w`` bytes a token."""

CODED_WIDTHS = (8, 4, 2)
DISTORTION = {0: 1.0, 2: 0.1189, 4: 0.01155, 8: 8.774e-5}
"""Mean squared error of the best uniform quantizer for a normal variable of variance 1, by width."""

_STEPS = ((0, 2), (2, 4), (4, 8))


class _Rise(NamedTuple):
    """A block of a stream goes up to the next width: what a byte of that is worth, and which one it is."""

    worth: float
    level: int
    stream: int
    block: int


def check_channels(channels: int, name: str = "a transform code") -> None:
    """Raise :class:`ShapeError` for a head dimension that is no whole number of blocks, as ``name`` needs.

    >>> check_channels(128)
    """
    if channels % BLOCK:
        raise ShapeError(f"head dimension {channels}: {name} needs a multiple of {BLOCK}")


def budget(bits: float, channels: int) -> int:
    """Bytes of a token's codes: ``bits`` an element at most, and an even number.

    Raises:
        ShapeError: The head dimension is no whole number of blocks.
        ParameterError: That is not a single block of two bits, or no finite number.

    >>> budget(2.0, 128), budget(1.25, 80)
    (32, 12)
    """
    check_channels(channels)
    nbytes = bits * channels / 8
    if not 2 <= nbytes < math.inf:
        raise ParameterError(
            f"{bits} bits an element of head dimension {channels}: need {BLOCK * CODED_WIDTHS[-1] / channels}, "
            f"two bits for {BLOCK} directions"
        )
    return int(nbytes) // 2 * 2


def token_bytes(counts: Sequence[int] | UInt8[np.ndarray, "3"]) -> int:
    """Bytes of a token whose blocks of 8, 4 and 2 bits are so many.

    >>> token_bytes((1, 2, 3))
    22
    """
    return sum(width * int(count) for width, count in zip(CODED_WIDTHS, counts, strict=True))


def directions(counts: Sequence[int] | UInt8[np.ndarray, "3"]) -> int:
    """Directions that get bits.

    >>> directions((1, 2, 3))
    48
    """
    return BLOCK * sum(int(count) for count in counts)


def widths(counts: Sequence[int] | UInt8[np.ndarray, "3"]) -> Int64[np.ndarray, " directions"]:
    """Bits of each direction that gets any.

    >>> widths((1, 0, 1)).tolist()
    [8, 8, 8, 8, 8, 8, 8, 8, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    return np.repeat(np.array(CODED_WIDTHS), BLOCK * np.asarray(counts, np.int64))


def water_fill(
    energies: Sequence[Float64[np.ndarray, " _blocks"]], nbytes: int, tolerance: float = 0.0, least: float = 0.0
) -> UInt8[np.ndarray, "streams 3"]:
    """Give bytes, one rise of a block after the other, where a byte takes most off the distortion.

    Args:
        energies: Of each stream that the bytes are shared by, blocks in descending order.
        nbytes: Bytes of a token of all streams together; all are spent if they can be.
        tolerance: Stop before that, but not without a block, once the distortion is this share of the energy.
        least: Likewise, once a byte takes less than this off the distortion.

    Returns:
        Blocks of 8, 4 and 2 bits, uint8 ``[streams, 3]``.

    Raises:
        DomainError: An energy is NaN or infinite.

    >>> water_fill([np.array([100.0, 1.0])], 6)
    array([[0, 1, 1]], dtype=uint8)
    >>> water_fill([np.array([100.0, 90.0]), np.array([1.0, 0.5])], 8)
    array([[0, 2, 0],
           [0, 0, 0]], dtype=uint8)
    """
    rises = sorted(_rises(energies), key=lambda rise: (-rise.worth, *rise[1:]))
    reached = np.zeros((len(energies), len(_STEPS)), np.int64)  # blocks that have at least 2, 4, 8 bits
    left = sum(float(each.sum()) for each in energies)
    if not math.isfinite(left):
        raise DomainError(f"energies: {left} in all; need finite ones")
    allowed, spent = tolerance * left, 0
    for worth, level, stream, block in rises:
        if spent and (worth < least or (left <= allowed and tolerance > 0)):
            break
        low, high = _STEPS[level]
        fits = spent + high - low <= nbytes and reached[stream, level] == block
        if fits and (level == 0 or reached[stream, level - 1] > block):
            reached[stream, level] += 1
            spent += high - low
            left -= worth * (high - low)
    return _counts(reached)


def dynamic(energies: Float64[np.ndarray, " blocks"], nbytes: int) -> UInt8[np.ndarray, "3"]:
    """The best of all allocations of one stream, by dynamic programming (KVTC, arXiv 2511.01815).

    Args:
        energies: Blocks in descending order.
        nbytes: Bytes of a token.

    Raises:
        DomainError: An energy is NaN or infinite.

    >>> dynamic(np.array([100.0, 1.0]), 6)
    array([0, 1, 1], dtype=uint8)
    """
    check_finite(energies, "energies")
    choices = (0, *reversed(CODED_WIDTHS))
    least = np.zeros(nbytes + 1)  # distortion of the blocks so far, by bytes that they may take
    chosen = []
    for energy in energies:
        options = np.full((len(choices), nbytes + 1), np.inf)
        for row, width in zip(options, choices, strict=True):
            if width <= nbytes:
                row[width:] = least[: nbytes + 1 - width] + energy * DISTORTION[width]
        # A tie goes to more bits, so that a block without energy takes what nobody needs.
        pick = len(choices) - 1 - options[::-1].argmin(axis=0)
        least = options[pick, np.arange(nbytes + 1)]
        chosen.append(pick)
    taken, left = [], nbytes
    for pick in reversed(chosen):
        taken.append(choices[pick[left]])
        left -= taken[-1]
    return np.array([taken.count(width) for width in CODED_WIDTHS], np.uint8)


def distortion(energies: Float64[np.ndarray, " blocks"], counts: UInt8[np.ndarray, "3"]) -> float:
    """What an allocation leaves of the energy of a stream's blocks.

    >>> round(distortion(np.array([100.0, 1.0]), np.uint8([0, 1, 1])), 4)
    1.2739
    """
    coded = widths(counts)[::BLOCK]
    left = [DISTORTION[int(width)] for width in coded]
    return float(energies[: len(left)] @ np.array(left) + energies[len(left) :].sum())


def _rises(energies: Sequence[Float64[np.ndarray, " _blocks"]]) -> list[_Rise]:
    return [
        _Rise(float(energy) * (DISTORTION[low] - DISTORTION[high]) / (high - low), level, stream, block)
        for stream, blocks in enumerate(energies)
        for block, energy in enumerate(blocks)
        for level, (low, high) in enumerate(_STEPS)
    ]


def _counts(reached: Int64[np.ndarray, "streams 3"]) -> UInt8[np.ndarray, "streams 3"]:
    two, four, eight = reached.T
    return np.stack([eight, four - eight, two - four], axis=1).astype(np.uint8)


explain_errors(globals())
