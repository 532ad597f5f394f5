"""Hosts whose keys and values are read in two kinds, after RoPE and after ProPE, of which one stream can be stored.

Both kinds are transforms of what the layer projected: keys are rotated by position, keys and values are multiplied by a
matrix of the token's camera, four channels at a time, and values are left as they are. Stored is what comes before either,
and both are derived from it on each read, by the host's own functions on tensors of the same shape and strides, which give
the same bits. Whether they do is checked when a history is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor

from quantwm_kernels.statistics import QueryMoment
from quantwm_models.rotary import before_rotation, turned

TILE = 4  # channels that a camera's matrix takes


@dataclass(frozen=True)
class Transforms:
    """What a host does to the keys and values of one history.

    Attributes:
        rotate: Keys ``[B, H, N, D]`` to those after RoPE.
        project: Keys and values ``[B, H, N, D]`` to those after ProPE; any ``D`` and any multiple of the cameras as ``N``.
        cameras: Cameras of the history, which follow each other.
        dtype: Number format that the host transforms.
    """

    rotate: Callable[[Tensor], Tensor]
    project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    cameras: int
    dtype: torch.dtype = torch.bfloat16

    def both(
        self, keys: Float[Tensor, "batch heads tokens channels"], values: Float[Tensor, "batch heads tokens channels"]
    ) -> tuple[Float[Tensor, "batch heads tokens twice"], Float[Tensor, "batch heads tokens twice"]]:
        """Keys and values of both kinds, side by side along the channels.

        >>> double = Transforms(lambda keys: 2 * keys, lambda keys, values: (3 * keys, 3 * values), cameras=1)
        >>> [each.flatten().tolist() for each in double.both(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))]
        [[2.0, 3.0], [1.0, 3.0]]
        """
        keys, values = keys.contiguous(), values.contiguous()
        projected = self.project(keys, values)
        return torch.cat([self.rotate(keys), projected[0]], dim=-1), torch.cat([values, projected[1]], dim=-1)

    def frame(self, moment: QueryMoment, angles: Float32[Tensor, "tokens pairs"]) -> QueryMoment:
        """Second moment of queries of both kinds, ``[B, H, 2 D, 2 D]``, as keys see them before either transform.

        The mean over the tokens that ``angles`` are of, and over the cameras.
        """
        channels = moment.mean.shape[-1] // 2
        roped, projected = moment.mean[..., :channels, :channels], moment.mean[..., channels:, channels:]
        turned_back = before_rotation(QueryMoment(roped, moment.queries), angles).mean
        return QueryMoment(turned_back + before_projection(projected, self.matrices(moment.mean)), moment.queries)

    def matrices(self, like: Tensor) -> Float32[Tensor, "batch cameras 4 4"]:
        """What keys are multiplied by, found by projecting the unit vectors once for each camera."""
        batch = len(like)
        units = torch.eye(TILE, dtype=self.dtype, device=like.device).repeat(batch, 1, self.cameras, 1)
        columns, _ = self.project(units, units)
        return columns.float().view(batch, self.cameras, TILE, TILE).mT

    def angles(self, keys: Tensor) -> Float32[Tensor, "tokens pairs"] | None:
        """By what the host turns each two neighbouring channels of keys ``[B, H, N, D]``; None if it does otherwise."""
        probe = torch.zeros_like(keys[:1, :1], dtype=torch.float32)
        probe[..., ::2] = 1
        answer = self.rotate(probe)[0, 0].float()
        angles = torch.atan2(answer[:, 1::2], answer[:, ::2])
        expected, got = turned(keys[:, :, -1:], angles[-1:]), self.rotate(keys)[:, :, -1:].float()
        return angles if torch.allclose(expected, got, rtol=0.02, atol=0.02 * float(got.abs().max())) else None


def before_projection(
    moment: Float32[Tensor, "batch heads channels channels"], matrices: Float32[Tensor, "batch cameras 4 4"]
) -> Float32[Tensor, "batch heads channels channels"]:
    """Second moment of queries as keys see them before their projection: the mean of ``T_c^T M T_c`` over the cameras.

    >>> before_projection(torch.eye(4)[None, None], 2 * torch.eye(4)[None, None]).diagonal(dim1=-2, dim2=-1).tolist()
    [[[4.0, 4.0, 4.0, 4.0]]]
    """
    tiles = moment.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
    back = torch.einsum("bcij,bhsitk,bckl->bhsjtl", matrices, tiles, matrices) / matrices.shape[1]
    return back.flatten(-2).flatten(-3, -2)


def stored_once(
    transforms: Transforms,
    raw: tuple[Tensor, Tensor],
    made: tuple[Float[Tensor, "batch heads tokens twice"], Float[Tensor, "batch heads tokens twice"]],
) -> tuple[BFloat16[Tensor, "batch heads tokens channels"], BFloat16[Tensor, "batch heads tokens channels"]] | None:
    """What to store of a history instead of both kinds, or None where they cannot be derived from it bit for bit."""
    keys, values = (each.to(torch.bfloat16) for each in raw)
    derived = transforms.both(keys.to(raw[0].dtype), values.to(raw[1].dtype))
    same = all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(derived, made, strict=True))
    return (keys, values) if same else None
