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
    centroid_rows,
    channel_residual,
    codes_at,
    four_plus_codes,
    group_steps,
    halves_at,
    scales_at,
    stage_at,
)
from quantwm_kernels.triton.compensation import (
    WORDS_PER_PART,
    correction,
    kept_directions,
    part_of,
    place_of,
    steps_at,
)
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.minmax import minima_at, minmax

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


@triton.jit
def exact(
    values, first, local, exists,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, WIDE]`` as stored."""
    channel = tl.arange(0, WIDE)
    addresses = values + first * CHANNELS + (local[:, None] * CHANNELS + channel[None, :])
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 2 * LANES))
    inside = exists[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(addresses, mask=inside).to(tl.bfloat16, bitcast=True)


@triton.jit
def write(
    out, number, local, exists, stride, FIRST: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store BF16 ``[tokens, WIDE]`` from channel ``FIRST``."""
    channel = tl.arange(0, WIDE) + FIRST
    addresses = out + (local[:, None] * stride + channel[None, :])
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 2 * LANES))
    tl.store(addresses, number, mask=exists[:, None] & (channel < CHANNELS)[None, :])


@triton.jit
def read_simple(
    row, begin, stop, tokens, stream, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens that are stored exactly, or whose scales are found channel by channel."""
    by_channel: tl.constexpr = FORM == CHANNEL_MINMAX
    if FORM == EXACT:
        values = halves_at(tl.load(row + CODES), stream * tokens * CHANNELS)
    elif FORM == CHANNEL_AFFINE:
        codes = codes_at(row, stream, tokens, CHANNELS, LANES)
        scales, zero_points, super_scale = scales_at(row, stream, tokens, CHANNELS, GROUP, True, False)
    else:
        codes = codes_at(row, stream, tokens, CHANNELS, LANES)
        scales, minima = minima_at(row, stream, tokens, CHANNELS, GROUP, by_channel)
    local, word = tl.arange(0, BLOCK_TOKENS), tl.arange(0, WORDS)
    for first in range(begin, stop, BLOCK_TOKENS):
        exists = local < stop - first
        inside = exists[:, None, None] & (word < (CHANNELS + LANES - 1) // LANES)[None, :, None]
        if FORM == EXACT:
            number = exact(values, first, local, exists, CHANNELS, LANES, ALIGNED, WORDS * LANES)
        elif FORM == CHANNEL_AFFINE:
            total = channel_residual(
                codes, scales, zero_points, super_scale, four, first, local, word, inside, CHANNELS, GROUP, LANES
            )
            number = tl.reshape(to_bf16(total), (BLOCK_TOKENS, WORDS * LANES))
        else:
            total = minmax(
                codes, scales, minima, four, first, local, word, inside, tokens, CHANNELS, GROUP, by_channel, LANES
            )
            number = tl.reshape(to_bf16(total), (BLOCK_TOKENS, WORDS * LANES))
        write(out + first * stride, number, local, exists, stride, 0, CHANNELS, LANES, ALIGNED, WORDS * LANES)


@triton.jit
def read_clustered(  # noqa: C901 - most branches are decided at compile time
    row, begin, stop, tokens, stream, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens from residuals, centroids and coefficients, summed in the order of the reference.

    Channels are taken in parts of four words, as the product with the basis has them.
    """
    symmetric: tl.constexpr = FORM == SYMMETRIC
    parts: tl.constexpr = WORDS // WORDS_PER_PART
    width: tl.constexpr = WORDS_PER_PART * LANES
    groups: tl.constexpr = CHANNELS // GROUP
    codes = codes_at(row, stream, tokens, CHANNELS, LANES)
    scales, zero_points, super_scale = scales_at(row, stream, tokens, CHANNELS, GROUP, False, symmetric)
    if STAGES:
        index, table, last_row = stage_at(row, stream, tokens, 0, CHANNELS)
    if RANK:
        flag, place, compensated = place_of(row, stream, SPARSE)
        dense, bitmap, counts, values, size = steps_at(row, place, tokens, RANK, SPARSE)
        kept = kept_directions(row, stream, compensated, CHANNELS, RANK, WORDS * LANES, LANES)
    local, word_of_part = tl.arange(0, BLOCK_TOKENS), tl.arange(0, WORDS_PER_PART)
    for first in range(begin, stop, BLOCK_TOKENS):
        exists = local < stop - first
        if STAGES:
            chosen = centroid_rows(index, last_row, first, local, exists)
        if RANK:
            product = tl.full((BLOCK_TOKENS, WORDS * LANES), -0.0, tl.float32)  # adding this changes no bit
            if compensated:
                product = correction(
                    row, stream, kept, dense, bitmap, counts, values, size, flag, first, local, exists,
                    CHANNELS, RANK, WORDS * LANES, LANES, SPARSE, BLOCK_TOKENS,
                )  # fmt: skip
        for part in tl.static_range((CHANNELS + width - 1) // width):
            word = word_of_part + part * WORDS_PER_PART
            inside = exists[:, None, None] & (word < CHANNELS // LANES)[None, :, None]
            if width * (GROUP // width) != GROUP:
                group = (word * LANES // GROUP)[None, :, None]
                step, zero = group_steps(
                    scales, zero_points, super_scale, four, first, local, group, inside, groups, symmetric
                )
            elif width * part % GROUP == 0:
                group = width * part // GROUP
                step, zero = group_steps(
                    scales,
                    zero_points,
                    super_scale,
                    four,
                    first,
                    local,
                    group,
                    exists[:, None, None],
                    groups,
                    symmetric,
                )
            total = (four_plus_codes(codes, four, first, local, word, inside, CHANNELS, LANES) - zero) * step
            for later in tl.static_range(STAGES - 1):
                i, t, n = stage_at(row, stream, tokens, STAGES - 1 - later, CHANNELS)
                rows = centroid_rows(i, n, first, local, exists)
                total += centroid(t, rows, exists, part * width, CHANNELS, LANES, ALIGNED, BLOCK_TOKENS, WORDS_PER_PART)
            if STAGES:
                total += centroid(
                    table, chosen, exists, part * width, CHANNELS, LANES, ALIGNED, BLOCK_TOKENS, WORDS_PER_PART
                )
            if RANK:
                total += part_of(product, part, parts, LANES, BLOCK_TOKENS)
            number = tl.reshape(to_bf16(total), (BLOCK_TOKENS, width))
            write(out + first * stride, number, local, exists, stride, part * width, CHANNELS, LANES, ALIGNED, width)


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
    if FORM == AFFINE or FORM == SYMMETRIC:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
        read_clustered(
            row, begin, stop, tokens, stream, out, stride, four, FORM, CHANNELS, GROUP, STAGES, RANK, SPARSE, WORDS, LANES,
            ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    else:
        read_simple(
            row, begin, stop, tokens, stream, out, stride, four, FORM, CHANNELS, GROUP, WORDS, LANES, ALIGNED, BLOCK_TOKENS
        )  # fmt: skip


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
    places = keys.data_ptr() | values.data_ptr()
    vectors = batch.aligned and not places % VECTOR_NBYTES
    union = 0
    for stride in strides:
        union |= stride
    lanes = 8 if batch.eight and vectors and not union % 8 else 4
    aligned = vectors and not (union | batch.keys.channels | batch.values.channels) % lanes
    if (lanes, aligned) not in batch.prepared:
        fixed = constants("KEY", batch.keys, lanes) | constants("VALUE", batch.values, lanes)
        batch.prepared[lanes, aligned] = {**fixed, "LANES": lanes, "ALIGNED": aligned, **batch.launch.options}
    with on_device(keys, "workspace"):
        read_kernel[batch.programs, batch.batch * batch.heads](
            batch.table,
            keys,
            values,
            batch.key_programs,
            batch.span,
            batch.heads,
            FOUR_BITS,
            *strides,
            **batch.prepared[lanes, aligned],
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
