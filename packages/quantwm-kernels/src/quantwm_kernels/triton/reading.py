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
from quantwm_kernels.triton.clustered import (
    CODES,
    FOUR_BITS,
    centroid,
    channel_residual,
    codes_at,
    halves_at,
    residual,
    scales_at,
    stage_at,
)
from quantwm_kernels.triton.compensation import correction, kept_directions, place_of, steps_at
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.minmax import minima_at, minmax

TOKENS: tl.constexpr = tl.constexpr(int(Field.TOKENS))
STOP: tl.constexpr = tl.constexpr(int(Field.STOP))
SHIFT: tl.constexpr = tl.constexpr(int(Field.SHIFT))
EXACT: tl.constexpr = tl.constexpr(int(Form.EXACT))
SYMMETRIC: tl.constexpr = tl.constexpr(int(Form.SYMMETRIC))
CHANNEL_AFFINE: tl.constexpr = tl.constexpr(int(Form.CHANNEL_AFFINE))
CHANNEL_MINMAX: tl.constexpr = tl.constexpr(int(Form.CHANNEL_MINMAX))
# A matrix unit's smallest product has as many columns.
FEWEST_COLUMNS = 16


@triton.jit
def exact(
    values, first, local, inside, CHANNELS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """BF16 ``[tokens, words, lanes]`` as stored."""
    channel = tl.arange(0, WORDS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    addresses = values + first * CHANNELS + (local[:, None, None] * CHANNELS + channel)
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 1, 2 * LANES))
    if CHANNELS % LANES:
        inside &= channel < CHANNELS
    return tl.load(addresses, mask=inside).to(tl.bfloat16, bitcast=True)


