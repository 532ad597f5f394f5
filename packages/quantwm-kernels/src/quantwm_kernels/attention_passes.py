"""Tables that lead attention over a packed cache: which tokens of which tensors each program attends to.

A table begins with four words per program along the third axis of the grid (:class:`Leading`). They point to entries of
four words: offsets of a key row and a value row, first token, end. Rows follow: sealed ones are those of
:mod:`quantwm_kernels.recipe`, that of a plain tensor is its address and its strides by batch, head and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_kernels.launch import Launch
from quantwm_kernels.reading import Piece
from quantwm_kernels.reading_batches import check_tables
from quantwm_kernels.recipe import Form, Recipe, Row, merged

WORDS_PER_ENTRY = 4


class Plain(NamedTuple):
    """A plain tensor to a kernel: address, tokens, and strides by batch, head and token."""

    address: int
    tokens: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Plain:
        """Describe BF16 ``[B, H, n, D]`` with consecutive channels."""
        return cls(tensor.data_ptr(), tensor.shape[2], tensor.stride()[:3])


class Item(NamedTuple):
    """Tokens ``start`` to ``stop`` of keys and values, whose rows these are."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    start: int
    stop: int


class Leading(IntEnum):
    """Words that lead a program: where its entries begin and end, sealed ones first."""

    SEALED_BEGIN = 0
    SEALED_END = 1
    EXACT_BEGIN = 2
    EXACT_END = 3


@dataclass(frozen=True)
class Pass:
    """What one launch attends to.

    Attributes:
        keys, values: What is compiled in.
        table: int64, as the module says.
        parts: Among how many programs the tokens are divided.
        eight: Whether eight channels at a time can be decoded.
        aligned: Whether the arrays are.
        launch: Sizes and warps.
        prepared: Compile-time arguments, filled by the launcher.
    """

    keys: Recipe
    values: Recipe
    table: Tensor
    parts: int
    eight: bool
    aligned: bool
    launch: Launch
    prepared: dict[tuple[bool, bool, bool], dict[str, int]] = field(default_factory=dict, compare=False, repr=False)


def passes(
    pieces: Sequence[Piece],
    plain: Sequence[tuple[Plain, Plain]],
    channels: tuple[int, int],
    wanted: int,
    device: torch.device,
    launch: Launch,
) -> tuple[Pass, ...]:
    """Sort tokens into launches: one for each kind of unit, the last of which takes the plain ones too.

    Args:
        pieces: Ranges of sealed units.
        plain: Keys and values.
        channels: Head dimensions of keys and of values.
        wanted: Programs that each block of queries should be divided among.
        device: Where the arrays are and the tables go.
        launch: Launch parameters.

    Raises:
        StateError, DeviceError: As :func:`quantwm_kernels.reading_batches.check_tables`.
    """
    units = [(piece.chunk.keys.row, piece.chunk.values.row, piece) for piece in pieces if piece.stop > piece.start]
    check_tables([row for unit in units for row in unit[:2]], device)
    recipes = (merged([keys.recipe for keys, _, _ in units]), merged([values.recipe for _, values, _ in units]))
    groups: dict[tuple[Recipe, Recipe], list[tuple[Row, Row, Piece]]] = {}
    for kind, unit in zip(zip(*recipes, strict=True), units, strict=True):
        groups.setdefault(kind, []).append(unit)
    groups = groups or {(Recipe(Form.EXACT, channels[0]), Recipe(Form.EXACT, channels[1])): []}
    rest = [
        Item((keys.address, *keys.strides), (values.address, *values.strides), 0, keys.tokens) for keys, values in plain
    ]
    block = launch.blocks["BLOCK_TOKENS"]
    every = sum(_tiles(piece.stop - piece.start, block) for _, _, piece in units) + _count(rest, block)
    made = []
    for number, (kinds, members) in enumerate(groups.items(), start=1):
        sealed = [Item(keys.words, values.words, piece.start, piece.stop) for keys, values, piece in members]
        own = rest if number == len(groups) else []
        tiles = _count([*sealed, *own], block)
        parts = max(1, min(wanted * tiles // max(every, 1), tiles // launch.least_tiles))
        table = torch.tensor(_table(sealed, own, parts, block), dtype=torch.int64).to(device, non_blocking=True)
        aligned = all(keys.aligned and values.aligned for keys, values, _ in members)
        made.append(Pass(*kinds, table, parts, all(kind.eight for kind in kinds), aligned, launch))
    return tuple(made)


def _count(items: Sequence[Item], block: int) -> int:
    return sum(_tiles(item.stop - item.start, block) for item in items)


def _tiles(tokens: int, block: int) -> int:
    return -(-tokens // block)


def _table(sealed: Sequence[Item], plain: Sequence[Item], parts: int, block: int) -> list[int]:
    """Words of a table: leading ones, entries, rows."""
    items = (*sealed, *plain)
    shares = shared([item.stop - item.start for item in items], parts, block)
    entries_begin = parts * len(Leading)
    begin = entries_begin + WORDS_PER_ENTRY * sum(map(len, shares))
    rows: list[int] = []
    places = []
    for keys, values, _, _ in items:
        places.append((begin + len(rows), begin + len(rows) + len(keys)))
        rows += (*keys, *values)
    leads: list[int] = []
    entries: list[int] = []
    for share in shares:
        here = entries_begin + len(entries)
        between = here + WORDS_PER_ENTRY * sum(item < len(sealed) for item, _, _ in share)
        leads += (here, between, between, here + WORDS_PER_ENTRY * len(share))
        for item, first, stop in share:
            start = items[item].start
            entries += (*places[item], start + first, start + stop)
    return leads + entries + rows


def shared(lengths: Sequence[int], parts: int, block: int) -> list[list[tuple[int, int, int]]]:
    """Deal out tiles of ``block`` tokens of several items evenly and in order.

    Returns:
        For each part ``(item, first token, end)``.

    >>> shared([20, 5], 2, block=8)
    [[(0, 0, 16)], [(0, 16, 20), (1, 0, 5)]]
    """
    tiles = [_tiles(length, block) for length in lengths]
    total = sum(tiles)
    shares = []
    for part in range(parts):
        low, high = part * total // parts, (part + 1) * total // parts
        share, passed = [], 0
        for item, count in enumerate(tiles):
            begin, end = max(low - passed, 0), min(high - passed, count)
            if begin < end:
                share.append((item, begin * block, min(end * block, lengths[item])))
            passed += count
        shares.append(share)
    return shares
