"""Two sums whose ratio is a figure, kept apart so that it can be taken over any layers, heads, reads, ages or positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float64

Grid: TypeAlias = Float64[np.ndarray, "layers heads bins"]


def share(
    part: Float64[np.ndarray, "..."], whole: Float64[np.ndarray, "..."], axis: int | tuple[int, ...] | None = None
) -> Any:
    """Sum of ``part`` over sum of ``whole``, NaN where the latter is zero.

    >>> share(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[2.0, 0.0], [2.0, 0.0]]), axis=0)
    array([0.5, nan])
    """
    above, below = part.sum(axis), whole.sum(axis)
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)


def _nothing() -> Grid:
    return np.zeros((0, 0, 0))


@dataclass(frozen=True)
class Tally:
    """Sums of one video.

    Attributes:
        part: Numerator ``[layers, heads, reads]``.
        whole: Denominator of the same shape; zero where nothing was sealed yet.
        part_by_age: Numerator ``[layers, heads, ages]``; empty where the figure does not split over tokens.
        whole_by_age: Denominator of that shape.
        part_by_position: Numerator ``[layers, heads, positions]``; empty likewise.
        whole_by_position: Denominator of that shape.

    >>> Tally(np.ones((1, 1, 2)), np.full((1, 1, 2), 4.0)).ratio()
    0.25
    """

    part: Grid
    whole: Grid
    part_by_age: Grid = field(default_factory=_nothing)
    whole_by_age: Grid = field(default_factory=_nothing)
    part_by_position: Grid = field(default_factory=_nothing)
    whole_by_position: Grid = field(default_factory=_nothing)

    def ratio(self) -> float:
        """Over everything; NaN where nothing was sealed."""
        return float(share(self.part, self.whole))

    def over_reads(self) -> Float64[np.ndarray, " reads"]:
        """By read, over layers and heads."""
        return np.asarray(share(self.part, self.whole, (0, 1)))

    def over_heads(self) -> Float64[np.ndarray, "layers heads"]:
        """By layer and head, over reads."""
        return np.asarray(share(self.part, self.whole, 2))

    def over_ages(self) -> Float64[np.ndarray, " ages"]:
        """By age of the token, over layers, heads and reads; empty where the figure does not split."""
        return np.asarray(share(self.part_by_age, self.whole_by_age, (0, 1)))

    def over_positions(self) -> Float64[np.ndarray, " positions"]:
        """By position of the token, over layers, heads and reads; empty where the figure does not split."""
        return np.asarray(share(self.part_by_position, self.whole_by_position, (0, 1)))
