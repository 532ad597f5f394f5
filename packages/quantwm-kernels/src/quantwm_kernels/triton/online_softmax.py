"""An online softmax over tiles of keys and values: the loops of a program of attention, and how it ends.

Logits are kept to base 2. What has been folded is a largest logit, a sum of powers and a sum of weighted values per query row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.recipe import Field
from quantwm_kernels.triton.clustered import halves_at
from quantwm_kernels.triton.domain import MATRIX_DTYPE, to_bf16
from quantwm_kernels.triton.rows import reordered
from quantwm_kernels.triton.tile import TRANSFORM, kept_operand, opened, reconstructed
from quantwm_kernels.triton.transform import codes_of, numbers_of, packed_codes, rotated_queries

TOKENS: tl.constexpr = tl.constexpr(int(Field.TOKENS))
# Elements of a matrix that queries are rotated by: beside their own they must fit into fast memory.
MOST_ROTATED: tl.constexpr = tl.constexpr(128 * 128)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def exact_tile(
    row, batch, head, first, local, CHANNELS: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """BF16 ``[tokens, WIDE]`` of a plain tensor, whose address and strides by batch, head and token stand in ``row``."""
    channel = tl.arange(0, WIDE)
    by_batch, by_head, stride = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    begin = batch * by_batch + head * by_head + first * stride
    addresses = halves_at(tl.load(row), begin) + (local[:, None] * stride + channel[None, :])
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 16))
    number = tl.load(addresses, mask=(channel < CHANNELS)[None, :], other=0)
    return number.to(tl.bfloat16, bitcast=True)


@triton.jit
def folded(queries, keys, lift, values, exists, scale, peak, total, output):
    """Fold a tile into the online softmax: largest logit so far (to base 2), sum of powers, sum of weighted values.

    ``lift`` is added to a query's products with its keys.
    """
    logits = (tl.dot(queries, tl.trans(keys.to(MATRIX_DTYPE)), input_precision="ieee") + lift[:, None]) * scale
    logits = tl.where(exists[None, :], logits, float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, axis=1))
    powers = tl.exp2(logits - higher[:, None])
    shrunk = tl.exp2(peak - higher)
    total = total * shrunk + tl.sum(powers, axis=1)
    weights = to_bf16(powers).to(MATRIX_DTYPE)
    output = tl.dot(weights, values.to(MATRIX_DTYPE), output * shrunk[:, None], input_precision="ieee")
    return higher, total, output


@triton.jit
def folded_unit(
    table, entry, stream, asked, nothing, scale, four, peak, total, output, ROTATES: tl.constexpr,
    KEY_FORM: tl.constexpr, KEY_CHANNELS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_STAGES: tl.constexpr,
    KEY_TABLE_BITS: tl.constexpr, KEY_RANK: tl.constexpr, KEY_SPARSE: tl.constexpr, KEY_WORDS: tl.constexpr,
    VALUE_FORM: tl.constexpr, VALUE_CHANNELS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_STAGES: tl.constexpr,
    VALUE_TABLE_BITS: tl.constexpr, VALUE_RANK: tl.constexpr, VALUE_SPARSE: tl.constexpr, VALUE_WORDS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Fold the tokens of an entry of a sealed unit into the online softmax; ``nothing`` is FP32 zeros, one a query row."""
    rotates: tl.constexpr = ROTATES and KEY_FORM == TRANSFORM and KEY_RANK * KEY_WORDS * LANES <= MOST_ROTATED
    width: tl.constexpr = KEY_RANK if rotates else KEY_WORDS * LANES
    local = tl.arange(0, BLOCK_TOKENS)
    key_row, value_row = table + tl.load(table + entry), table + tl.load(table + entry + 1)
    tokens, stop = tl.load(key_row + TOKENS), tl.load(table + entry + 3)
    (
        k_codes, k_scales, k_zeros, k_super, k_index, k_table, k_last,
        k_present, k_flag, k_dense, k_bitmap, k_counts, k_values, k_size,
    ) = opened(
        key_row, stream, tokens, KEY_FORM, KEY_CHANNELS, KEY_GROUP, KEY_STAGES, KEY_TABLE_BITS, KEY_RANK, KEY_SPARSE,
        LANES,
    )  # fmt: skip
    (
        v_codes, v_scales, v_zeros, v_super, v_index, v_table, v_last,
        v_present, v_flag, v_dense, v_bitmap, v_counts, v_values, v_size,
    ) = opened(
        value_row, stream, tokens, VALUE_FORM, VALUE_CHANNELS, VALUE_GROUP, VALUE_STAGES, VALUE_TABLE_BITS,
        VALUE_RANK, VALUE_SPARSE, LANES,
    )  # fmt: skip
    k_kept = kept_operand(
        key_row, stream, k_present, KEY_FORM, KEY_CHANNELS, KEY_RANK, KEY_SPARSE, KEY_WORDS, LANES, ALIGNED
    )
    v_kept = kept_operand(
        value_row, stream, v_present, VALUE_FORM, VALUE_CHANNELS, VALUE_RANK, VALUE_SPARSE, VALUE_WORDS, LANES, ALIGNED
    )
    lift = nothing
    address, size = tokens, 0
    if rotates:
        asked, lift = rotated_queries(
            key_row, stream, asked, KEY_CHANNELS, KEY_RANK, KEY_WORDS * LANES, ALIGNED, BLOCK_QUERIES
        )
        address, size = codes_of(key_row, stream)
    for first in range(tl.load(table + entry + 2), stop, BLOCK_TOKENS):
        # A lane without a token repeats the last one, so that all it computes is finite.
        inside = tl.minimum(local, (stop - first - 1).to(tl.int32))
        keys = tl.zeros((BLOCK_TOKENS, width), tl.bfloat16)
        values = tl.zeros((BLOCK_TOKENS, VALUE_WORDS * LANES), tl.bfloat16)
        # Always so. Triton looks through what is not conditional, finds the narrow type that was loaded, and arranges the
        # matrix operands as suits that: by more rows than a tile has, with wrong products.
        if first < stop:
            if rotates:
                near = reordered(inside, BLOCK_TOKENS)
                packed = packed_codes(address, size, 0, first, near, KEY_GROUP, KEY_RANK)
                keys = numbers_of(packed, four, KEY_RANK, BLOCK_TOKENS).to(tl.bfloat16)
            else:
                keys = reconstructed(
                    key_row, stream, tokens, k_codes, k_scales, k_zeros, k_super, k_index, k_table, k_last,
                    k_present, k_flag, k_dense, k_bitmap, k_counts, k_values, k_size, k_kept, four, first, inside,
                    KEY_FORM, KEY_CHANNELS, KEY_GROUP, KEY_STAGES, KEY_TABLE_BITS, KEY_RANK, KEY_SPARSE, KEY_WORDS,
                    LANES, ALIGNED, BLOCK_TOKENS,
                )  # fmt: skip
            values = reconstructed(
                value_row, stream, tokens, v_codes, v_scales, v_zeros, v_super, v_index, v_table, v_last,
                v_present, v_flag, v_dense, v_bitmap, v_counts, v_values, v_size, v_kept, four, first, inside,
                VALUE_FORM, VALUE_CHANNELS, VALUE_GROUP, VALUE_STAGES, VALUE_TABLE_BITS, VALUE_RANK, VALUE_SPARSE,
                VALUE_WORDS, LANES, ALIGNED, BLOCK_TOKENS,
            )  # fmt: skip
        peak, total, output = folded(asked, keys, lift, values, local < stop - first, scale, peak, total, output)
    return peak, total, output


