"""Group scales <-> super-scale and E4M3 on a GPU, in integer arithmetic: no device before sm_89 converts E4M3 itself.

Formulas in :mod:`quantwm_core.scales`. An E4M3 byte is sign, four bits of exponent (bias 7), three of mantissa.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_core import scales as core
from quantwm_core.errors import DtypeError, ShapeError
from quantwm_kernels.launch import LAUNCHES, ceil_div, on_device
from quantwm_kernels.scales import super_scale_shape
from quantwm_kernels.triton.kernel import kernel

E4M3_MAX: tl.constexpr = tl.constexpr(core.E4M3_MAX)
TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)
# FP32 has 20 more bits of mantissa, and an exponent bias that is larger by 120.
MANTISSA_SHIFT: tl.constexpr = tl.constexpr(20)
BELOW_HALF: tl.constexpr = tl.constexpr((1 << 19) - 1)
BIAS_BITS: tl.constexpr = tl.constexpr(120 << 3)
BIAS_FACTOR: tl.constexpr = tl.constexpr(2.0**120)
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(2.0**-6)
# Adding 2**23 units of the smallest subnormal rounds an FP32 number to a whole count of them, half to even.
COUNTER: tl.constexpr = tl.constexpr(2.0**23 * core.SMALLEST_SUBNORMAL)


@triton.jit
def e4m3_bits(number):
    """int32 with the E4M3 byte nearest to an FP32 number of 0 to 448, ties to even."""
    bits = number.to(tl.int32, bitcast=True)
    half = BELOW_HALF + ((bits >> MANTISSA_SHIFT) & 1)
    normal = ((bits + half) >> MANTISSA_SHIFT) - BIAS_BITS
    subnormal = (number + COUNTER).to(tl.int32, bitcast=True) & 15
    return tl.where(number < SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def e4m3_number(byte):
    """FP32 number of an E4M3 byte, exact; a subnormal E4M3 passes through a subnormal FP32."""
    wide = byte.to(tl.int32)
    bits = ((wide & 127) << MANTISSA_SHIFT) | ((wide & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * BIAS_FACTOR


@triton.jit
def super_scale_of(largest):
    """Super-scale of a stream whose largest step is ``largest``."""
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, E4M3_MAX, tl.float32)), TINY)


@triton.jit
def stored_ratio(step, ratio):
    """int32 with the E4M3 byte of a step that is ``ratio`` super-scales; a positive step never becomes zero."""
    bits = e4m3_bits(tl.minimum(ratio, E4M3_MAX))
    return tl.where((step > 0) & (bits == 0), 1, bits)


@triton.jit
def step_of(byte, super_scale):
    """FP32 step of a stored scale."""
    return e4m3_number(byte) * super_scale


@kernel(do_not_specialize=["per_stream", "total"])
def encode_kernel(steps, largest, stored, super_scale, per_stream, total, BLOCK: tl.constexpr):
    """Each lane stores one scale; the lane of a stream's first scale stores its super-scale too."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    stream = index // per_stream
    scale = super_scale_of(tl.load(largest + stream, mask=inside, other=1.0))
    step = tl.load(steps + index, mask=inside, other=0.0)
    bits = stored_ratio(step, tl.div_rn(step, scale))
    tl.store(stored + index, bits.to(tl.uint8), mask=inside)
    tl.store(super_scale + stream, scale, mask=inside & (index % per_stream == 0))


@kernel(do_not_specialize=["per_stream", "total"])
def decode_kernel(stored, super_scale, steps, per_stream, total, BLOCK: tl.constexpr):
    """Each lane reads one scale."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    scale = tl.load(super_scale + index // per_stream, mask=inside, other=0.0)
    tl.store(steps + index, step_of(tl.load(stored + index, mask=inside, other=0), scale), mask=inside)


def encode(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Store non-negative group scales as E4M3 under a super-scale.

    Args:
        steps: FP32 ``[*streams, rows, groups]`` of any strides, finite, at least zero.

    Returns:
        E4M3 scales of the same shape and the FP32 super-scale ``[*streams]``.

    Raises:
        DtypeError: ``steps`` is not FP32.
        ShapeError: It has fewer than two axes, or no step.
        DeviceError: No kernel runs where it lives.
    """
    if steps.dtype != torch.float32:
        raise DtypeError(f"steps: got {steps.dtype}, need torch.float32")
    if steps.ndim < 2 or steps.numel() == 0:
        raise ShapeError(f"steps: got shape {tuple(steps.shape)}, need [*streams, rows, groups] with at least one step")
    stored = steps.new_empty(steps.shape, dtype=torch.uint8)
    super_scale = steps.new_empty(super_scale_shape(steps.shape))
    per_stream = steps.shape[-2] * steps.shape[-1]
    launch = LAUNCHES["encode_scales"]
    with on_device(steps, "steps"):
        largest = steps.amax(dim=(-2, -1))
        grid = (ceil_div(steps.numel(), launch.blocks["BLOCK"]),)
        tensors = (steps.contiguous(), largest, stored, super_scale)
        encode_kernel[grid](*tensors, per_stream, steps.numel(), **launch.options)
    return stored.view(torch.float8_e4m3fn), super_scale


def decode(stored: Tensor, super_scale: Tensor) -> Tensor:
    """Steps ``S * e4m3`` in FP32.

    Args:
        stored: E4M3 ``[*streams, rows, groups]`` of any strides.
        super_scale: FP32 ``[*streams]``.

    Raises:
        DtypeError: Another number format came.
        ShapeError: The two do not fit together.
        DeviceError: No kernel runs where they live.
    """
    if stored.dtype != torch.float8_e4m3fn or super_scale.dtype != torch.float32:
        raise DtypeError(f"got scales {stored.dtype}, super-scale {super_scale.dtype}; need float8_e4m3fn, float32")
    if stored.ndim < 2 or tuple(super_scale.shape) != super_scale_shape(stored.shape):
        shapes = f"scales {tuple(stored.shape)}, super-scale {tuple(super_scale.shape)}"
        raise ShapeError(f"{shapes}: need [*streams, rows, groups] and [*streams]")
    steps = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
    launch = LAUNCHES["decode_scales"]
    with on_device(stored, "scales"):
        if steps.numel():
            grid = (ceil_div(steps.numel(), launch.blocks["BLOCK"]),)
            tensors = (stored.contiguous().view(torch.uint8), super_scale.contiguous(), steps)
            decode_kernel[grid](*tensors, stored.shape[-2] * stored.shape[-1], steps.numel(), **launch.options)
    return steps
