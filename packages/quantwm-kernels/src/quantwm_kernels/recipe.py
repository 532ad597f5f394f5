"""How a kernel reads a sealed tensor: what is compiled into it, and the row of numbers that it finds at run time.

A read may touch many units of two tensors in one launch. What they have in common, the :class:`Recipe`, becomes part of
the kernel; what differs, sizes and addresses, stands in a row of int64 per unit, laid out as :class:`Field` says.
:func:`quantwm_kernels.description.describe` makes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import torch

from quantwm_core.integer_table import EXACT_BITS

READABLE = ("bf16", "kivi", "klt", "kvtc", "oscar", "quantwm", "qvg", "rtn")
"""Methods whose arrays the kernels understand; those of other distributions are read on the CPU."""

TRANSFORMS = ("klt", "kvtc")
"""Methods that are transform codes."""


class Form(IntEnum):
    """How a tensor's elements are stored, centroids and compensation aside."""

    EXACT = 0
    AFFINE = 1
    SYMMETRIC = 2
    CHANNEL_AFFINE = 3
    MINMAX = 4
    CHANNEL_MINMAX = 5
    TRANSFORM = 6
    ROTATED = 7


PRODUCTS = (Form.TRANSFORM, Form.ROTATED)
"""Forms whose tokens are products of numbers and a matrix."""


GROUPED = (Form.AFFINE, Form.SYMMETRIC)
"""Forms whose channels share scales in groups, and which may have centroids and compensation."""


class Steps(IntEnum):
    """How the steps of PSAC coefficients may be stored: INT8 of all streams dense, of each dense or sparse, or INT4."""

    DENSE = 0
    EITHER = 1
    NIBBLES = 2


class Field(IntEnum):
    """Words of a row: tokens of the unit and the range to read, then addresses, 0 where the unit has no such array.

    ``SHIFT`` is where token 0 of the unit would lie in the workspace. Each stage of centroids has four more words
    after ``STAGES``: addresses of index and centroids, the rows of the latter, and the address of their scales. There a
    transform code has the words of :class:`Place` of each stream instead; its arrays take the fields of others that it
    does not have.
    """

    TOKENS = 0
    STOP = 1
    SHIFT = 2
    CODES = 3
    SCALES = 4
    ZERO_POINTS = 5
    SUPER_SCALE = 6
    BASIS = 7
    COEFFICIENT_SCALES = 8
    COEFFICIENTS = 9
    LAYOUT = 10
    BITMAP = 11
    SPARSE_VALUES = 12
    SPARSE_COUNTS = 13
    DENSE_STREAMS = 14
    SPARSE_STREAMS = 15
    SPARSE_SIZE = 16
    STAGES = 17
    STEPS = 4
    MEANS = 5
    SHARED_BASIS = 7
    SHARED_BASIS_SCALES = 8
    ORDER = 9


class Place(IntEnum):
    """Words of a stream of a transform code: where its parts begin in arrays of all streams, and how many there are."""

    CODE_BYTE = 0
    DIRECTION = 1
    BASIS_ROW = 2
    BASIS_ROWS = 3
    EIGHT = 4
    FOUR = 5
    TWO = 6


WORDS_PER_STREAM = len(Place)
WORDS_PER_STAGE = 4
FEWEST_DIRECTIONS = 32
"""No matrix unit takes fewer columns of an operand: four threads share a row, and Triton gives each eight where codes are bytes."""
FEWEST_DIGITS = 64
"""Digits of two bits of a transform code that four threads take a word each of."""
VECTOR_NBYTES = 16
"""Widest load and store of a GPU's thread; what is aligned to it moves in the fewest of them."""


@dataclass(frozen=True)
class Recipe:
    """What is compiled into a kernel.

    Attributes:
        form: How elements are stored.
        channels: Head dimension.
        group: Channels per scale, or tokens where the form says so; 1 where there is no scale. Of a transform code, directions
            whose codes can be read at once.
        stages: Codebooks that are added up.
        rank: Directions of PSAC, or of a transform code's matrix, of these a power of two; 0 without it.
        steps: How coefficients may be stored.
        centroid_bits: Of an entry of a codebook, 16 (BF16), 8 or 4.
    """

    form: Form
    channels: int
    group: int = 1
    stages: int = 0
    rank: int = 0
    steps: Steps = Steps.DENSE
    centroid_bits: int = EXACT_BITS

    @property
    def eight(self) -> bool:
        """Whether eight channels at a time can be decoded, because they never straddle a group."""
        return self.channels % 8 == 0 and (self.form not in GROUPED or self.group % 8 == 0)


class Row(NamedTuple):
    """A sealed tensor to a kernel: recipe, batch and heads, and the numbers of :class:`Field` without a range.

    ``aligned`` says whether vectors of :data:`VECTOR_NBYTES` can be read from it.
    """

    recipe: Recipe
    streams: tuple[int, int]
    words: tuple[int, ...]
    aligned: bool
    device: torch.device


def merged(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Let units share a recipe where their rows say the rest.

    Those without compensation, such as the first, share that of those with it; transform codes that of the most directions, of
    which no more are read at once than in any.
    """
    if not recipes or recipes.count(recipes[0]) == len(recipes):  # as nearly always
        return list(recipes)
    transforms = [recipe for recipe in recipes if recipe.form is Form.TRANSFORM]
    most = max((recipe.rank for recipe in transforms), default=0)
    together = min((recipe.group for recipe in transforms), default=1)
    recipes = [
        replace(recipe, rank=most, group=together) if recipe.form is Form.TRANSFORM else recipe for recipe in recipes
    ]
    ranks = {recipe.rank for recipe in recipes if recipe.rank and recipe.form not in PRODUCTS}
    if len(ranks) != 1:
        return recipes
    (rank,) = ranks
    ways = {recipe.steps for recipe in recipes if recipe.rank}
    if Steps.NIBBLES in ways and len(ways) > 1:  # INT4 and INT8 are read by different instructions
        return recipes
    return [replace(each, rank=rank, steps=max(ways)) if each.form in GROUPED else each for each in recipes]
