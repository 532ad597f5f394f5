"""FP32 -> BF16 on a GPU, to nearest, ties to even."""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.launch import interpreted

# The interpreter truncates where a GPU rounds, and multiplies matrices of BF16 wrongly.
INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
MATRIX_DTYPE: tl.constexpr = tl.constexpr(tl.float32 if interpreted() else tl.bfloat16)


@triton.jit
def to_bf16(number):
    """Round finite FP32 numbers to BF16."""
    if INTERPRETED:
        bits = number.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = number.to(tl.bfloat16)
    return rounded
