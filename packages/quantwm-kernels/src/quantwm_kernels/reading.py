"""Reading many sealed units of a layer at once: keys and values, any ranges, each to its place in a workspace.

On a GPU a read is one launch over a table of addresses, which stays on the device. A cache reads the same tokens in every
denoising step, so it makes a :class:`ReadPlan` when a chunk was sealed or evicted, and keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import BFloat16
from torch import Tensor

from quantwm_core.errors import DeviceError, DtypeError, RangeError, ShapeError, StateError
from quantwm_core.integer_table import EXACT_BITS
from quantwm_kernels.arrival import Arrival
from quantwm_kernels.bridge import check_detached
from quantwm_kernels.chunk import KINDS, SealedChunk, SealedTensor
from quantwm_kernels.launch import LAUNCHES, Launch, check_available, processors
from quantwm_kernels.recipe import GROUPED, PRODUCTS, Field, Form, Recipe, Row, Steps

if TYPE_CHECKING:
    from quantwm_kernels.attention_passes import PlannedPasses

_TABLES = 1024
NARROW, FEW_DIRECTIONS = 128, 16
"""Head dimension of which a tile fits into a processor's threads, and rank up to which they can do with few registers."""
# A graph replays with the tables it captured, and nobody else would keep those.
_captured: set[Planned] = set()


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sealed unit, counted inside it, and the workspace's token where they begin."""

    chunk: SealedChunk
    start: int
    stop: int
    place: int


class Part(NamedTuple):
    """The same for one tensor as a kernel sees it."""

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
        prepared: Compile-time arguments by what alignment allows, filled by the launcher.
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
    prepared: dict[tuple[int, bool], dict[str, int]] = field(default_factory=dict, compare=False, repr=False)
    again: dict[Hashable, Callable[[], object]] = field(default_factory=dict, compare=False, repr=False)


class Planned:
    """Launches that any stream may repeat; each is itself, so that a set of them keeps one of each.

    Args:
        launches: What :func:`batches` made on the current stream.
        device: Where it is.
    """

    def __init__(self, launches: Sequence[Batch], device: torch.device) -> None:
        self.device = device
        self._launches = tuple(launches)
        tables = [batch.table for batch in self._launches]
        self._arrival = Arrival(tables, device) if tables and device.type == "cuda" else None

    def run(self, keys: Tensor, values: Tensor) -> None:
        """Launch, behind the tables."""
        if self._arrival is not None:
            self._arrival.expect()
        run(self._launches, keys, values)


class ReadPlan:
    """Reconstructs the same tokens of the same units, as often as one likes.

    Tables are copied to the device at the first read, and other streams than that one's wait for them; a CUDA graph that
    captured a later one needs the plan alive.

    Attributes:
        pieces: What is read.
        tokens: Tokens that a workspace must have.
        specification: All but places and arrays as text, which an operator takes.
        tables: What :mod:`quantwm_kernels.packed_attention` keeps to attend to the same tokens.

    Args:
        pieces: What to read. Their places must not overlap.
        launch: Other launch parameters than :data:`quantwm_kernels.launch.LAUNCHES` has.

    Raises:
        RangeError: A range does not lie inside its unit, or a place is negative.
        ShapeError: The units differ in batch, heads or head dimension.

    >>> from quantwm_core.method import scheme
    >>> from quantwm_kernels.methods import seal_chunk
    >>> units = [seal_chunk(scheme("bf16"), *(torch.full((1, 2, 4, 8), x) for x in (n, -n))) for n in (1.0, 2.0)]
    >>> plan = ReadPlan([Piece(units[0], 2, 4, 0), Piece(units[1], 0, 1, 2)])
    >>> keys, values = (torch.empty(1, 2, 3, 8, dtype=torch.bfloat16) for _ in range(2))
    >>> plan.into(keys, values)
    >>> keys[0, 0, :, 0], values[0, 0, :, 0]
    (tensor([1., 1., 2.], dtype=torch.bfloat16), tensor([-1., -1., -2.], dtype=torch.bfloat16))
    """

    def __init__(self, pieces: Iterable[Piece], launch: Launch | None = None) -> None:
        self.pieces = tuple(pieces)
        for piece in self.pieces:
            if not 0 <= piece.start <= piece.stop <= piece.chunk.tokens or piece.place < 0:
                raise RangeError(
                    f"tokens {piece.start} to {piece.stop} of a sealed unit of {piece.chunk.tokens} to place "
                    f"{piece.place}: need 0 <= start <= stop <= {piece.chunk.tokens} and a place of at least 0"
                )
        self.tokens = max((piece.place + piece.stop - piece.start for piece in self.pieces), default=0)
        self._sizes = {
            kind: _common_sizes(kind, [getattr(piece.chunk, kind) for piece in self.pieces]) for kind in KINDS
        }
        texts = [(each.chunk.keys.specification, each.chunk.values.specification, *each[1:3]) for each in self.pieces]
        self.specification = json.dumps(texts)
        self.tables: dict[Hashable, PlannedPasses] = {}
        self._launch = launch
        self._planned: Planned | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int] | None:
        """``(B, H, D of keys, D of values)``; None without a piece."""
        keys, values = self._sizes["keys"], self._sizes["values"]
        return None if keys is None or values is None else (*keys, values[2])

    def into(
        self,
        keys: BFloat16[Tensor, "batch heads tokens key_channels"],
        values: BFloat16[Tensor, "batch heads tokens value_channels"],
    ) -> None:
        """Write all pieces into a workspace.

        Args:
            keys, values: BF16 ``[B, H, S, D]`` of any strides, such as a transposed view of ``[B, S, H, D]``.

        Raises:
            ShapeError, DtypeError: The workspace does not fit the pieces.
            StateError: It requires grad, or a CUDA graph is captured and the plan was never read before.
            DeviceError: No implementation serves the device or the method.
        """
        check_workspace("keys", keys, self._sizes["keys"], self.tokens)
        check_workspace("values", values, self._sizes["values"], self.tokens)
        if keys.device != values.device:
            raise DeviceError(f"workspaces of keys on {keys.device}, of values on {values.device}; need one device")
        if not keys.is_cuda:
            self._into_on_cpu(keys, values)
            return
        if self._planned is None or self._planned.device != keys.device:
            parts = [
                [Part(getattr(piece.chunk, kind).row, piece.start, piece.stop, piece.place) for piece in self.pieces]
                for kind in KINDS
            ]
            self._planned = Planned(batches(parts[0], parts[1], keys.device, self._launch), keys.device)
        self._planned.run(keys, values)

    def _into_on_cpu(self, keys: Tensor, values: Tensor) -> None:
        from quantwm_kernels.methods import decode_into  # noqa: PLC0415 - that module reads single tensors through this one

        for chunk, start, stop, place in self.pieces:
            where = slice(place, place + stop - start)
            decode_into(chunk.keys, keys[:, :, where], start, stop)
            decode_into(chunk.values, values[:, :, where], start, stop)


