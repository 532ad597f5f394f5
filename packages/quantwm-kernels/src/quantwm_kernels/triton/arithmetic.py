"""Arithmetic of the kernels: what NumPy does that Triton has no word for."""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.triton.domain import INTERPRETED

# Adding 1.5 * 2**23 leaves no bit behind the point of a number below 2**22: the sum is rounded, half to even.
INTEGER_BITS: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
MAGNITUDE_BITS: tl.constexpr = tl.constexpr(0x7FFFFFFF)
# Beyond the domain of 2**60 nothing is promised but an end; a power of two must stay a number.
LARGEST_EXPONENT: tl.constexpr = tl.constexpr(64)
SMALL: tl.constexpr = tl.constexpr(2.0**-100)
LARGE: tl.constexpr = tl.constexpr(2.0**100)


@triton.jit
def product(left, right, sums):
    """``sums + left @ right`` of BF16 operands, FP32 sums. The interpreter multiplies BF16 wrongly, FP32 rightly."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums)


@triton.jit
def rounded(number):
    """Nearest whole number, ties to even, of an FP32 number below 2**22 in magnitude."""
    return (number + INTEGER_BITS) - INTEGER_BITS


@triton.jit
def magnitude_bits(number):
    """int32 that orders FP32 numbers by magnitude, infinity above all numbers and NaN above infinity."""
    return number.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def power_of_two(exponent):
    """FP32 ``2**exponent`` for -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled(number, exponent):
    """``number * 2**exponent`` for exponents of -252 to 254, rounded where the result is subnormal."""
    half = exponent // 2
    return number * power_of_two(half) * power_of_two(exponent - half)


@triton.jit
def frexp_exponent(bits):
    """The integer ``e`` with ``m / 2 <= 2**(e - 1) <= m`` of positive magnitude bits ``m``, as :func:`numpy.frexp` has it."""
    number = bits.to(tl.float32, bitcast=True)
    small = number < SMALL
    lifted = tl.where(small, tl.minimum(number, SMALL) * LARGE, number)
    return (lifted.to(tl.int32, bitcast=True) >> 23) - tl.where(small, 226, 126)


@triton.jit
def binary_exponent(bits):
    """:func:`frexp_exponent` of a domain that ends at 2**60, and zero for zero."""
    return tl.where(bits == 0, 0, tl.minimum(frexp_exponent(bits), LARGEST_EXPONENT))
