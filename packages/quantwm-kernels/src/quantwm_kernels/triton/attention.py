"""Softmax attention over a packed cache in one launch: tiles of keys and values are reconstructed where they are used.

A program takes a block of query rows of one KV head (the rows of all query heads that share it, one head after the
other) and a part of the tokens, and folds one tile after the other into an online softmax. The table it is led by is
described in :mod:`quantwm_kernels.attention_passes`. Where the tokens are divided among several programs, each leaves
its sums and its largest logit, and :func:`merge_kernel` joins them in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_kernels.attention_passes import WORDS_PER_ENTRY, Leading, Pass
from quantwm_kernels.launch import LAUNCHES, ceil_div, next_power_of_two, on_device
from quantwm_kernels.packed_attention import Attended, Pair
from quantwm_kernels.triton.clustered import FOUR_BITS
from quantwm_kernels.triton.domain import MATRIX_DTYPE
from quantwm_kernels.triton.kernel import kernel
from quantwm_kernels.triton.online_softmax import finished, folded_plain, folded_unit
from quantwm_kernels.triton.reading import constants

# Words of the table that lead a program, and words of an entry; see Leading.
HEAD_WORDS: tl.constexpr = tl.constexpr(len(Leading))
SEALED_BEGIN: tl.constexpr = tl.constexpr(int(Leading.SEALED_BEGIN))
SEALED_END: tl.constexpr = tl.constexpr(int(Leading.SEALED_END))
EXACT_BEGIN: tl.constexpr = tl.constexpr(int(Leading.EXACT_BEGIN))
EXACT_END: tl.constexpr = tl.constexpr(int(Leading.EXACT_END))
ENTRY_WORDS: tl.constexpr = tl.constexpr(WORDS_PER_ENTRY)
LOG2_E = 1.4426950408889634


@triton.jit
def query_rows(
    queries, batch, head, row, rows, group_rows, batch_stride, head_stride, token_stride,
    CHANNELS: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Addresses ``[rows, WIDE]`` of the query rows of a KV head, and which exist."""
    channel = tl.arange(0, WIDE)
    query_head = head * (rows // group_rows) + row // group_rows
    begin = batch * batch_stride + query_head * head_stride + (row % group_rows) * token_stride
    addresses = queries + (begin[:, None] + channel[None, :])
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 16))
    return addresses, (row < rows)[:, None] & (channel < CHANNELS)[None, :]


