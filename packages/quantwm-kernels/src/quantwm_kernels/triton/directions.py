"""Steps and codes of a transform code on a GPU; formulas in :mod:`quantwm_core.directions`, bytes in :mod:`quantwm_core.blocks`.

Coefficients are FP32 ``[S, N, K]``, directions padded to the most that a stream has. The search takes a tile of tokens
once for all steps that are tried, and leaves sums of squared errors of each piece of the tokens, which are added in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_core import allocation
from quantwm_core.directions import BEST_STEPS, FACTORS, OFFSETS
from quantwm_kernels.launch import LAUNCHES, ceil_div, next_power_of_two, on_device, processors, ranks
from quantwm_kernels.triton.arithmetic import rounded
from quantwm_kernels.triton.clustered import halves_at, wide
from quantwm_kernels.triton.kernel import kernel

# A code that rounds beyond this is clipped in any case, and below it rounding by addition is exact.
FARTHEST: tl.constexpr = tl.constexpr(1024.0)
CODES_PER_BYTE: tl.constexpr = tl.constexpr(4)
WORDS: tl.constexpr = tl.constexpr(5)


@triton.jit
def code_of(coefficient, step, shift, highest):
    """FP32 code of a coefficient, to nearest and even; the middle one where the step is 0."""
    ratio = tl.div_rn(coefficient, tl.where(step > 0, step, 1.0))
    ratio = tl.where(step > 0, tl.clamp(ratio, -FARTHEST, FARTHEST), 0.0)
    return tl.clamp(rounded(ratio - shift), 0.0, highest)


@kernel(do_not_specialize=["tokens", "directions", "per_piece"])
def search_kernel(
    coefficients, tried, shifts, highest, errors, tokens, directions, per_piece,
    TRIED: tl.constexpr, TRIED_2: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Squared errors of every step that is tried; programs take directions, streams and pieces of the tokens."""
    direction = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    stream, piece = tl.program_id(1).to(tl.int64), tl.program_id(2)
    known = direction < directions
    which = tl.arange(0, TRIED_2)
    place = (stream * TRIED + which[:, None]) * directions + direction[None, :]
    exists = (which < TRIED)[:, None] & known[None, :]
    step = wide(tl.load(halves_at(tried, 0) + place, mask=exists, other=0))[None, :, :]
    shift = tl.load(shifts + stream * directions + direction, mask=known, other=0.0)[None, None, :]
    high = tl.load(highest + stream * directions + direction, mask=known, other=0.0)[None, None, :]
    total = tl.zeros((TRIED_2, BLOCK_K), tl.float32)
    begin = piece * per_piece
    for first in range(begin, tl.minimum(begin + per_piece, tokens), TILE):
        token = first + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & known[None, :]
        address = coefficients + (stream * tokens + token[:, None]) * directions + direction[None, :]
        number = tl.load(address, mask=inside, other=0.0)[:, None, :]
        left = number - (code_of(number, step, shift, high) + shift) * step
        total += tl.sum(tl.where(inside[:, None, :], left * left, 0.0), axis=0)
    streams = tl.num_programs(1)
    result = errors + ((piece * streams + stream) * TRIED + which[:, None]) * directions + direction[None, :]
    tl.store(result, total, mask=exists)


