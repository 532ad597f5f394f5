"""Softmax attention over sealed units and plain BF16 tokens, without writing the units' keys and values to memory.

On a GPU it is one launch for units of one kind, led by a table: four words per program along the third axis of the
grid (:class:`Leading`), entries of four words (offsets of a key row and a value row, first token, end), and the rows.
Sealed rows are those of :mod:`quantwm_kernels.recipe`; that of a plain tensor is its address and three strides.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from quantwm_core import attention as core
from quantwm_core.domain import BF16
from quantwm_core.errors import DeviceError, DtypeError, ShapeError
from quantwm_core.method import decode_tensor
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.chunk import SealedChunk, SealedTensor, described
from quantwm_kernels.launch import LAUNCHES, MOST_ATTENDED_CHANNELS, Launch, processors
from quantwm_kernels.reading import Part, Piece, ReadPlan, check_tables, eight, merged
from quantwm_kernels.recipe import Form, Recipe
from quantwm_kernels.sealing import ACCEPTED

Pair = tuple[Tensor, Tensor]
"""Keys and values of plain tokens."""

# An active chunk is new memory in every denoising step; tables of the last ones are worth keeping, not those of a video.
MOST_TABLES = 64
WIDE_CHANNELS = 128
# A graph replays with the tables it captured, and nobody else would keep those.
_captured: list[tuple[Pass, ...]] = []
# Tables of plans that come to the operator in parts; they hold what their key says, and serve whenever it comes again.
_tables: dict[tuple[str | int, ...], dict[Hashable, tuple[Pass, ...]]] = {}


class Leading(IntEnum):
    """Words that lead a program: where its entries begin and end, sealed ones first."""

    SEALED_BEGIN = 0
    SEALED_END = 1
    EXACT_BEGIN = 2
    EXACT_END = 3


class Attended(NamedTuple):
    """Result of attention.

    Attributes:
        output: BF16 ``[B, Hq, T, D]``, in the memory order of the queries; zero where there is no token.
        log_sum_exp: FP32 ``[B, Hq, T]``, natural logarithm of the sum of exponentials, ``-inf`` where there is no token:
            with it two results over different tokens can be merged.
    """

    output: Tensor
    log_sum_exp: Tensor


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
    prepared: dict[tuple[bool, bool], dict[str, int]] = field(default_factory=dict, compare=False, repr=False)


@torch.library.custom_op("quantwm::attend_packed", mutates_args=())
def _attend(
    queries: Tensor, arrays: Sequence[Tensor], plain: Sequence[Tensor], specification: str, scale: float
) -> tuple[Tensor, Tensor]:
    plan, exact = _restored(arrays, specification), _paired(plain)
    return _on_cpu(queries, plan, exact, scale)


@_attend.register_kernel("cuda")
def _(
    queries: Tensor, arrays: Sequence[Tensor], plain: Sequence[Tensor], specification: str, scale: float
) -> tuple[Tensor, Tensor]:
    for tensor in arrays:
        check_detached(tensor, "sealed array")
    plan, exact = _restored(arrays, specification), _paired(plain)
    known: tuple[str | int, ...] = (specification, *(tensor.data_ptr() for tensor in arrays))
    if known not in _tables and len(_tables) >= MOST_TABLES:
        _tables.clear()
    plan.tables = _tables.setdefault(known, {})
    return run(queries, plan, exact, checked_sizes(queries, plan, exact), scale)


@_attend.register_fake
def _(
    queries: Tensor, arrays: Sequence[Tensor], plain: Sequence[Tensor], specification: str, scale: float
) -> tuple[Tensor, Tensor]:
    del scale
    sizes = _restored(arrays, specification).sizes
    channels = plain[1].shape[3] if sizes is None else sizes[3]
    batch, heads, count, _ = queries.shape
    return output_like(queries, channels), queries.new_empty((batch, heads, count), dtype=torch.float32)


def _restored(arrays: Sequence[Tensor], specification: str) -> ReadPlan:
    """A plan of its specification and arrays."""
    rest, pieces = iter(arrays), []
    for *texts, start, stop in json.loads(specification):
        told = [json.loads(text) for text in texts]
        keys, values = (
            SealedTensor(**described(each, list(itertools.islice(rest, len(each["names"]))))) for each in told
        )
        pieces.append(Piece(SealedChunk(keys, values), start, stop, 0))
    return ReadPlan(pieces)


def _paired(plain: Sequence[Tensor]) -> list[Pair]:
    return list(zip(plain[::2], plain[1::2], strict=True))


def output_like(queries: Tensor, channels: int) -> Tensor:
    """Empty BF16 ``[B, Hq, T, channels]`` in the memory order of the queries: heads or tokens first."""
    batch, heads, count, _ = queries.shape
    if queries.stride(1) < queries.stride(2):
        return queries.new_empty((batch, count, heads, channels), dtype=torch.bfloat16).transpose(1, 2)
    return queries.new_empty((batch, heads, count, channels), dtype=torch.bfloat16)


def attend_packed(
    queries: Float[Tensor, "batch query_heads queries channels"],
    plan: ReadPlan,
    exact: Sequence[Pair] = (),
    *,
    scale: float | None = None,
) -> Attended:
    """Attention, without a mask, to all tokens of a plan's pieces and of plain tensors.

    On a GPU nothing of the size of the keys is written; the same input gives the same bytes.

    Args:
        queries: BF16, FP16 or FP32, rounded to BF16 first; ``Hq`` a multiple of the KV heads ``H``. Any strides, but fastest
            with consecutive channels, as are plain tensors.
        plan: Sealed tokens; where a read would place them does not matter. Its tables for plain tensors of the same
            addresses are kept, so a CUDA graph can replay a call that came before with the same ``exact``.
        exact: Keys and values of plain tokens, BF16 ``[B, H, n, D]`` of any length.
        scale: Factor of the logits; ``1 / sqrt(D)`` by default.

    Raises:
        ShapeError, DtypeError: The tensors do not fit each other, or there are none.
        StateError: A tensor requires grad, or a CUDA graph is captured and this call was never made before.
        DeviceError: The tensors live apart, or no implementation serves the device or the method.

    >>> from quantwm_core.method import scheme
    >>> from quantwm_kernels.methods import seal_chunk
    >>> from quantwm_kernels.reading import Piece
    >>> keys, values = (torch.full((1, 2, 4, 8), number) for number in (1.0, 3.0))
    >>> plan = ReadPlan([Piece(seal_chunk(scheme("bf16"), keys, values), 0, 4, 0)])
    >>> active = (keys.bfloat16(), -values.bfloat16())
    >>> output, log_sum_exp = attend_packed(torch.zeros(1, 4, 3, 8), plan, [active])
    >>> output.shape, output.abs().max().item(), log_sum_exp.exp()[0, 0, 0].round().item()
    (torch.Size([1, 4, 3, 8]), 0.0, 8.0)
    """
    sizes = checked_sizes(queries, plan, exact)
    factor = queries.shape[3] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        sealed = [
            tensor
            for piece in plan.pieces
            for each in (piece.chunk.keys, piece.chunk.values)
            for tensor in each.arrays.values()
        ]
        plain = [tensor for pair in exact for tensor in pair]
        return Attended(*_attend(queries, sealed, plain, plan.specification, factor))
    if queries.is_cuda:
        return run(queries, plan, exact, sizes, factor)
    return _on_cpu(queries, plan, exact, factor)


def checked_sizes(queries: Tensor, plan: ReadPlan, exact: Sequence[Pair]) -> tuple[int, int, int, int]:
    """``(B, H, D of keys, D of values)``.

    Raises:
        QuantWMError: As :func:`attend_packed`.
    """
    check_detached(queries, "queries")
    if queries.dtype not in ACCEPTED:
        raise DtypeError(f"queries: got {queries.dtype}, need torch.bfloat16, float16 or float32")
    for number, pair in enumerate(exact):
        for kind, tensor in zip(("keys", "values"), pair, strict=True):
            check_detached(tensor, f"plain {kind} {number}")
            if tensor.dtype is not torch.bfloat16:
                raise DtypeError(f"plain {kind} {number}: got {tensor.dtype}, need torch.bfloat16")
            if tensor.device != queries.device:
                raise DeviceError(f"plain {kind} {number} live on {tensor.device}, the queries on {queries.device}")
        if any(tensor.ndim != 4 for tensor in pair) or pair[0].shape[:3] != pair[1].shape[:3]:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in pair)
            raise ShapeError(
                f"plain keys and values {number}: got {shapes}, need [B, H, n, D] with the same B, H and n"
            )
    found = {(*keys.shape[:2], keys.shape[3], values.shape[3]) for keys, values in exact}
    if (sizes := plan.sizes) is not None:
        found.add(sizes)
    if len(found) != 1:
        raise ShapeError(
            f"keys and values of (B, H, D, D) {sorted(found)}: need one kind, from a unit or a plain tensor"
        )
    batch, heads, channels, value_channels = found.pop()
    fits = queries.ndim == 4 and (queries.shape[0], queries.shape[3]) == (batch, channels)
    if not fits or queries.shape[1] % heads:
        raise ShapeError(f"queries: got {tuple(queries.shape)}, need [{batch}, multiple of {heads}, T, {channels}]")
    if max(channels, value_channels) > MOST_ATTENDED_CHANNELS:
        raise ShapeError(f"head dimensions {channels} and {value_channels}: need at most {MOST_ATTENDED_CHANNELS}")
    return batch, heads, channels, value_channels


def _on_cpu(queries: Tensor, plan: ReadPlan, exact: Sequence[Pair], scale: float) -> Attended:
    pieces = [(piece.chunk.to_core(), piece.start, piece.stop) for piece in plan.pieces]
    keys, values = (
        np.concatenate(
            [decode_tensor(getattr(chunk, kind), start, stop) for chunk, start, stop in pieces]
            + [to_numpy(pair[place], kind) for pair in exact],
            axis=2,
        )
        for place, kind in enumerate(("keys", "values"))
    )
    rounded = to_numpy(queries, "queries").astype(BF16).astype(np.float32)
    result = output_like(queries, values.shape[3])
    if keys.shape[2] == 0:
        return Attended(result.zero_(), owned(np.full(rounded.shape[:3], -np.inf, np.float32)))
    scaled = rounded * np.float32(scale * rounded.shape[3] ** 0.5)
    result.copy_(owned(core.attend(scaled, keys, values)))
    return Attended(result, owned(core.log_sum_exp(core.logits(scaled, keys))))


def run(
    queries: Tensor, plan: ReadPlan, exact: Sequence[Pair], sizes: tuple[int, int, int, int], scale: float,
    launch: Launch | None = None,
) -> Attended:  # fmt: skip
    """Launch attention over checked tensors, where they live."""
    from quantwm_kernels.triton import attention as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    asked = _consecutive(queries.to(torch.bfloat16))
    plain = [(_consecutive(keys), _consecutive(values)) for keys, values in exact]
    chosen = launch or LAUNCHES["attend" if max(sizes[2:]) <= WIDE_CHANNELS else "attend_wide"]
    rows = queries.shape[1] // sizes[1] * queries.shape[2]
    blocks = sizes[0] * sizes[1] * -(-rows // chosen.blocks["BLOCK_QUERIES"])
    wanted = max(1, chosen.programs * processors(queries.device) // max(blocks, 1))
    known = tuple((tensor.data_ptr(), tensor.shape[2], *tensor.stride()[:3]) for pair in plain for tensor in pair)
    key = (known, wanted, chosen.blocks["BLOCK_TOKENS"], queries.device)
    passes = plan.tables.get(key)
    if passes is None:
        if len(plan.tables) >= MOST_TABLES:
            plan.tables.clear()
        passes = plan.tables[key] = _passes(plan, known, sizes, wanted, queries.device, chosen)
    if queries.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.append(passes)
    return kernels.attend(passes, asked, plain, sizes, scale)


def _consecutive(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _passes(
    plan: ReadPlan, plain: Sequence[tuple[int, ...]], sizes: tuple[int, ...], wanted: int, device: torch.device, launch: Launch
) -> tuple[Pass, ...]:  # fmt: skip
    """Tables for units and plain tensors, whose keys and values follow each other in ``plain``."""
    pairs = [
        tuple(Part(getattr(piece.chunk, kind).row, piece.start, piece.stop, 0) for kind in ("keys", "values"))
        for piece in plan.pieces
        if piece.stop > piece.start
    ]
    check_tables([part.row for pair in pairs for part in pair], device)
    recipes = zip(*(merged([pair[place].row.recipe for pair in pairs]) for place in (0, 1)), strict=True)
    groups: dict[tuple[Recipe, Recipe], list[tuple[Part, ...]]] = {}
    for kinds, pair in zip(recipes, pairs, strict=True):
        groups.setdefault(kinds, []).append(pair)
    groups = groups or {(Recipe(Form.EXACT, sizes[2]), Recipe(Form.EXACT, sizes[3])): []}
    block, last = launch.blocks["BLOCK_TOKENS"], list(groups)[-1]
    every = sum(_tiles(pair[0].stop - pair[0].start, block) for pair in pairs)
    every += sum(_tiles(words[1], block) for words in plain[::2])
    made = []
    for kinds, members in groups.items():
        items = [(pair[0].row.words, pair[1].row.words, pair[0].start, pair[0].stop) for pair in members]
        own = (
            []
            if kinds != last
            else [(k[:1] + k[2:], v[:1] + v[2:], 0, k[1]) for k, v in zip(plain[::2], plain[1::2], strict=True)]
        )
        tiles = sum(_tiles(stop - start, block) for _, _, start, stop in items + own)
        parts = max(1, min(wanted * tiles // max(every, 1), tiles // launch.least_tiles))
        table = torch.tensor(_table(items, own, parts, block), dtype=torch.int64).to(device, non_blocking=True)
        rows = [part.row for pair in members for part in pair]
        made.append(Pass(*kinds, table, parts, all(map(eight, kinds)), all(row.aligned for row in rows), launch))
    return tuple(made)


Item = tuple[tuple[int, ...], tuple[int, ...], int, int]


def _tiles(tokens: int, block: int) -> int:
    return -(-tokens // block)


def _table(sealed: Sequence[Item], plain: Sequence[Item], parts: int, block: int) -> list[int]:
    """Words of a table: leading ones, entries, rows."""
    shares = shared([stop - start for _, _, start, stop in (*sealed, *plain)], parts, block)
    entries_begin = parts * len(Leading)
    begin = entries_begin + 4 * sum(map(len, shares))
    rows: list[int] = []
    places = []
    for keys, values, _, _ in (*sealed, *plain):
        places.append((begin + len(rows), begin + len(rows) + len(keys)))
        rows += (*keys, *values)
    leads: list[int] = []
    entries: list[int] = []
    for share in shares:
        here = entries_begin + len(entries)
        between = here + 4 * sum(item < len(sealed) for item, _, _ in share)
        leads += (here, between, between, here + 4 * len(share))
        for item, first, stop in share:
            start = (*sealed, *plain)[item][2]
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
