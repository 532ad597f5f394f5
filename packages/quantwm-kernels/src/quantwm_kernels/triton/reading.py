"""One launch that reconstructs the keys and values of a layer: any number of sealed units, all streams, every method.

A program takes consecutive tokens of one unit of one stream. The table that it finds them in begins with a word per
program along the first axis of the grid, ``row << 32 | first token``; rows are described in
:mod:`quantwm_kernels.recipe`.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from quantwm_kernels.launch import next_power_of_two, on_device
from quantwm_kernels.reading import Batch
from quantwm_kernels.recipe import VECTOR_NBYTES, Field, Recipe
from quantwm_kernels.triton.arithmetic import product
from quantwm_kernels.triton.clustered import FOUR_BITS, centroid_rows
from quantwm_kernels.triton.compensation import WORDS_PER_PART
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.tile import (
    AFFINE,
    ROTATED,
    SYMMETRIC,
    TRANSFORM,
    clustered,
    compensation,
    opened,
    part_steps,
    simple,
)
from quantwm_kernels.triton.transform import (
    MOST_KEPT,
    coordinates,
    in_columns,
    in_stored_rows,
    laid_out,
    levels,
    matrix_rows,
    means_of,
    packed_codes,
    stored_rows,
    transformed,
    transformed_part,
)

TOKENS: tl.constexpr = tl.constexpr(int(Field.TOKENS))
STOP: tl.constexpr = tl.constexpr(int(Field.STOP))
SHIFT: tl.constexpr = tl.constexpr(int(Field.SHIFT))
# A part of the product with the basis has as many, and no matrix unit multiplies fewer columns.
FEWEST_WORDS = WORDS_PER_PART.value


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
def read_parts(
    row, stream, tokens, codes, scales, zeros, super_scale, step, zero, table, chosen, product, four, first, local,
    exists, out, stride, PART: tl.constexpr, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, TABLE_BITS: tl.constexpr, RANK: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct and store a tile's channels from part ``PART``.

    All is read before anything is stored: behind a store that might be to the same place, a read has to wait.
    ``step`` and ``zero`` are those of the part before.
    """
    width: tl.constexpr = WORDS_PER_PART * LANES
    word = tl.arange(0, WORDS_PER_PART) + PART * WORDS_PER_PART
    inside = exists[:, None, None] & (word < CHANNELS // LANES)[None, :, None]
    if PART == 0 or width * PART % GROUP == 0 or width * (GROUP // width) != GROUP:
        step, zero = part_steps(
            scales, zeros, super_scale, four, first, local, exists, word, inside, PART,
            CHANNELS, GROUP, LANES, FORM == SYMMETRIC,
        )  # fmt: skip
    number = clustered(
        row, stream, tokens, codes, step, zero, table, chosen, product, four, first, local, exists, word,
        inside, PART, CHANNELS, STAGES, TABLE_BITS, RANK, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
    )  # fmt: skip
    if width * (PART + 1) < CHANNELS:
        read_parts(
            row, stream, tokens, codes, scales, zeros, super_scale, step, zero, table, chosen, product, four, first,
            local, exists, out, stride, PART + 1, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, WORDS, LANES,
            ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    write(out, number, local, exists, stride, PART * width, CHANNELS, LANES, ALIGNED, width)


@triton.jit
def read_products(
    row, begin, stop, stream, tokens, out, stride, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens ``begin`` to ``stop`` of a transform code or a rotation; codes are asked for a tile ahead."""
    WIDE: tl.constexpr = WORDS * LANES
    keeps: tl.constexpr = RANK * WIDE <= MOST_KEPT
    part_width: tl.constexpr = WORDS_PER_PART * LANES
    local = tl.arange(0, BLOCK_TOKENS)
    kept, ahead, byte, width = local, local, local, local
    address, size = begin, 0
    if keeps:
        matrix = matrix_rows(row, stream, 0, FORM, CHANNELS, RANK, WIDE, ALIGNED)
        kept = in_columns(matrix, RANK, WIDE, LANES)
    if keeps and FORM == TRANSFORM:
        address, size, byte, width = laid_out(row, stream, 0, RANK)
        ahead = packed_codes(address, size, byte, width, begin, local, local < stop - begin, GROUP)
    mean = means_of(row, stream, FORM, CHANNELS, WIDE, LANES)
    stored = stored_rows(BLOCK_TOKENS)
    for first in range(begin, stop, BLOCK_TOKENS):
        exists = local < stop - first
        total = tl.zeros((BLOCK_TOKENS, WIDE), tl.float32)
        if keeps and FORM == TRANSFORM:
            number = levels(ahead, byte, width, GROUP, BLOCK_TOKENS, RANK)
            following = first + BLOCK_TOKENS
            ahead = packed_codes(address, size, byte, width, following, local, local < stop - following, GROUP)
            total = product(number, kept, total)
        elif keeps:
            number = coordinates(row, stream, tokens, first, local, exists, tl.arange(0, RANK), CHANNELS, GROUP)
            total = product(number, kept, total)
        else:
            total = transformed(
                row,
                stream,
                tokens,
                first,
                local,
                exists,
                FORM,
                CHANNELS,
                GROUP,
                RANK,
                WIDE,
                LANES,
                ALIGNED,
                BLOCK_TOKENS,
            )
        total += mean[None, :]
        for part in tl.static_range((CHANNELS + part_width - 1) // part_width):
            number = in_stored_rows(transformed_part(total, part, WORDS, LANES, BLOCK_TOKENS), part_width, BLOCK_TOKENS)
            write(
                out + first * stride, number, stored, stored < stop - first, stride, part * part_width,
                CHANNELS, LANES, ALIGNED, part_width,
            )  # fmt: skip


@triton.jit
def read_tokens(
    row, begin, stop, stream, tokens, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, TABLE_BITS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct tokens ``begin`` to ``stop`` of a unit of any other form, ``BLOCK_TOKENS`` at a time."""
    (
        codes, scales, zeros, super_scale, index, table, last_row,
        compensated, kept, flag, dense, bitmap, counts, values, size,
    ) = opened(row, stream, tokens, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, SPARSE, WORDS, LANES)  # fmt: skip
    local = tl.arange(0, BLOCK_TOKENS)
    ahead = local
    if STAGES:
        ahead = centroid_rows(index, last_row, begin, local, local < stop - begin)
    for first in range(begin, stop, BLOCK_TOKENS):
        exists = local < stop - first
        place = out + first * stride
        if FORM == AFFINE or FORM == SYMMETRIC:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
            chosen, correction = ahead, local
            if STAGES:  # asked for a tile ahead: centroids can be fetched at once
                following = first + BLOCK_TOKENS
                ahead = centroid_rows(index, last_row, following, local, local < stop - following)
            if RANK:
                correction = compensation(
                    row, stream, compensated, kept, flag, dense, bitmap, counts, values, size, first, local, exists,
                    CHANNELS, RANK, WORDS * LANES, LANES, SPARSE, BLOCK_TOKENS,
                )  # fmt: skip
            read_parts(
                row, stream, tokens, codes, scales, zeros, super_scale, four, four, table, chosen, correction, four, first,
                local, exists, place, stride, 0, FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, WORDS, LANES, ALIGNED,
                BLOCK_TOKENS,
            )  # fmt: skip
        else:
            number = simple(
                codes, scales, zeros, super_scale, four, first, local, exists, tokens,
                FORM, CHANNELS, GROUP, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
            )  # fmt: skip
            write(place, number, local, exists, stride, 0, CHANNELS, LANES, ALIGNED, WORDS * LANES)


@triton.jit
def read_unit(
    row, begin, span, stream, out, stride, four, FORM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, TABLE_BITS: tl.constexpr, RANK: tl.constexpr, SPARSE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Reconstruct ``span`` tokens from ``begin`` of one unit and stream."""
    tokens = tl.load(row + TOKENS)
    stop = tl.minimum(begin + span, tl.load(row + STOP))
    out += tl.load(row + SHIFT) * stride
    if FORM == TRANSFORM or FORM == ROTATED:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
        read_products(
            row, begin, stop, stream, tokens, out, stride,
            FORM, CHANNELS, GROUP, RANK, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    else:
        read_tokens(
            row, begin, stop, stream, tokens, out, stride, four,
            FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, SPARSE, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip


@kernel(
    do_not_specialize=["key_programs", "span", "heads", "four"]
    + [f"{kind}_{axis}" for kind in ("key", "value") for axis in ("batch", "head", "token")]
)
def read_kernel(
    table, keys, values, key_programs, span, heads, four,
    key_batch, key_head, key_token, value_batch, value_head, value_token,
    KEY_FORM: tl.constexpr, KEY_CHANNELS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_STAGES: tl.constexpr,
    KEY_TABLE_BITS: tl.constexpr, KEY_RANK: tl.constexpr, KEY_SPARSE: tl.constexpr, KEY_WORDS: tl.constexpr,
    VALUE_FORM: tl.constexpr, VALUE_CHANNELS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_STAGES: tl.constexpr,
    VALUE_TABLE_BITS: tl.constexpr, VALUE_RANK: tl.constexpr, VALUE_SPARSE: tl.constexpr, VALUE_WORDS: tl.constexpr,
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
        read_unit(
            row, begin, span, stream, out, key_token, four, KEY_FORM, KEY_CHANNELS, KEY_GROUP, KEY_STAGES,
            KEY_TABLE_BITS, KEY_RANK, KEY_SPARSE, KEY_WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    else:
        out = values + (batch * value_batch + head * value_head)
        read_unit(
            row, begin, span, stream, out, value_token, four, VALUE_FORM, VALUE_CHANNELS, VALUE_GROUP, VALUE_STAGES,
            VALUE_TABLE_BITS, VALUE_RANK, VALUE_SPARSE, VALUE_WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip


def read(batch: Batch, keys: Tensor, values: Tensor) -> None:
    """Launch a batch.

    Args:
        batch: What to read; its tables live where the tensors do.
        keys, values: BF16 ``[B, H, S, D]`` with consecutive channels; ``values`` is not touched if no part is of values.

    Raises:
        DeviceError: No kernel runs where they live.
    """
    where = (keys.data_ptr(), values.data_ptr(), keys.stride(), values.stride())
    with on_device(keys, "workspace"):
        if where in batch.again:
            batch.again[where]()
        else:
            batch.again.clear()
            batch.again[where] = _launched(batch, keys, values)


def _launched(batch: Batch, keys: Tensor, values: Tensor) -> Callable[[], object]:
    """Launch, and return what reads the same into the same places again."""
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
    return read_kernel[batch.programs, batch.batch * batch.heads](
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
        f"{kind}_SPARSE": int(recipe.steps),
        f"{kind}_TABLE_BITS": recipe.centroid_bits,
        f"{kind}_WORDS": next_power_of_two(max(-(-recipe.channels // lanes), FEWEST_WORDS)),
    }
