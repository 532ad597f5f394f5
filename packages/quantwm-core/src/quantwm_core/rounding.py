"""Rounding with error feedback: codes that cost the logits least, on a grid that is already chosen (ours).

The squared logit error of a key error ``e`` is ``e^T M e``. Rounding each channel to its nearest code minimises ``|e|^2``; what
one channel loses can be made up for by the next. PSAC removes what lies along its basis ``U``, so the rest counts::

    H = P M' P^T + damp I      M' = M / mean_j M_jj      P = I - U (U^T U)^-1 U^T

Factor ``H = U_1 D U_1^T`` with a unit upper triangular ``U_1`` and let ``F`` be the part of ``U_1^-1`` above the diagonal. Channels are
coded in order, each after the errors ``v_i`` of those before it have been taken into account::

    w_j = x_j - sum_{i<j} F_ij v_i      x^_j = nearest on its grid to w_j      v_j = w_j - x^_j

Then ``e^T H e = sum_j D_j v_j^2``: off the clipped ends, each term is as small as a grid allows. Queries drift, so ``damp`` keeps a
share of plain error; it also keeps ``H`` positive. Nothing of this is stored, and decoding does not know of it. The recursion is
that of noise shaping; with a Hessian of activations it is known from the compression of weights (GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import BFloat16, Float32

from quantwm_core import affine, packing, scales, statistics
from quantwm_core.affine import AffineCode
from quantwm_core.arguments import explain_errors
from quantwm_core.domain import check_finite

DAMP = 0.2
"""Share of the identity in the metric, in units of the mean query energy of a channel."""


def feedback(
    mean: Float32[np.ndarray, "*streams channels channels"],
    basis: BFloat16[np.ndarray, "*streams channels rank"] | None = None,
) -> Float32[np.ndarray, "*streams channels channels"]:
    """Matrix ``F``: how much of channel ``i``'s error channel ``j`` takes over.

    Args:
        mean: Second moment of the queries, FP32.
        basis: Stored basis whose directions are compensated; None where none are.

    Returns:
        FP32, zero on and below the diagonal, zero everywhere for ``M = 0`` and for diagonal ``M``.

    Two channels that the queries see with opposite signs err alike:

    >>> feedback(np.float32([[[1.0, -1.0], [-1.0, 1.0]]])).round(2)
    array([[[0.  , 0.83],
            [0.  , 0.  ]]], dtype=float32)
    """
    metric = statistics.normalised(mean).astype(np.float64)
    identity = np.eye(mean.shape[-1])
    if basis is not None:
        wide = basis.astype(np.float64)
        known = np.abs(wide).max(axis=(-2, -1), keepdims=True) > 0
        gram = np.where(known, np.swapaxes(wide, -1, -2) @ wide, np.eye(wide.shape[-1]))
        complement = identity - wide @ np.linalg.solve(gram, np.swapaxes(wide, -1, -2))
        metric = complement @ metric @ complement
    damped = metric + DAMP * identity
    # Reversed in both axes, a lower Cholesky factor becomes an upper one.
    upper = np.linalg.cholesky(damped[..., ::-1, ::-1])[..., ::-1, ::-1]
    unit = upper / np.diagonal(upper, axis1=-2, axis2=-1)[..., None, :]
    return np.triu(np.linalg.inv(unit), 1).astype(np.float32)


def refine(
    values: Float32[np.ndarray, "*streams tokens channels"],
    code: AffineCode,
    matrix: Float32[np.ndarray, "*streams channels channels"],
) -> AffineCode:
    """Choose the codes anew, with feedback; scales and zero-points stay.

    Args:
        values: What ``code`` codes.
        code: Its affine code, of any codes.
        matrix: What :func:`feedback` gives.

    Raises:
        DomainError: A number is NaN or infinite.

    The second channel makes up for the first one's error:

    >>> code = affine.encode(np.float32([[[0.4, 0.6, 0.0, 3.0]]]), 4)
    >>> matrix = np.zeros((1, 4, 4), np.float32)
    >>> matrix[0, 0, 1] = -1.0
    >>> affine.decode(code), affine.decode(refine(np.float32([[[0.4, 0.2, 0.0, 3.0]]]), code, matrix))
    (array([[[0., 1., 0., 3.]]], dtype=float32), array([[[0., 1., 0., 3.]]], dtype=float32))
    """
    check_finite(values, "values")
    check_finite(matrix, "matrix")
    channels, groups = values.shape[-1], code.scales.shape[-1]
    size = channels // groups
    step = scales.decode(code.scales, code.super_scale)
    divisor = np.where(step > 0, step, np.float32(np.inf))
    zero = affine.unpack_rows(code.zero_points, groups, 0, values.shape[-2]).astype(np.float32)
    wanted = np.moveaxis(values, -1, 0).copy()  # a channel at a time lies together
    codes = np.empty(wanted.shape, np.uint8)
    for channel in range(channels):
        group = channel // size
        steps = np.rint(wanted[channel] / divisor[..., group])
        chosen = np.clip(steps + zero[..., group], 0, affine.LEVELS)
        lost = wanted[channel] - (chosen - zero[..., group]) * step[..., group]
        codes[channel] = chosen
        wanted[channel + 1 :] -= np.moveaxis(matrix[..., channel, channel + 1 :], -1, 0)[..., None] * lost
    return replace(code, codes=packing.pack(np.moveaxis(codes, 0, -1)))


explain_errors(globals())