@kernel(do_not_specialize=["tokens", "directions"])
def pack_kernel(
    coefficients, steps, shifts, highest, places, codes, tokens, directions, TILE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of tokens of a stream, packed; ``places`` says where its bytes begin, how many, and of what."""
    stream = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin, size = tl.load(places + stream * WORDS), tl.load(places + stream * WORDS + 1).to(tl.int32)
    eight = tl.load(places + stream * WORDS + 2).to(tl.int32)
    four, coded = tl.load(places + stream * WORDS + 3).to(tl.int32), tl.load(places + stream * WORDS + 4).to(tl.int32)
    byte, part = tl.arange(0, BYTES)[:, None], tl.arange(0, CODES_PER_BYTE)[None, :]
    is_eight, is_four = byte < eight, byte < eight + four // 2
    parts = tl.where(is_eight, 1, tl.where(is_four, 2, 4))
    behind = byte - eight - four // 2
    direction = (
        tl.where(is_eight, byte, tl.where(is_four, eight + 2 * (byte - eight), eight + four + 4 * behind)) + part
    )
    known = (part < parts) & (direction < coded) & (byte < size)
    own = stream * directions + direction
    step = wide(tl.load(halves_at(steps, 0) + own, mask=known, other=0))[None, :, :]
    shift = tl.load(shifts + own, mask=known, other=0.0)[None, :, :]
    high = tl.load(highest + own, mask=known, other=0.0)[None, :, :]
    exists = (token < tokens)[:, None, None] & known[None, :, :]
    address = coefficients + (stream * tokens + token[:, None, None]) * directions + direction[None, :, :]
    code = code_of(tl.load(address, mask=exists, other=0.0), step, shift, high).to(tl.int32)
    packed = tl.sum(tl.where(exists, code << (part * (8 // parts))[None, :, :], 0), axis=2)
    written = (token < tokens)[:, None] & (tl.arange(0, BYTES) < size)[None, :]
    result = codes + begin + token[:, None].to(tl.int64) * size + tl.arange(0, BYTES)[None, :]
    tl.store(result, packed.to(tl.uint8), mask=written)


def search_steps(coefficients: Tensor, widths: Tensor) -> Tensor:
    """BF16 ``[S, K]`` steps with the smallest squared error; the first of equals.

    Args:
        coefficients: FP32 ``[S, N, K]``.
        widths: int64 ``[S, K]``: 8, 4 or 2 bits, 0 for a direction that is none.
    """
    streams, tokens, count = coefficients.shape
    unit = coefficients.square().mean(1).sqrt() * _by_width(widths, BEST_STEPS)
    factors = torch.tensor(FACTORS, dtype=torch.float32, device=coefficients.device)
    tried = (unit[:, None] * factors[:, None]).bfloat16()
    shifts, highest = shifts_of(widths)
    launch = LAUNCHES["search_steps"]
    tile, wide_block = launch.blocks["TILE"], launch.blocks["BLOCK_K"]
    groups = ceil_div(count, wide_block) * streams * ranks()
    pieces = max(1, min(ceil_div(tokens, tile), launch.programs * processors(coefficients.device) // groups))
    per_piece = ceil_div(ceil_div(tokens, tile), pieces) * tile
    pieces = ceil_div(tokens, per_piece)
    errors = coefficients.new_empty((pieces, streams, len(FACTORS), count))
    with on_device(coefficients, "coefficients"):
        search_kernel[ceil_div(count, wide_block), streams, pieces](
            coefficients.contiguous(), tried, shifts, highest, errors, tokens, count, per_piece,
            TRIED=len(FACTORS), TRIED_2=next_power_of_two(len(FACTORS)), **launch.options,
        )  # fmt: skip
    best = errors.sum(0).argmin(1, keepdim=True)
    return tried.gather(1, best)[:, 0]


def packed(coefficients: Tensor, widths: Tensor, steps: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
    """uint8, the codes of all streams one behind the other.

    Args:
        coefficients: FP32 ``[S, N, K]``.
        widths: int64 ``[S, K]``.
        steps: BF16 ``[S, K]``.
        blocks: Blocks of 8, 4 and 2 bits of each stream.
    """
    streams, tokens, count = coefficients.shape
    sizes = [allocation.token_bytes(counts) for counts in blocks]
    begins = list(accumulate((tokens * size for size in sizes), initial=0))
    places = [
        (begin, size, allocation.BLOCK * counts[0], allocation.BLOCK * counts[1], allocation.directions(counts))
        for begin, size, counts in zip(begins[:-1], sizes, blocks, strict=True)
    ]
    device = coefficients.device
    codes = torch.empty(begins[-1], dtype=torch.uint8, device=device)
    table = torch.tensor(places, dtype=torch.int64).to(device)
    launch = LAUNCHES["pack_directions"]
    shifts, highest = shifts_of(widths)
    with on_device(coefficients, "coefficients"):
        pack_kernel[ceil_div(tokens, launch.blocks["TILE"]), streams](
            coefficients.contiguous(), steps.contiguous(), shifts, highest, table, codes, tokens, count,
            BYTES=next_power_of_two(max(*sizes, 2)), **launch.options,
        )  # fmt: skip
    return codes


def shifts_of(widths: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 ``[S, K]`` each: what is added to a code to make a level, and the highest code."""
    shift = {width: offset - 2 ** (width - 1) for width, offset in OFFSETS.items()}
    return _by_width(widths, shift), (2.0**widths - 1).to(torch.float32)


def _by_width(widths: Tensor, numbers: dict[int, float]) -> Tensor:
    """FP32: the number of each width, zero for others."""
    table = torch.zeros(9, dtype=torch.float32)
    for width, number in numbers.items():
        table[width] = number
    return table.to(widths.device)[widths]
