"""Tables that lead a read: which tokens of which sealed tensors each program of a launch reconstructs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantwm_core.errors import DeviceError, StateError
from quantwm_core.integer_table import EXACT_BITS
from quantwm_kernels.launch import LAUNCHES, Launch, check_available, processors
from quantwm_kernels.recipe import GROUPED, PRODUCTS, Field, Form, Recipe, Row, Steps, merged

NARROW, FEW_DIRECTIONS = 128, 16
"""Head dimension of which a tile fits into a processor's threads, and rank up to which they can do with few registers."""


class Part(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sealed tensor, counted inside it, and the workspace's token where they begin."""

    row: Row
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class Batch:
    """What one launch reads.

    Attributes:
        keys, values: What is compiled in.
        batch, heads: Streams.
        table: int64: a word per program, ``row << 32 | first token``, then the rows.
        key_programs, programs: Programs per stream for keys, and in all.
        span: Tokens of a program.
        eight: Whether eight channels at a time can be decoded.
        aligned: Whether the arrays are.
        launch: Sizes and warps.
        again: What launches it into the workspace of last time, by where that lies, filled by the launcher.
    """

    keys: Recipe
    values: Recipe
    batch: int
    heads: int
    table: Tensor
    key_programs: int
    programs: int
    span: int
    eight: bool
    aligned: bool
    launch: Launch
    again: dict[Hashable, Callable[[], object]] = field(default_factory=dict, compare=False, repr=False)


def batches(
    keys: Sequence[Part], values: Sequence[Part], device: torch.device, launch: Launch | None = None
) -> tuple[Batch, ...]:
    """Sort parts into launches: usually one.

    Args:
        keys, values: Parts of the same units in the same order; ``values`` may be empty.
        device: Where the arrays are and the table goes.
        launch: Launch parameters.

    Returns:
        Nothing at all where there is no token to read.

    Raises:
        StateError: A CUDA graph is being captured: the table cannot be copied then.
        DeviceError: There is no Triton, or the arrays live elsewhere.
    """
    if not any(part.stop > part.start for part in (*keys, *values)):
        return ()
    check_tables([part.row for part in (*keys, *values)], device)
    key_recipes = merged([part.row.recipe for part in keys])
    value_recipes = merged([part.row.recipe for part in values]) or key_recipes
    groups: dict[tuple[Recipe, Recipe], list[int]] = {}
    for number, pair in enumerate(zip(key_recipes, value_recipes, strict=True)):
        groups.setdefault(pair, []).append(number)
    made = []
    for (key_recipe, value_recipe), members in groups.items():
        chosen_parts = [[parts[number] for number in members] if parts else [] for parts in (keys, values)]
        made.append(_batch(key_recipe, value_recipe, chosen_parts[0], chosen_parts[1], device, launch))
    return tuple(batch for batch in made if batch.programs)


def check_tables(rows: Iterable[Row], device: torch.device) -> None:
    """Refuse to make a table where it cannot serve.

    Raises:
        StateError: A CUDA graph is being captured: the table cannot be copied then.
        DeviceError: There is no Triton, or the arrays live elsewhere.
    """
    check_available("workspace")
    if strangers := {row.device for row in rows} - {device}:
        raise DeviceError(
            f"the kernel runs on {device}, sealed arrays live on {sorted(map(str, strangers))}; move one to the other"
        )
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise StateError(
            "a CUDA graph is being captured and this call has no table yet; make it once before the capture"
        )


def launch_of(*recipes: Recipe) -> Launch:
    """How a read of tensors of these recipes is launched."""
    wide = any(each.channels > NARROW for each in recipes)
    if any(each.form in PRODUCTS for each in recipes):
        return LAUNCHES["read_product_wide" if wide else "read_product"]
    if not any(each.form in GROUPED for each in recipes):
        return LAUNCHES["read"]
    if any(each.rank > FEW_DIRECTIONS or each.steps is Steps.EITHER for each in recipes):
        return LAUNCHES["read_groups"]
    if wide:
        return LAUNCHES["read_groups_wide"]
    light = all(each.form is Form.SYMMETRIC or each.centroid_bits != EXACT_BITS for each in recipes)
    return LAUNCHES["read_light" if light else "read_groups"]


def _batch(
    key_recipe: Recipe,
    value_recipe: Recipe,
    keys: Sequence[Part],
    values: Sequence[Part],
    device: torch.device,
    launch: Launch | None,
) -> Batch:
    batch, heads = keys[0].row.streams
    if launch is None:
        launch = launch_of(key_recipe, value_recipe)
    parts = [*keys, *values]
    span = _span(parts, batch * heads, device, launch)
    counts = [-(-(part.stop - part.start) // span) for part in parts]
    table = torch.from_numpy(_table(parts, counts, span)).to(device, non_blocking=True)
    recipes = (key_recipe, value_recipe)
    return Batch(
        *recipes,
        batch,
        heads,
        table,
        sum(counts[: len(keys)]),
        sum(counts),
        span,
        all(recipe.eight for recipe in recipes),
        all(part.row.aligned for part in parts),
        launch,
    )


def _table(parts: Sequence[Part], counts: Sequence[int], span: int) -> np.ndarray:
    """Words of the programs that read each part, ``counts`` of them, and then the parts' rows."""
    program, place = 0, sum(counts)
    table = np.empty(place + sum(len(part.row.words) for part in parts), np.int64)
    for part, count in zip(parts, counts, strict=True):
        row = table[place : place + len(part.row.words)]
        row[:] = part.row.words
        row[Field.STOP], row[Field.SHIFT] = part.stop, part.place - part.start
        table[program : program + count] = (place << 32) + part.start + span * np.arange(count)
        program, place = program + count, place + len(row)
    return table


def _span(parts: Sequence[Part], streams: int, device: torch.device, launch: Launch) -> int:
    """Tokens of a program: many spare it the set-up, few keep every processor busy."""
    block = launch.blocks["BLOCK_TOKENS"]
    tiles = streams * sum(-(-(part.stop - part.start) // block) for part in parts)
    wanted = launch.programs * processors(device)
    return block * max(1, min(launch.most_tiles, tiles // wanted))
