"""One launch that reconstructs the keys and values of a layer: any number of sealed units, all streams, every method.

A program takes consecutive tokens of one unit of one stream. The table that it finds them in begins with a word per
program along the first axis of the grid, ``row << 32 | first token``; rows are described in
:mod:`quantwm_kernels.recipe`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantwm_kernels.launch import on_device
from quantwm_kernels.reading import Batch
from quantwm_kernels.recipe import VECTOR_NBYTES, Field, Form, Recipe
from quantwm_kernels.triton.clustered import CODES, centroid, channel_residual, residual
from quantwm_kernels.triton.compensation import BASIS, directions, place_of, steps_operand
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.minmax import minmax

TOKENS: tl.constexpr = tl.constexpr(int(Field.TOKENS))
STOP: tl.constexpr = tl.constexpr(int(Field.STOP))
SHIFT: tl.constexpr = tl.constexpr(int(Field.SHIFT))
EXACT: tl.constexpr = tl.constexpr(int(Form.EXACT))
AFFINE: tl.constexpr = tl.constexpr(int(Form.AFFINE))
SYMMETRIC: tl.constexpr = tl.constexpr(int(Form.SYMMETRIC))
CHANNEL_AFFINE: tl.constexpr = tl.constexpr(int(Form.CHANNEL_AFFINE))
CHANNEL_MINMAX: tl.constexpr = tl.constexpr(int(Form.CHANNEL_MINMAX))
# A matrix unit's smallest product has as many columns.
FEWEST_COLUMNS = 16
# Directions whose operand a program keeps; more are taken in parts of as many.
MOST_KEPT: tl.constexpr = tl.constexpr(16)


@triton.jit
def exact(
    row,
    first,
    local,
    inside,
    tokens,
    stream,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """BF16 ``[tokens, words, lanes]`` as stored."""
    channel = tl.arange(0, WORDS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    values = tl.load(row + CODES).to(tl.pointer_type(tl.bfloat16)) + (stream * tokens + first) * CHANNELS
    addresses = values + (local[:, None, None] * CHANNELS + channel)
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 1, 2 * LANES))
    return tl.load(addresses, mask=inside & (channel < CHANNELS), other=0.0)


@triton.jit
def coded(
    row, first, local, exists, inside, tokens, stream, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """FP32 ``[tokens, words, lanes]`` without compensation, summed in the order of the reference."""
    if FORM <= SYMMETRIC:
        total = residual(row, first, local, inside, tokens, stream, CHANNELS, GROUP, FORM == SYMMETRIC, LANES, WORDS)
    elif FORM == CHANNEL_AFFINE:
        total = channel_residual(row, first, local, inside, tokens, stream, CHANNELS, GROUP, LANES, WORDS)
    else:
        total = minmax(row, first, local, inside, tokens, stream, CHANNELS, GROUP, FORM == CHANNEL_MINMAX, LANES, WORDS)
    for stage in tl.static_range(STAGES):
        last: tl.constexpr = STAGES - 1 - stage
        total += centroid(row, first, local, exists, inside, tokens, stream, last, CHANNELS, LANES, WORDS, ALIGNED)
    return total


@triton.jit
def compensation(
    row, kept, flag, place, first, local, exists, tokens, stream,
    CHANNELS: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, SPARSE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """FP32 ``[tokens, WIDE]`` that PSAC adds."""
    if RANK <= MOST_KEPT:
        steps = steps_operand(
            row, flag, place, first, local, exists, tokens, 0, RANK, PADDED, PADDED, SPARSE, BLOCK_TOKENS
        )
        total = tl.dot(steps, kept, input_precision="ieee")
    else:
        total = tl.zeros((BLOCK_TOKENS, WIDE), tl.float32)
        for begin in range(0, RANK, PADDED):
            steps = steps_operand(
                row, flag, place, first, local, exists, tokens, begin, RANK, PADDED, WIDE, SPARSE, BLOCK_TOKENS
            )
            part = directions(row, stream, begin, CHANNELS, RANK, PADDED, WIDE)
            total = tl.dot(steps, part, total, input_precision="ieee")
    return total


@triton.jit
def write(
    out,
    number,
    local,
    inside,
    stride,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store BF16 ``[tokens, words, lanes]``."""
    channel = tl.arange(0, WORDS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    addresses = out + (local[:, None, None] * stride + channel)
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 1, 2 * LANES))
    if CHANNELS % LANES:
        inside &= channel < CHANNELS
    tl.store(addresses, number, mask=inside)