@triton.jit
def write(
    out, number, local, inside, stride,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store BF16 ``[tokens, words, lanes]``."""
    channel = tl.arange(0, WORDS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    addresses = out + (local[:, None, None] * stride + channel)
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 1, 2 * LANES))
    if CHANNELS % LANES:
        inside &= channel < CHANNELS
    tl.store(addresses, number, mask=inside)


@triton.jit
def read_exact(
    row, begin, stop, tokens, stream, out, stride,
    CHANNELS: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Copy tokens."""
    values = halves_at(tl.load(row + CODES), stream * tokens * CHANNELS)
    local = tl.arange(0, BLOCK_TOKENS)
    word_exists = (tl.arange(0, WORDS) < (CHANNELS + LANES - 1) // LANES)[None, :, None]
    for first in range(begin, stop, BLOCK_TOKENS):
        inside = (local < stop - first)[:, None, None] & word_exists
        number = exact(values, first, local, inside, CHANNELS, LANES, WORDS, ALIGNED)
        write(out + first * stride, number, local, inside, stride, CHANNELS, LANES, WORDS, ALIGNED)


@triton.jit
def read_channel_groups(
    row, begin, stop, tokens, stream, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens whose scales are found channel by channel."""
    codes = codes_at(row, stream, tokens, CHANNELS, LANES)
    if FORM == CHANNEL_AFFINE:
        scales, zero_points, super_scale = scales_at(row, stream, tokens, CHANNELS, GROUP, True, False)
    else:
        scales, minima = minima_at(row, stream, tokens, CHANNELS, GROUP, FORM == CHANNEL_MINMAX)
    local = tl.arange(0, BLOCK_TOKENS)
    word_exists = (tl.arange(0, WORDS) < (CHANNELS + LANES - 1) // LANES)[None, :, None]
    for first in range(begin, stop, BLOCK_TOKENS):
        inside = (local < stop - first)[:, None, None] & word_exists
        if FORM == CHANNEL_AFFINE:
            total = channel_residual(
                codes, scales, zero_points, super_scale, four, first, local, inside, CHANNELS, GROUP, LANES, WORDS
            )
        else:
            by_channel: tl.constexpr = FORM == CHANNEL_MINMAX
            total = minmax(
                codes, scales, minima, four, first, local, inside, tokens, CHANNELS, GROUP, by_channel, LANES, WORDS
            )
        write(out + first * stride, to_bf16(total), local, inside, stride, CHANNELS, LANES, WORDS, ALIGNED)


@triton.jit
def read_clustered(
    row, begin, stop, tokens, stream, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens from residuals, centroids and coefficients, summed in the order of the reference."""
    symmetric: tl.constexpr = FORM == SYMMETRIC
    codes = codes_at(row, stream, tokens, CHANNELS, LANES)
    scales, zero_points, super_scale = scales_at(row, stream, tokens, CHANNELS, GROUP, False, symmetric)
    if STAGES:
        index, table, last_row = stage_at(row, stream, tokens, 0, CHANNELS)
    if RANK:
        flag, place, compensated = place_of(row, stream, SPARSE)
        dense, bitmap, counts, values, size = steps_at(row, place, tokens, RANK, SPARSE)
        kept = kept_directions(row, stream, compensated, CHANNELS, RANK, WORDS * LANES)
    local = tl.arange(0, BLOCK_TOKENS)
    word_exists = (tl.arange(0, WORDS) < CHANNELS // LANES)[None, :, None]
    for first in range(begin, stop, BLOCK_TOKENS):
        exists = local < stop - first
        inside = exists[:, None, None] & word_exists
        total = residual(
            codes,
            scales,
            zero_points,
            super_scale,
            four,
            first,
            local,
            inside,
            CHANNELS,
            GROUP,
            symmetric,
            LANES,
            WORDS,
        )
        for later in tl.static_range(STAGES - 1):
            i, t, n = stage_at(row, stream, tokens, STAGES - 1 - later, CHANNELS)
            total += centroid(i, t, n, first, local, exists, inside, CHANNELS, LANES, WORDS, ALIGNED, BLOCK_TOKENS)
        if STAGES:
            total += centroid(
                index, table, last_row, first, local, exists, inside, CHANNELS, LANES, WORDS, ALIGNED, BLOCK_TOKENS
            )
        if RANK and compensated:
            extra = correction(
                row, stream, kept, dense, bitmap, counts, values, size, flag, first, local, exists,
                CHANNELS, RANK, WORDS * LANES, SPARSE, BLOCK_TOKENS,
            )  # fmt: skip
            total += tl.reshape(extra, (BLOCK_TOKENS, WORDS, LANES))
        write(out + first * stride, to_bf16(total), local, inside, stride, CHANNELS, LANES, WORDS, ALIGNED)


@triton.jit
def read_tokens(
    row, begin, span, stream, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct ``span`` tokens from ``begin`` of one unit and stream, ``BLOCK_TOKENS`` at a time."""
    tokens = tl.load(row + TOKENS)
    stop = tl.minimum(begin + span, tl.load(row + STOP))
    out += tl.load(row + SHIFT) * stride
    if FORM == EXACT:
        read_exact(row, begin, stop, tokens, stream, out, stride, CHANNELS, WORDS, LANES, ALIGNED, BLOCK_TOKENS)
    elif FORM <= SYMMETRIC:
        read_clustered(
            row, begin, stop, tokens, stream, out, stride, four, FORM, CHANNELS, GROUP, STAGES, RANK, SPARSE, WORDS, LANES,
            ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    else:
        read_channel_groups(
            row,
            begin,
            stop,
            tokens,
            stream,
            out,
            stride,
            four,
            FORM,
            CHANNELS,
            GROUP,
            WORDS,
            LANES,
            ALIGNED,
            BLOCK_TOKENS,
        )


@triton.jit(
    do_not_specialize=["key_programs", "span", "heads", "four"]
    + [f"{kind}_{axis}" for kind in ("key", "value") for axis in ("batch", "head", "token")]
)
def read_kernel(
    table, keys, values, key_programs, span, heads, four,
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
            row, begin, span, stream, out, key_token, four, KEY_FORM, KEY_CHANNELS, KEY_GROUP, KEY_STAGES,
            KEY_RANK, KEY_SPARSE, KEY_WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    else:
        out = values + (batch * value_batch + head * value_head)
        read_tokens(
            row, begin, span, stream, out, value_token, four, VALUE_FORM, VALUE_CHANNELS, VALUE_GROUP, VALUE_STAGES,
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
            FOUR_BITS,
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
