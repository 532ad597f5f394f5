"""Bases of all streams of a tensor together, in torch operations on FP64; formulas in :mod:`quantwm_core.basis`.

How many directions a stream has differs, so rows are padded with zeros to the most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core import basis as core
from quantwm_core.allocation import BLOCK
from quantwm_kernels.triton.layer import Arrays


class Rows(NamedTuple):
    """Directions of streams: FP64 ``[S, R, D]``, zero beyond the count of each stream."""

    rows: Tensor
    counts: Sequence[int]

    @classmethod
    def first(cls, rows: Tensor, counts: Sequence[int]) -> Rows:
        """The first rows of each stream, as many as ``counts`` says."""
        taken = cls(rows[:, : max(counts)], counts)
        return taken._replace(rows=taken.rows * taken.known[..., None])

    @property
    def known(self) -> Tensor:
        """Bool ``[S, R]``: which rows are of directions."""
        counts = torch.tensor(self.counts, device=self.rows.device)
        return torch.arange(self.rows.shape[1], device=self.rows.device) < counts[:, None]


class Stored(NamedTuple):
    """A basis as it is stored, and its rows."""

    arrays: Arrays
    rows: Rows


def normalised(moments: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`quantwm_core.basis.normalised` of streams ``[.., D, D]``: FP64 ``[S, D, D]`` and ``[S]``."""
    channels = moments.shape[-1]
    wide = moments.reshape(-1, channels, channels).double()
    average = wide.diagonal(dim1=1, dim2=2).mean(1)
    known = (average > 0)[:, None, None]
    identity = torch.eye(channels, dtype=torch.float64, device=moments.device)
    return torch.where(known, wide / torch.where(known, average[:, None, None], 1.0), identity), average


def fit(covariance: Tensor, metric: Tensor) -> Tensor:
    """Rows ``[S, D, D]`` that whiten the metric and decorrelate the covariance, largest energy first."""
    energies, vectors = torch.linalg.eigh(metric)
    root = torch.maximum(energies, core.RIDGE * energies[:, -1:]).sqrt()[:, None]
    whiten, restore = (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT
    rows = (restore @ torch.linalg.eigh(whiten @ covariance @ whiten).eigenvectors.flip(2)).mT
    largest = rows.gather(2, rows.abs().argmax(2, keepdim=True))
    return rows * torch.where(largest < 0, -1.0, 1.0)


def store(rows: Rows, shape: tuple[int, int]) -> Stored:
    """Round rows to INT8."""
    scales = (rows.rows.abs().amax(2) / core.ROW_MAX).to(torch.float32).bfloat16()
    step = scales.double()[..., None]
    whole = (rows.rows / torch.where(step > 0, step, torch.inf)).round().clamp(-core.ROW_MAX, core.ROW_MAX)
    blocks = torch.tensor([count // BLOCK for count in rows.counts], dtype=torch.uint8).view(shape)
    parts = (flattened(whole.to(torch.int8), rows.counts), flattened(scales, rows.counts), blocks.to(scales.device))
    return Stored(dict(zip(core.PARTS, parts, strict=True)), Rows(whole * step, rows.counts))


def kept_rows(arrays: Mapping[str, Tensor]) -> Stored:
    """The basis of a sealed tensor; its arrays are handed on as they are."""
    whole, scales, blocks = (arrays[part] for part in core.PARTS)
    counts = [BLOCK * count for count in blocks.flatten().tolist()]
    wide = _padded(whole.double() * scales.double()[:, None], counts)
    return Stored({part: arrays[part] for part in core.PARTS}, Rows(wide, counts))


def projector(rows: Rows, metric: Tensor) -> Tensor:
    """``[S, R, D]`` that makes of a vector its coefficients, zero for rows that are none."""
    weighted = rows.rows @ metric
    gram = weighted @ rows.rows.mT
    known = rows.known
    trace = gram.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
    ridge = core.RIDGE * trace / known.sum(1, keepdim=True).clamp(min=1)
    return torch.linalg.solve(gram + torch.diag_embed(torch.where(known, ridge, 1.0)), weighted)


def flattened(padded: Tensor, counts: Sequence[int]) -> Tensor:
    """The first elements of each stream, one stream behind the other."""
    return torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)])


def _padded(flat: Tensor, counts: Sequence[int]) -> Tensor:
    """Inverse of :func:`flattened`, zeros in between."""
    padded = flat.new_zeros(len(counts), max(counts), *flat.shape[1:])
    for part, own in zip(padded, flat.split(list(counts)), strict=True):
        part[: len(own)] = own
    return padded