@triton.jit
def read_tokens(
    row, begin, span, stream, out, stride, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct ``span`` tokens from ``begin`` of one unit and stream, ``BLOCK_TOKENS`` at a time."""
    WIDE: tl.constexpr = WORDS * LANES
    PADDED: tl.constexpr = 8 if RANK <= 8 else MOST_KEPT
    tokens = tl.load(row + TOKENS)
    stop = tl.minimum(begin + span, tl.load(row + STOP))
    shift = tl.load(row + SHIFT)
    compensated = False
    if RANK:
        compensated = tl.load(row + BASIS) != 0
        flag, place = place_of(row, stream, SPARSE)
        kept = directions(row, stream, 0, CHANNELS, RANK, PADDED, WIDE)
    local = tl.arange(0, BLOCK_TOKENS)
    word_exists = (tl.arange(0, WORDS) < (CHANNELS + LANES - 1) // LANES)[None, :, None]
    for first in range(begin, stop, BLOCK_TOKENS):
        exists = local < stop - first
        inside = exists[:, None, None] & word_exists
        if FORM == EXACT:
            number = exact(row, first, local, inside, tokens, stream, CHANNELS, LANES, WORDS, ALIGNED)
        else:
            total = coded(
                row, first, local, exists, inside, tokens, stream, FORM, CHANNELS, GROUP, STAGES, LANES, WORDS, ALIGNED
            )
            if RANK:
                if compensated:
                    extra = compensation(
                        row, kept, flag, place, first, local, exists, tokens, stream,
                        CHANNELS, RANK, PADDED, WIDE, SPARSE, BLOCK_TOKENS,
                    )  # fmt: skip
                    total += tl.reshape(extra, (BLOCK_TOKENS, WORDS, LANES))
            number = to_bf16(total)
        write(out + (first + shift) * stride, number, local, inside, stride, CHANNELS, LANES, WORDS, ALIGNED)


@triton.jit(
    do_not_specialize=["key_programs", "span", "heads"]
    + [f"{kind}_{axis}" for kind in ("key", "value") for axis in ("batch", "head", "token")]
)
def read_kernel(
    table, keys, values, key_programs, span, heads,
    key_batch, key_head, key_token, value_batch, value_head, value_token,
    KEY_FORM: tl.constexpr, KEY_CHANNELS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_STAGES: tl.constexpr,
    KEY_RANK: tl.constexpr, KEY_SPARSE: tl.constexpr, KEY_WORDS: tl.constexpr,
    VALUE_FORM: tl.constexpr, VALUE_CHANNELS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_STAGES: tl.constexpr,
    VALUE_RANK: tl.constexpr, VALUE_SPARSE: tl.constexpr, VALUE_WORDS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Programs along the first axis take units, those of the keys first; along the second, streams."""
    program = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    batch, head = stream // heads, stream % heads
    entry = tl.load(table + program)
    row = table + (entry >> 32)
    begin = entry & 0xFFFFFFFF
    if program < key_programs:
        out = keys + (batch * key_batch + head * key_head)
        read_tokens(
            row, begin, span, stream, out, key_token, KEY_FORM, KEY_CHANNELS, KEY_GROUP, KEY_STAGES,
            KEY_RANK, KEY_SPARSE, KEY_WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    else:
        out = values + (batch * value_batch + head * value_head)
        read_tokens(
            row, begin, span, stream, out, value_token, VALUE_FORM, VALUE_CHANNELS, VALUE_GROUP, VALUE_STAGES,
            VALUE_RANK, VALUE_SPARSE, VALUE_WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip


def read(batch: Batch, keys: Tensor, values: Tensor) -> None:
    """Launch a batch.

    Args:
        batch: What to read; its tables live where the tensors do.
        keys, values: BF16 ``[B, H, S, D]`` with consecutive channels; ``values`` is not touched if no part is of values.

    Raises:
        DeviceError: No kernel runs where they live.
    """
    strides = (*keys.stride()[:3], *values.stride()[:3])
    aligned = batch.aligned and not (keys.data_ptr() | values.data_ptr()) % VECTOR_NBYTES
    lanes = 8 if batch.eight and aligned and not any(stride % 8 for stride in strides) else 4
    aligned = aligned and not any(number % lanes for number in (*strides, batch.keys.channels, batch.values.channels))
    with on_device(keys, "workspace"):
        read_kernel[(batch.programs, batch.batch * batch.heads)](
            batch.table,
            keys,
            values,
            batch.key_programs,
            batch.span,
            batch.heads,
            *strides,
            **constants("KEY", batch.keys, lanes),
            **constants("VALUE", batch.values, lanes),
            LANES=lanes,
            ALIGNED=aligned,
            **batch.launch.options,
        )


def constants(kind: str, recipe: Recipe, lanes: int) -> dict[str, int]:
    """A recipe as compile-time arguments of the kernel."""
    return {
        f"{kind}_FORM": int(recipe.form),
        f"{kind}_CHANNELS": recipe.channels,
        f"{kind}_GROUP": recipe.group,
        f"{kind}_STAGES": recipe.stages,
        f"{kind}_RANK": recipe.rank,
        f"{kind}_SPARSE": int(recipe.sparse),
        f"{kind}_WORDS": triton.next_power_of_2(max(-(-recipe.channels // lanes), FEWEST_COLUMNS // lanes)),
    }
