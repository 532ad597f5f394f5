"""Queries in another frame than that in which a host asks them: of keys before their rotation, and of frames to come.

A host that caches keys before it rotates them does so on each read. A logit is ``q^T R_n k`` with the rotated query ``q`` and the rotation ``R_n`` of the
key's position ``n``, so an error of the cached ``k`` weighs by the second moment of ``R_n^T q``, not of ``q``. What is turned to
coming frames, and why, stands in :mod:`quantwm_core.rotary`.
"""

from __future__ import annotations

from functools import cache, reduce

import torch
from jaxtyping import Float
from torch import Tensor

from quantwm_core.rotary import Turning
from quantwm_kernels.statistics import QueryMoment, merge, second_moment


def turned(
    vectors: Float[Tensor, "*any tokens channels"], angles: Float[Tensor, "tokens pairs"]
) -> Float[Tensor, "*any tokens channels"]:
    """Rotate each two neighbouring channels by the angle of their token and pair, in FP32.

    >>> turned(torch.tensor([[1.0, 0.0]]), torch.tensor([[torch.pi / 2]])).round().abs().tolist()
    [[0.0, 1.0]]
    """
    pairs = torch.view_as_complex(vectors.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def before_rotation(moment: QueryMoment, angles: Float[Tensor, "tokens pairs"]) -> QueryMoment:
    """Second moment of the queries as keys see them before their rotation: the mean of ``R_n^T M R_n`` over tokens.

    Exact, without a loop over tokens: a 2 x 2 block of ``M`` is the sum of a rotation and a reflection, each a complex
    number, and turning both sides multiplies the former by ``exp(i(b - a))`` and the latter by ``exp(-i(a + b))``.

    Args:
        moment: ``M`` of rotated queries, ``[B, H, D, D]``.
        angles: By what the keys' tokens are rotated, ``[n, D / 2]``; sums are in their number format.

    >>> moment = QueryMoment(torch.tensor([[[[4.0, 0.0], [0.0, 0.0]]]]), 1)
    >>> before_rotation(moment, torch.tensor([[0.0], [torch.pi / 2]])).mean.round().tolist()
    [[[[2.0, 0.0], [0.0, 2.0]]]]
    """
    phases = torch.polar(torch.ones_like(angles), angles)
    differences = phases.mH @ phases / len(phases)
    sums = phases.mH @ phases.conj() / len(phases)
    blocks = moment.mean.to(angles.dtype).unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
    (a, b), (c, d) = (blocks[..., row, :, :].unbind(-1) for row in (0, 1))
    rotation = torch.complex(a + d, c - b) * differences
    reflection = torch.complex(a - d, c + b) * sums
    first = torch.stack([rotation.real + reflection.real, reflection.imag - rotation.imag], dim=-1)
    second = torch.stack([rotation.imag + reflection.imag, rotation.real - reflection.real], dim=-1)
    mean = torch.stack([first, second], dim=-3).flatten(-2).flatten(-3, -2) / 2
    return QueryMoment(mean.float(), moment.queries)


def still_moment(
    queries: Float[Tensor, "batch query_heads tokens channels"], kv_heads: int, start: int, turning: Turning
) -> QueryMoment:
    """:func:`quantwm_core.rotary.still_moment`: frame by frame, so that no rotated copy of the queries is made.

    Args:
        queries: Rotated, at least one token, of any device.
        kv_heads: KV heads.
        start: Token of the video that the first query belongs to.
        turning: What the host turned them by.

    Raises:
        ShapeError: The rates are not of so many channels.

    >>> asked = torch.tensor([[[[2.0, 0.0], [0.0, 2.0]]]])  # a quarter turn a frame, a token each
    >>> still_moment(asked, 1, 0, Turning(1, (torch.pi / 2,))).mean.round().abs().tolist()
    [[[[4.0, 0.0], [0.0, 0.0]]]]
    """
    turning.check_channels(queries.shape[-1])
    rates = _rates(turning, queries.device)
    moments = (
        before_rotation(second_moment(queries[:, :, own], kv_heads), frame * rates)
        for frame, own in turning.frames(start, queries.shape[2])
    )
    return reduce(merge, moments)


def coming_moment(still: QueryMoment, stop: int, frames: int, turning: Turning) -> QueryMoment:
    """:func:`quantwm_core.rotary.coming_moment`, on the device of ``still``.

    >>> still, turning = QueryMoment(torch.tensor([[[[4.0, 0.0], [0.0, 0.0]]]]), 1), Turning(1, (torch.pi / 2,))
    >>> coming_moment(still, 1, 1, turning).mean.round().abs().tolist()
    [[[[0.0, 0.0], [0.0, 4.0]]]]
    >>> coming_moment(still, 1, 2, turning).mean.round().abs().tolist()
    [[[[2.0, 0.0], [0.0, 2.0]]]]
    """
    first = turning.frames_before(stop)
    numbers = torch.arange(first, first + frames, dtype=torch.float64, device=still.mean.device)
    return before_rotation(still, -numbers[:, None] * _rates(turning, still.mean.device))


def turning_of(frequencies: object, frame_tokens: int) -> Turning | None:
    """What a host of the Wan family turns queries by, of which a third of the pairs each follow row and column, the rest time.

    Args:
        frequencies: Its table, complex ``[positions, D / 2]``, pairs of the frame first; None is returned for anything else.
        frame_tokens: Tokens of a frame.

    >>> table = torch.polar(torch.ones(2, 3), torch.tensor([[0.0], [1.0]]) * torch.tensor([1.0, 0.5, 0.25]))
    >>> turning_of(table, 64), turning_of("none", 64)
    (Turning(frame_tokens=64, rates=(1.0, 0.0, 0.0)), None)
    """
    if not isinstance(frequencies, Tensor) or not frequencies.is_complex() or len(frequencies) < 2:
        return None
    pairs = frequencies.shape[1]
    rates = frequencies[1].angle().tolist()[: pairs - 2 * (pairs // 3)]
    return Turning(frame_tokens, (*rates, *(0.0,) * (pairs - len(rates))))


@cache
def _rates(turning: Turning, device: torch.device) -> Tensor:
    """FP64 ``[1, D / 2]`` on a device, copied there once."""
    with torch.inference_mode(False):  # a tensor born in inference mode could not be used outside of it
        return torch.tensor(turning.rates, dtype=torch.float64, device=device)[None]
