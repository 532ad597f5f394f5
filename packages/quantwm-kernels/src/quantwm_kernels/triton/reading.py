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
from quantwm_kernels.reading_batches import Batch
from quantwm_kernels.recipe import VECTOR_NBYTES, Field, Recipe
from quantwm_kernels.triton.clustered import FOUR_BITS
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.rows import WORDS_PER_PART
from quantwm_kernels.triton.span import read_grouped, read_products, read_simple
from quantwm_kernels.triton.tile import AFFINE, ROTATED, SYMMETRIC, TRANSFORM

TOKENS: tl.constexpr = tl.constexpr(int(Field.TOKENS))
STOP: tl.constexpr = tl.constexpr(int(Field.STOP))
SHIFT: tl.constexpr = tl.constexpr(int(Field.SHIFT))
# A part of a tile has as many, and no matrix unit multiplies fewer columns.
FEWEST_WORDS = WORDS_PER_PART.value


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
            row, begin, stop, stream, tokens, out, stride, four,
            FORM, CHANNELS, GROUP, RANK, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    elif FORM == AFFINE or FORM == SYMMETRIC:  # noqa: PLR1714, SIM109 - Triton compiles no membership test
        read_grouped(
            row, begin, stop, stream, tokens, out, stride, four,
            FORM, CHANNELS, GROUP, STAGES, TABLE_BITS, RANK, SPARSE, WORDS, LANES, ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    else:
        read_simple(
            row, begin, stop, stream, tokens, out, stride, four, FORM, CHANNELS, GROUP, WORDS, LANES, ALIGNED, BLOCK_TOKENS
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
        again = batch.again.get(where)  # once: layers of several threads may share a batch
        if again is None:
            batch.again.clear()
            batch.again[where] = _launched(batch, keys, values)
        else:
            again()


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
    numbers = (batch.key_programs, batch.span, batch.heads, FOUR_BITS, *strides)
    grid = (batch.programs, batch.batch * batch.heads)
    return read_kernel.repeat(
        (numbers, grid, batch.keys, batch.values, lanes, aligned),
        (batch.table, keys, values),
        batch.launch.options,
        lambda: (
            grid,
            numbers,
            {
                **constants("KEY", batch.keys, lanes),
                **constants("VALUE", batch.values, lanes),
                "LANES": lanes,
                "ALIGNED": aligned,
            },
        ),
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
