"""Softmax attention over sealed units and plain BF16 tokens, without writing the units' keys and values to memory.

On a GPU it is one launch for units of one kind, led by a table (:mod:`quantwm_kernels.attention_passes`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from quantwm_core import attention as core
from quantwm_core import rotated_queries
from quantwm_core.chunk import SealedTensor as CoreTensor
from quantwm_core.domain import BF16
from quantwm_core.errors import DeviceError, DtypeError, ShapeError
from quantwm_core.method import decode_tensor
from quantwm_kernels.arrival import Planned
from quantwm_kernels.attention_passes import Pass, Plain, passes
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.chunk import KINDS, SealedChunk, SealedTensor, described
from quantwm_kernels.launch import LAUNCHES, MOST_ATTENDED_CHANNELS, Launch, processors
from quantwm_kernels.reading import Piece, ReadPlan
from quantwm_kernels.recipe import TRANSFORMS
from quantwm_kernels.sealing import ACCEPTED

Pair = tuple[Tensor, Tensor]
"""Keys and values of plain tokens."""

# An active chunk is new memory in every denoising step; tables of the last ones are worth keeping, not those of a video.
MOST_TABLES = 64
WIDE_CHANNELS = 128
# A graph replays with the tables it captured, and nobody else would keep those.
_captured: set[Planned[Pass]] = set()
# Tables of plans that come to the operator in parts; they hold what their key says, and serve whenever it comes again.
_tables: dict[Hashable, dict[Hashable, Planned[Pass]]] = {}


class Attended(NamedTuple):
    """Result of attention.

    Attributes:
        output: BF16 ``[B, Hq, T, D]``, in the memory order of the queries; zero where there is no token.
        log_sum_exp: FP32 ``[B, Hq, T]``, natural logarithm of the sum of exponentials, ``-inf`` where there is no token:
            with it two results over different tokens can be merged.
    """

    output: Tensor
    log_sum_exp: Tensor


@torch.library.custom_op("quantwm::attend_packed", mutates_args=())
def _attend(
    queries: Tensor,
    arrays: Sequence[Tensor],
    plain: Sequence[Tensor],
    specification: str,
    scale: float,
    rotated: bool,
) -> tuple[Tensor, Tensor]:
    plan, exact = _restored(arrays, specification), _paired(plain)
    return _on_cpu(queries, plan, exact, scale, rotated=rotated)


@_attend.register_kernel("cuda")
def _(
    queries: Tensor,
    arrays: Sequence[Tensor],
    plain: Sequence[Tensor],
    specification: str,
    scale: float,
    rotated: bool,
) -> tuple[Tensor, Tensor]:
    for tensor in arrays:
        check_detached(tensor, "sealed array")
    plan, exact = _restored(arrays, specification), _paired(plain)
    known = (specification, tuple((tensor.data_ptr(), *tensor.shape) for tensor in arrays))
    if known not in _tables and len(_tables) >= MOST_TABLES:
        _tables.clear()
    plan.tables = _tables.setdefault(known, {})
    return run(queries, plan, exact, checked_sizes(queries, plan, exact), scale, rotated=rotated)


@_attend.register_fake
def _(
    queries: Tensor,
    arrays: Sequence[Tensor],
    plain: Sequence[Tensor],
    specification: str,
    scale: float,
    rotated: bool,
) -> tuple[Tensor, Tensor]:
    del scale, rotated
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
    rotated: bool = False,
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
        rotated: Rotate queries into the basis of keys that are a transform code, instead of making these keys; see
            :mod:`quantwm_core.rotated_queries`. Other keys are made in any case.

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
        return Attended(*_attend(queries, sealed, plain, plan.specification, factor, rotated))
    if queries.is_cuda:
        return run(queries, plan, exact, sizes, factor, rotated=rotated)
    return _on_cpu(queries, plan, exact, factor, rotated=rotated)


def checked_sizes(queries: Tensor, plan: ReadPlan, exact: Sequence[Pair]) -> tuple[int, int, int, int]:
    """``(B, H, D of keys, D of values)``.

    Raises:
        QuantWMError: As :func:`attend_packed`.
    """
    check_detached(queries, "queries")
    if queries.dtype not in ACCEPTED:
        raise DtypeError(f"queries: got {queries.dtype}, need torch.bfloat16, float16 or float32")
    for number, pair in enumerate(exact):
        for kind, tensor in zip(KINDS, pair, strict=True):
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


def _on_cpu(queries: Tensor, plan: ReadPlan, exact: Sequence[Pair], scale: float, *, rotated: bool = False) -> Attended:
    pieces = [(piece.chunk.to_core(), piece.start, piece.stop) for piece in plan.pieces]
    asked = to_numpy(queries, "queries").astype(BF16).astype(np.float32)
    scaled = asked * np.float32(scale * asked.shape[3] ** 0.5)
    scores = [_scores(scaled, chunk.keys, start, stop, rotated=rotated) for chunk, start, stop in pieces]
    scores += [core.logits(scaled, to_numpy(keys, "keys")) for keys, _ in exact]
    values = [decode_tensor(chunk.values, start, stop) for chunk, start, stop in pieces]
    values += [to_numpy(each, "values") for _, each in exact]
    joined, averaged = np.concatenate(scores, axis=3), np.concatenate(values, axis=2)
    result = output_like(queries, averaged.shape[3])
    if joined.shape[3] == 0:
        return Attended(result.zero_(), owned(np.full(asked.shape[:3], -np.inf, np.float32)))
    result.copy_(owned(core.averaged(core.softmax(joined), averaged)))
    return Attended(result, owned(core.log_sum_exp(joined)))


def _scores(queries: np.ndarray, keys: CoreTensor, start: int, stop: int, *, rotated: bool) -> np.ndarray:
    """Logits of some tokens of a unit."""
    if rotated and keys.method in TRANSFORMS:
        return rotated_queries.logits(queries, keys.arrays, keys.shape, start, stop)
    return core.logits(queries, decode_tensor(keys, start, stop))


def run(
    queries: Tensor, plan: ReadPlan, exact: Sequence[Pair], sizes: tuple[int, int, int, int], scale: float,
    launch: Launch | None = None, *, rotated: bool = False,
) -> Attended:  # fmt: skip
    """Launch attention over checked tensors, where they live."""
    from quantwm_kernels.triton import attention as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    asked = _consecutive(queries.to(torch.bfloat16))
    plain = [(_consecutive(keys), _consecutive(values)) for keys, values in exact]
    narrow = "attend_rotated" if rotated else "attend"
    chosen = launch or LAUNCHES[narrow if max(sizes[2:]) <= WIDE_CHANNELS else "attend_wide"]
    rows = queries.shape[1] // sizes[1] * queries.shape[2]
    blocks = sizes[0] * sizes[1] * -(-rows // chosen.blocks["BLOCK_QUERIES"])
    wanted = max(1, chosen.programs * processors(queries.device) // max(blocks, 1))
    known = tuple((Plain.of(keys), Plain.of(values)) for keys, values in plain)
    key = (known, wanted, queries.device, rotated, None if launch is None else repr(launch))
    found = plan.tables.get(key)
    if found is None:
        made = passes(plan.pieces, known, sizes[2:], wanted, queries.device, chosen)
        if len(plan.tables) >= MOST_TABLES:
            plan.tables.clear()
        found = plan.tables[key] = Planned(made, queries.device)
    if queries.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.add(found)
    output = output_like(queries, sizes[3])  # of the queries as they came: an operator's results are laid out by those
    return kernels.attend(found.expected(), asked, plain, output, sizes, scale, rotated=rotated)


def _consecutive(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