@triton.jit
def folded_plain(
    table, entry, batch, head, asked, nothing, scale, peak, total, output, KEY_CHANNELS: tl.constexpr,
    KEY_WIDE: tl.constexpr, VALUE_CHANNELS: tl.constexpr, VALUE_WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Fold the tokens of an entry of plain tensors into the online softmax."""
    local = tl.arange(0, BLOCK_TOKENS)
    key_row, value_row = table + tl.load(table + entry), table + tl.load(table + entry + 1)
    stop = tl.load(table + entry + 3)
    for first in range(tl.load(table + entry + 2), stop, BLOCK_TOKENS):
        inside = tl.minimum(local, (stop - first - 1).to(tl.int32))
        keys = exact_tile(key_row, batch, head, first, inside, KEY_CHANNELS, KEY_WIDE, ALIGNED)
        values = exact_tile(value_row, batch, head, first, inside, VALUE_CHANNELS, VALUE_WIDE, ALIGNED)
        peak, total, output = folded(asked, keys, nothing, values, local < stop - first, scale, peak, total, output)
    return peak, total, output


@triton.jit
def finished(output, peak, total):
    """BF16 average of values, and FP32 logarithm of the sum of exponentials; zero and ``-inf`` where no token is."""
    nothing = total == 0
    divisor = tl.where(nothing, 1.0, total)
    log_sum = tl.where(nothing, float("-inf"), (peak + tl.log2(divisor)) * LN_2)
    return to_bf16(output / divisor[:, None]), log_sum
