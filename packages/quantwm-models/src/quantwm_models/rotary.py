"""Queries as they meet keys that a host caches before it rotates them.

Such a host rotates keys on each read. A logit is ``q^T R_n k`` with the rotated query ``q`` and the rotation ``R_n`` of the
key's position ``n``, so an error of the cached ``k`` weighs by the second moment of ``R_n^T q``, not of ``q``.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from quantwm_kernels.statistics import QueryMoment


def turned(
    vectors: Float[Tensor, "*any tokens channels"], angles: Float[Tensor, "tokens pairs"]
) -> Float[Tensor, "*any tokens channels"]:
    """Rotate each two neighbouring channels by the angle of their token and pair, in FP32.

    >>> turned(torch.tensor([[1.0, 0.0]]), torch.tensor([[torch.pi / 2]])).round().abs().tolist()
    [[0.0, 1.0]]
    """
    pairs = torch.view_as_complex(vectors.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def before_rotation(moment: QueryMoment, angles: Float32[Tensor, "tokens pairs"]) -> QueryMoment:
    """Second moment of the queries as keys see them before their rotation: the mean of ``R_n^T M R_n`` over tokens.

    Exact, without a loop over tokens: a 2 x 2 block of ``M`` is the sum of a rotation and a reflection, each a complex
    number, and turning both sides multiplies the former by ``exp(i(b - a))`` and the latter by ``exp(-i(a + b))``.

    Args:
        moment: ``M`` of rotated queries, ``[B, H, D, D]``.
        angles: By what the keys' tokens are rotated, ``[n, D / 2]``.

    >>> moment = QueryMoment(torch.tensor([[[[4.0, 0.0], [0.0, 0.0]]]]), 1)
    >>> before_rotation(moment, torch.tensor([[0.0], [torch.pi / 2]])).mean.round().tolist()
    [[[[2.0, 0.0], [0.0, 2.0]]]]
    """
    phases = torch.polar(torch.ones_like(angles), angles)
    differences = phases.mH @ phases / len(phases)
    sums = phases.mH @ phases.conj() / len(phases)
    blocks = moment.mean.float().unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
    (a, b), (c, d) = (blocks[..., row, :, :].unbind(-1) for row in (0, 1))
    rotation = torch.complex(a + d, c - b) * differences
    reflection = torch.complex(a - d, c + b) * sums
    first = torch.stack([rotation.real + reflection.real, reflection.imag - rotation.imag], dim=-1)
    second = torch.stack([rotation.imag + reflection.imag, rotation.real - reflection.real], dim=-1)
    mean = torch.stack([first, second], dim=-3).flatten(-2).flatten(-3, -2) / 2
    return QueryMoment(mean, moment.queries)