@kernel(
    do_not_specialize=["slot", "heads", "rows", "group_rows", "scale", "four"]
    + [f"{kind}_{axis}" for kind in ("query", "out") for axis in ("batch", "head", "token")]
)
def attend_kernel(
    table, queries, out, log_sum, peaks, totals, slot, heads, rows, group_rows, scale, four,
    query_batch, query_head, query_token, out_batch, out_head, out_token,
    KEY_FORM: tl.constexpr, KEY_CHANNELS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_STAGES: tl.constexpr,
    KEY_TABLE_BITS: tl.constexpr, KEY_RANK: tl.constexpr, KEY_SPARSE: tl.constexpr, KEY_WORDS: tl.constexpr,
    VALUE_FORM: tl.constexpr, VALUE_CHANNELS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_STAGES: tl.constexpr,
    VALUE_TABLE_BITS: tl.constexpr, VALUE_RANK: tl.constexpr, VALUE_SPARSE: tl.constexpr, VALUE_WORDS: tl.constexpr,
    LANES: tl.constexpr, ALIGNED: tl.constexpr, PLAIN_ALIGNED: tl.constexpr, DIVIDED: tl.constexpr, ROTATES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Programs along the first axis take rows of queries, along the second streams, along the third tokens."""
    stream, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = stream // heads, stream % heads
    row = tl.program_id(0).to(tl.int64) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    addresses, known = query_rows(
        queries, batch, head, row, rows, group_rows, query_batch, query_head, query_token,
        KEY_CHANNELS, KEY_WORDS * LANES, PLAIN_ALIGNED,
    )  # fmt: skip
    asked = tl.load(addresses, mask=known, other=0.0).to(MATRIX_DTYPE)
    peak = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    nothing = tl.zeros((BLOCK_QUERIES,), tl.float32)
    output = tl.zeros((BLOCK_QUERIES, VALUE_WORDS * LANES), tl.float32)
    lead = table + part * HEAD_WORDS
    for entry in range(tl.load(lead + SEALED_BEGIN), tl.load(lead + SEALED_END), ENTRY_WORDS):
        peak, total, output = folded_unit(
            table, entry, stream, asked, nothing, scale, four, peak, total, output, ROTATES, KEY_FORM, KEY_CHANNELS,
            KEY_GROUP, KEY_STAGES, KEY_TABLE_BITS, KEY_RANK, KEY_SPARSE, KEY_WORDS, VALUE_FORM, VALUE_CHANNELS,
            VALUE_GROUP, VALUE_STAGES, VALUE_TABLE_BITS, VALUE_RANK, VALUE_SPARSE, VALUE_WORDS, LANES, ALIGNED,
            BLOCK_QUERIES, BLOCK_TOKENS,
        )  # fmt: skip
    for entry in range(tl.load(lead + EXACT_BEGIN), tl.load(lead + EXACT_END), ENTRY_WORDS):
        peak, total, output = folded_plain(
            table, entry, batch, head, asked, nothing, scale, peak, total, output, KEY_CHANNELS, KEY_WORDS * LANES,
            VALUE_CHANNELS, VALUE_WORDS * LANES, PLAIN_ALIGNED, BLOCK_TOKENS,
        )  # fmt: skip
    if DIVIDED:
        channel = tl.arange(0, VALUE_WORDS * LANES)
        known = (row < rows)[:, None] & (channel < VALUE_CHANNELS)[None, :]
        place = ((slot + part) * tl.num_programs(1).to(tl.int64) + stream) * rows + row
        tl.store(peaks + place, peak, mask=row < rows)
        tl.store(totals + place, total, mask=row < rows)
        tl.store(out + (place[:, None] * VALUE_CHANNELS + channel[None, :]), output, mask=known)
    else:
        addresses, known = query_rows(
            out, batch, head, row, rows, group_rows, out_batch, out_head, out_token,
            VALUE_CHANNELS, VALUE_WORDS * LANES, PLAIN_ALIGNED,
        )  # fmt: skip
        average, logarithm = finished(output, peak, total)
        tl.store(addresses, average, mask=known)
        tl.store(log_sum + stream * rows + row, logarithm, mask=row < rows)


@kernel(
    do_not_specialize=["parts", "heads", "rows", "group_rows"] + [f"out_{axis}" for axis in ("batch", "head", "token")]
)
def merge_kernel(
    sums, peaks, totals, out, log_sum, parts, heads, rows, group_rows, out_batch, out_head, out_token,
    CHANNELS: tl.constexpr, WIDE: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
):  # fmt: skip
    """Join ``parts`` results over different tokens: sums ``[parts, streams, rows, CHANNELS]``, and what they refer to."""
    stream, streams = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    channel = tl.arange(0, WIDE)
    known = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    highest = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    for part in range(parts):
        place = (part * streams + stream) * rows + row
        highest = tl.maximum(highest, tl.load(peaks + place, mask=row < rows, other=float("-inf")))
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # no token anywhere: all factors are 0
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    output = tl.zeros((BLOCK_QUERIES, WIDE), tl.float32)
    for part in range(parts):
        place = (part * streams + stream) * rows + row
        peak = tl.load(peaks + place, mask=row < rows, other=float("-inf"))
        factor = tl.exp2(peak - highest)
        total += factor * tl.load(totals + place, mask=row < rows, other=0.0)
        output += factor[:, None] * tl.load(
            sums + (place[:, None] * CHANNELS + channel[None, :]), mask=known, other=0.0
        )
    addresses, known = query_rows(
        out, stream // heads, stream % heads, row, rows, group_rows, out_batch, out_head, out_token,
        CHANNELS, WIDE, False,
    )  # fmt: skip
    average, logarithm = finished(output, highest, total)
    tl.store(addresses, average, mask=known)
    tl.store(log_sum + stream * rows + row, logarithm, mask=row < rows)


def attend(
    passes: Sequence[Pass],
    queries: Tensor,
    plain: Sequence[Pair],
    output: Tensor,
    sizes: tuple[int, int, int, int],
    scale: float,
    *,
    rotated: bool = False,
) -> Attended:
    """Launch passes, and join what they and their parts leave.

    Args:
        passes: What to attend to; their tables live where the tensors do and hold the addresses of ``plain``.
        queries: BF16 ``[B, Hq, T, D]`` with consecutive channels.
        plain: Plain keys and values with consecutive channels.
        output: BF16 ``[B, Hq, T, D of values]`` to write, with consecutive channels.
        sizes: ``(B, H, D of keys, D of values)``.
        scale: Factor of the logits.
        rotated: Whether queries are rotated into the basis of keys that are a transform code.

    Raises:
        DeviceError: No kernel runs where the tensors live.
    """
    batch, heads, _, channels = sizes
    query_heads, count = queries.shape[1:3]
    rows, parts = query_heads // heads * count, sum(each.parts for each in passes)
    log_sum = queries.new_empty((batch, query_heads, count), dtype=torch.float32)
    if rows == 0:
        return Attended(output, log_sum)
    target, peaks, totals = output, log_sum, log_sum
    if parts > 1:
        target = queries.new_empty((parts, batch * heads, rows, channels), dtype=torch.float32)
        peaks, totals = queries.new_empty((2, parts, batch * heads, rows), dtype=torch.float32)
    numbers = sizes[2] | channels
    for tensor in (queries, output, *(each for pair in plain for each in pair)):
        numbers |= tensor.data_ptr() // 2 | tensor.stride(0) | tensor.stride(1) | tensor.stride(2)
    plain_aligned = numbers % 8 == 0
    strides, written = queries.stride()[:3], output.stride()[:3]
    slot = 0
    with on_device(queries, "queries"):
        for each in passes:
            fixed = _fixed(each, plain_aligned=plain_aligned, divided=parts > 1, rotated=rotated)
            blocks = ceil_div(rows, each.launch.blocks["BLOCK_QUERIES"])
            attend_kernel[blocks, batch * heads, each.parts](
                each.table, queries, target, log_sum, peaks, totals, slot, heads, rows, count, scale * LOG2_E, FOUR_BITS,
                *strides, *written, **fixed,
            )  # fmt: skip
            slot += each.parts
        if parts > 1:
            launch = LAUNCHES["merge_attention"]
            merge_kernel[ceil_div(rows, launch.blocks["BLOCK_QUERIES"]), batch * heads](
                target, peaks, totals, output, log_sum, parts, heads, rows, count, *written, channels,
                next_power_of_two(channels), **launch.options,
            )  # fmt: skip
    return Attended(output, log_sum)


def _fixed(each: Pass, *, plain_aligned: bool, divided: bool, rotated: bool) -> dict[str, int]:
    """Compile-time arguments of a pass."""
    key = (plain_aligned, divided, rotated)
    if key not in each.prepared:
        lanes = 8 if each.eight and each.aligned else 4
        aligned = each.aligned and not (each.keys.channels | each.values.channels) % lanes
        each.prepared[key] = {
            **constants("KEY", each.keys, lanes), **constants("VALUE", each.values, lanes), "LANES": lanes,
            "ALIGNED": aligned, "PLAIN_ALIGNED": plain_aligned, "DIVIDED": divided, "ROTATES": rotated, **each.launch.options,
        }  # fmt: skip
    return each.prepared[key]
