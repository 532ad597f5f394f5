"""Grids of groups on a GPU: ranges, steps, zero-points and what bounds the codes; formulas in :mod:`quantwm_core.affine`.

A tile's groups stand as ``[tokens, groups, channels]``, or as two halves of that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_core import affine as core
from quantwm_kernels.triton.arithmetic import frexp_exponent, magnitude_bits, scaled
from quantwm_kernels.triton.clustered import COUNTING_SHIFT
from quantwm_kernels.triton.domain import INTERPRETED
from quantwm_kernels.triton.scales import step_of, stored_ratio

LEVELS: tl.constexpr = tl.constexpr(core.LEVELS)
# Half a unit in the last place above 1/2.
NUDGE: tl.constexpr = tl.constexpr(2.0**-25)
SMALL_STEP: tl.constexpr = tl.constexpr(2.0**-60)
LIFT: tl.constexpr = tl.constexpr(2.0**64)
SIGN: tl.constexpr = tl.constexpr(-(2**31))
FOUR: tl.constexpr = tl.constexpr(0x40800000)
# Groups of more channels are taken in halves: fewer threads share a group then, and find out the same about it.
NARROW: tl.constexpr = tl.constexpr(32)
# Shares of a range that are tried differ by as much.
EIGHTH: tl.constexpr = tl.constexpr(core.FRACTIONS[0] - core.FRACTIONS[1])


@triton.jit
def following(number):
    """The next FP32 number above a positive one."""
    return (number.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)


@triton.jit
def least_rounding_to(step, LEVEL: tl.constexpr):
    """Smallest FP32 residual for which ``round(r / s')`` is at least ``LEVEL``, which is 1, 2 or 3.

    That means ``r / s' > t`` for ``t = LEVEL - 1/2``, but for what rounding to FP32 and ties to even do: they move ``t`` by
    half a unit in the last place, outward where ``t`` is 1/2 or 5/2 and inward where it is 3/2. ``s'`` times that number, of
    25 bits, is never an FP32 number, so its successor among them is what is asked for. A division per residual says the
    same and costs ten times as much.
    """
    if LEVEL == 1:  # half a step is exact, and its share of half a unit less than that to the next number
        return following(step * 0.5)
    middle: tl.constexpr = LEVEL - 0.5
    moved: tl.constexpr = -2.0 * NUDGE if LEVEL == 2 else 4.0 * NUDGE
    if INTERPRETED:  # no fused multiply-add there
        exact = step.to(tl.float64) * (middle + moved)
        near = exact.to(tl.float32)
        return tl.where(near.to(tl.float64) <= exact, following(near), near)
    small = step < SMALL_STEP  # where an error of the product would be lost below the smallest number
    wide = tl.where(small, step * LIFT, step)
    rough = wide * middle
    rest = tl.fma(wide, moved, tl.fma(wide, middle, -rough))
    near = rough + rest
    bound = tl.where(near - rough <= rest, following(near), near)
    lowered = bound * (1.0 / LIFT)
    return tl.where(small, tl.where(lowered * LIFT < bound, following(lowered), lowered), bound)


@triton.jit
def mirrored(bound):
    """Smallest FP32 residual above minus those below a positive ``bound``: where ``round(r / s')`` exceeds minus its level."""
    return ((bound.to(tl.int32, bitcast=True) - 1) | SIGN).to(tl.float32, bitcast=True)


@triton.jit
def code_bounds(low, step):
    """Zero-point of groups that reach down to ``low``, and the smallest residuals whose codes are 1, 2 and 3."""
    first, second, third = least_rounding_to(step, 1), least_rounding_to(step, 2), least_rounding_to(step, 3)
    one, two, three = -low >= first, -low >= second, -low >= third
    zero = one.to(tl.float32) + two.to(tl.float32) + three.to(tl.float32)
    below_first, below_second, below_third = mirrored(first), mirrored(second), mirrored(third)
    lower = tl.where(three, below_third, tl.where(two, below_second, tl.where(one, below_first, first)))
    middle = tl.where(three, below_second, tl.where(two, below_first, tl.where(one, first, second)))
    upper = tl.where(three, below_first, tl.where(two, first, tl.where(one, second, third)))
    return zero, lower, middle, upper


@triton.jit
def quotient(number, divisor, reciprocal):
    """FP32 ``number / divisor`` of a divisor whose reciprocal is known, to nearest: the error of a product is corrected."""
    if INTERPRETED:  # no fused multiply-add there
        return tl.div_rn(number, tl.zeros_like(number) + divisor)
    near = number * reciprocal
    return tl.fma(tl.fma(-near, divisor, number), reciprocal, near)


@triton.jit
def group_range(grouped):
    """Lowest and highest value of groups along the last of three axes, zero included."""
    return range_of(grouped, grouped)


@triton.jit
def range_of(left, right):
    """The same of groups of which two halves are given.

    By their bits, of which a GPU compares three at once: as signed integers positive numbers are in order and above all
    negative ones, as unsigned integers negative numbers are, the lowest last.
    """
    signed = tl.maximum(left.to(tl.int32, bitcast=True), right.to(tl.int32, bitcast=True))
    unsigned = tl.maximum(left.to(tl.uint32, bitcast=True), right.to(tl.uint32, bitcast=True))
    low = tl.max(unsigned, axis=2).to(tl.float32, bitcast=True)
    return tl.minimum(low, 0.0), tl.maximum(tl.max(signed, axis=2), 0).to(tl.float32, bitcast=True)


@triton.jit
def both_halves(rows, offset, channel, first, second, SECOND: tl.constexpr):
    """What stands at the channels of both halves of groups; twice the same where they are not halved."""
    place = rows + offset + channel
    number = tl.load(place, mask=first, other=0.0)
    return number, tl.load(place + SECOND, mask=second, other=0.0)


@triton.jit
def step_of_range(span):
    """Scale of groups that span so much."""
    return quotient(span, LEVELS * 1.0, 1.0 / LEVELS)


@triton.jit
def grid_of(low, span, super_scale, reciprocal):
    """Stored scale, step and zero-point of groups that start at ``low`` and have steps of ``span``, and bounds of their codes."""
    bits = stored_ratio(span, quotient(span, super_scale, reciprocal))
    step = step_of(bits, super_scale)
    zero, lower, middle, upper = code_bounds(low, tl.where(step > 0, step, 1.0))
    return bits, step, zero, lower, middle, upper


@triton.jit
def codes_of(residual, lower, middle, upper):
    """int32 codes of residuals ``[.., groups, channels]`` between the bounds of their groups."""
    above = residual >= middle[:, :, None]
    bound = tl.where(above, upper[:, :, None], lower[:, :, None])
    return tl.where(above, 2, 0) + (residual >= bound).to(tl.int32)


@triton.jit
def restored_residual(code, step, zero):
    """FP32 ``(code - z) * s'`` of int32 codes, which a number between 4 and 8 counts without a conversion."""
    counted = ((code << COUNTING_SHIFT) | FOUR).to(tl.float32, bitcast=True)
    return (counted - (zero + 4.0)[:, :, None]) * step[:, :, None]


@triton.jit
def squared_error(residual, step, zero, lower, middle, upper, shift):
    """Of each group, scaled by a power of two."""
    restored = restored_residual(codes_of(residual, lower, middle, upper), step, zero)
    lost = scaled(residual - restored, shift)
    return tl.sum(lost * lost, axis=2)


@triton.jit
def searched_grid(left, right, super_scale, reciprocal, CANDIDATES: tl.constexpr, HALVED: tl.constexpr):
    """What :func:`grid_of` returns for the share of each group's range that loses least."""
    low, high = range_of(left, right)
    span = step_of_range(high - low)
    bits, step, zero, lower, middle, upper = grid_of(low, span, super_scale, reciprocal)
    if CANDIDATES > 1:
        shift = -frexp_exponent(magnitude_bits(super_scale))[:, :, None]
        least = squared_error(left, step, zero, lower, middle, upper, shift)
        if HALVED:
            least += squared_error(right, step, zero, lower, middle, upper, shift)
        for number in tl.static_range(1, CANDIDATES):
            fraction = 1.0 - number * EIGHTH
            bits_2, step_2, zero_2, lower_2, middle_2, upper_2 = grid_of(
                low * fraction, span * fraction, super_scale, reciprocal
            )
            lost = squared_error(left, step_2, zero_2, lower_2, middle_2, upper_2, shift)
            if HALVED:
                lost += squared_error(right, step_2, zero_2, lower_2, middle_2, upper_2, shift)
            better = lost < least
            least = tl.where(better, lost, least)
            bits, step, zero = (
                tl.where(better, bits_2, bits),
                tl.where(better, step_2, step),
                tl.where(better, zero_2, zero),
            )
            lower, middle = tl.where(better, lower_2, lower), tl.where(better, middle_2, middle)
            upper = tl.where(better, upper_2, upper)
    return bits, step, zero, lower, middle, upper