def check_workspace(kind: str, out: Tensor, sizes: tuple[int, int, int] | None, tokens: int) -> None:
    """Refuse a workspace that cannot take so many tokens of units of ``(B, H, D)``; None is no unit at all.

    Raises:
        ShapeError, DtypeError, StateError: It does not fit, is not BF16, or requires grad.
    """
    check_detached(out, f"workspace of {kind}")
    if out.dtype is not torch.bfloat16:
        raise DtypeError(f"workspace of {kind}: got {out.dtype}, need torch.bfloat16")
    shape = out.shape
    if sizes is not None and (len(shape) != 4 or shape[2] < tokens or (shape[0], shape[1], shape[3]) != sizes):
        need = (*sizes[:2], tokens, sizes[2])
        raise ShapeError(f"workspace of {kind}: got shape {tuple(shape)}, need {need} or more tokens")


def _common_sizes(kind: str, tensors: Sequence[SealedTensor]) -> tuple[int, int, int] | None:
    """``(B, H, D)`` that all tensors have."""
    found = {(*tensor.shape[:2], tensor.shape[3]) for tensor in tensors}
    if len(found) > 1:
        raise ShapeError(f"{kind} of (B, H, D) {sorted(found)} do not fit into one workspace; read them apart")
    return found.pop() if found else None


def run(planned: Sequence[Batch], keys: Tensor, values: Tensor) -> None:
    """Launch batches; a workspace whose channels lie apart is written through a copy."""
    from quantwm_kernels.triton import reading as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    if keys.stride(3) != 1 or values.stride(3) != 1:
        dense = [out.clone(memory_format=torch.contiguous_format) for out in (keys, values)]
        run(planned, dense[0], dense[0] if values is keys else dense[1])
        for out, written in zip((keys,) if values is keys else (keys, values), dense, strict=False):
            out.copy_(written)
        return
    for batch in planned:
        kernels.read(batch, keys, values)


def read_single(sealed: SealedTensor, out: Tensor, start: int, stop: int) -> None:
    """Reconstruct tokens ``start`` to ``stop`` of one tensor on a GPU, from the begin of ``out``.

    Raises:
        QuantWMError: As :meth:`ReadPlan.into`.
    """
    if stop > start:
        planned = _single(sealed.row, start, stop, out.device)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            _captured.add(planned)
        planned.run(out, out)


@lru_cache(maxsize=_TABLES)
def _single(row: Row, start: int, stop: int, device: torch.device) -> Planned:
    """Launches of one tensor. A table holds nothing but what the arguments say: it may serve whenever they come again."""
    return Planned(batches([Part(row, start, stop, 0)], [], device), device)


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


def merged(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Let units share a recipe where their rows say the rest.

    Those without compensation, such as the first, share that of those with it; transform codes that of the most directions, of
    which no more are read at once than in any.
    """
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
        return list(recipes)
    steps = max(ways)
    clustered = (recipe.form in GROUPED for recipe in recipes)
    return [
        replace(recipe, rank=rank, steps=steps) if may else recipe
        for recipe, may in zip(recipes, clustered, strict=True)
    ]


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
        all(eight(recipe) for recipe in recipes),
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


def eight(recipe: Recipe) -> bool:
    """Whether eight consecutive channels never straddle a group."""
    return recipe.channels % 8 == 0 and (recipe.form not in GROUPED or recipe.group % 8 == 0)


def _span(parts: Sequence[Part], streams: int, device: torch.device, launch: Launch) -> int:
    """Tokens of a program: many spare it the set-up, few keep every processor busy."""
    block = launch.blocks["BLOCK_TOKENS"]
    tiles = streams * sum(-(-(part.stop - part.start) // block) for part in parts)
    wanted = launch.programs * processors(device)
    return block * max(1, min(launch.most_tiles, tiles // wanted))
