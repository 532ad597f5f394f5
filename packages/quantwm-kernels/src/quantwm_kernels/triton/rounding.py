"""Error feedback on a GPU: codes of a tile, one channel after the other. The recursion stands in :mod:`quantwm_core.rounding`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwm_core import affine as core_affine
from quantwm_core import rounding as core
from quantwm_kernels.launch import full_precision
from quantwm_kernels.triton import psac, statistics
from quantwm_kernels.triton.arithmetic import rounded

LEVELS: tl.constexpr = tl.constexpr(core_affine.LEVELS)


@triton.jit
def refined(
    residual, step, zero, matrix, channel, group, known, CHANNELS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Whole-numbered codes ``[tokens, groups, lanes]`` on grids ``[tokens, groups]``, with feedback by ``matrix [D, D]``."""
    wanted = residual
    code = tl.zeros_like(residual)
    for number in range(CHANNELS):
        here = (channel == number) & known
        own = group == number // GROUP
        value = tl.sum(tl.sum(tl.where(here[None, :, :], wanted, 0.0), axis=2), axis=1)
        size = tl.sum(tl.where(own[None, :], step, 0.0), axis=1)
        origin = tl.sum(tl.where(own[None, :], zero, 0.0), axis=1)
        divisor = tl.where(size > 0, size, float("inf"))
        chosen = tl.clamp(rounded(tl.div_rn(value, divisor)) + origin, 0.0, LEVELS * 1.0)
        lost = value - (chosen - origin) * size
        code = tl.where(here[None, :, :], chosen[:, None, None], code)
        share = tl.load(matrix + number * CHANNELS + channel, mask=known, other=0.0)
        wanted = wanted - lost[:, None, None] * share[None, :, :]
    return code


def feedback(mean: Tensor, basis: Tensor | None = None, projection: Tensor | None = None) -> Tensor:
    """Matrix of :func:`quantwm_core.rounding.feedback`; waits for nothing.

    Args:
        mean: FP32 ``[B, H, D, D]``.
        basis: BF16 ``[B, H, D, r]``, or None.
        projection: What :func:`quantwm_kernels.triton.psac.projection_of` makes of it, where it is at hand.

    Returns:
        FP32 ``[streams, D, D]``, zero on and below the diagonal.
    """
    channels = mean.shape[-1]
    metric = statistics.normalised(mean).flatten(0, -3).double()
    identity = torch.eye(channels, dtype=torch.float64, device=mean.device)
    if basis is not None:
        flat = basis.flatten(0, -3)
        inverse = psac.projection_of(flat) if projection is None else projection
        complement = identity - inverse.double() @ flat.double().mT
        metric = complement @ metric @ complement.mT
    damped = metric + core.DAMP * identity
    with full_precision():
        # Reversed in both axes, a lower Cholesky factor becomes an upper one.
        upper = torch.linalg.cholesky_ex(damped.flip(-2, -1))[0].flip(-2, -1)
        unit = upper / upper.diagonal(dim1=-2, dim2=-1)[..., None, :]
        inverted = torch.linalg.solve_triangular(unit, identity, upper=True, unitriangular=True)
    return inverted.triu(1).float().contiguous()
