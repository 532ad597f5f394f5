"""Directions that the chunks of a cache share: fitted to a covariance under a metric, stored in INT8.

A key error ``e`` costs ``e^T G e``. Whitening by that metric and decorrelating gives the Karhunen-Loeve directions::

    A = G^(1/2)        A Sigma A = V diag(energy) V^T        rows of the basis = (A^-1 V)^T, largest energy first

A coefficient vector ``z`` stands for ``z @ rows``; in it every component costs the same. With ``G = I`` the rows are the
principal components. A row is INT8 with one BF16 scale: what the rounding turns it by, the encoder takes into account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import BFloat16, Float64, Int8, UInt8

from quantwm_core.allocation import BLOCK
from quantwm_core.arguments import explain_errors
from quantwm_core.domain import BF16, check_finite
from quantwm_core.errors import ShapeError

ROW_MAX = 127
PARTS = ("shared_basis", "shared_basis_scales", "shared_basis_blocks")
RIDGE = 1e-9
"""Share of their mean square that directions are taken to be more themselves: some nearly depend on one another."""


@dataclass(frozen=True)
class Basis:
    """Bases of a tensor's streams, one after the other.

    Attributes:
        rows: int8 ``[directions of all streams, D]``.
        scales: BF16, one a row.
        blocks: uint8 ``[B, H]``, blocks of eight directions of each stream.
    """

    rows: Int8[np.ndarray, "directions channels"]
    scales: BFloat16[np.ndarray, " directions"]
    blocks: UInt8[np.ndarray, "batch heads"]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Basis:
        """The basis among the arrays of a sealed tensor."""
        return cls(*(arrays[part] for part in PARTS))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Storage, by the names that it bears in a sealed tensor."""
        return dict(zip(PARTS, (self.rows, self.scales, self.blocks), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(array.nbytes for array in self.arrays.values())

    def streams(self) -> list[tuple[Int8[np.ndarray, "directions channels"], BFloat16[np.ndarray, " directions"]]]:
        """Rows and scales of each stream.

        Raises:
            ShapeError: There are more or fewer rows than ``blocks`` says.
        """
        ends = np.cumsum(BLOCK * self.blocks.astype(np.int64).ravel())
        if len(ends) == 0 or not len(self.rows) == len(self.scales) == ends[-1]:
            raise ShapeError(f"a basis of {len(self.rows)} rows and {len(self.scales)} scales for blocks {self.blocks}")
        return list(zip(np.split(self.rows, ends[:-1]), np.split(self.scales, ends[:-1]), strict=True))


def store(streams: Sequence[Float64[np.ndarray, "_directions channels"]], shape: tuple[int, int]) -> Basis:
    """Round the rows of every stream to INT8.

    Args:
        streams: A multiple of eight rows of each stream, by batch, then head.
        shape: Batch and heads.

    >>> basis = store([np.eye(8)], (1, 1))
    >>> basis.rows.diagonal(), basis.nbytes, bool((wide(*basis.streams()[0]) == np.eye(8)).all())
    (array([127, 127, 127, 127, 127, 127, 127, 127], dtype=int8), 81, False)
    """
    rows = np.concatenate(streams)
    check_finite(rows, "directions")
    scales = (np.abs(rows).max(axis=1) / ROW_MAX).astype(BF16)
    step = scales.astype(np.float64)[:, None]
    whole = np.rint(rows / np.where(step > 0, step, np.inf))
    blocks = np.array([len(each) // BLOCK for each in streams], np.uint8).reshape(shape)
    return Basis(np.clip(whole, -ROW_MAX, ROW_MAX).astype(np.int8), scales, blocks)


def wide(
    rows: Int8[np.ndarray, "directions channels"], scales: BFloat16[np.ndarray, " directions"]
) -> Float64[np.ndarray, "directions channels"]:
    """A stream's rows in FP64."""
    return rows.astype(np.float64) * scales.astype(np.float64)[:, None]


def normalised(
    moments: Float64[np.ndarray, "*streams channels channels"],
) -> tuple[Float64[np.ndarray, "*streams channels channels"], Float64[np.ndarray, "*streams"]]:
    """Moments over the means of their diagonals, and those means; the identity and zero where a moment is zero.

    :func:`quantwm_core.statistics.normalised` is the same in FP32.

    >>> normalised(np.diag([1.0, 3.0]))
    (array([[0.5, 0. ],
           [0. , 1.5]]), array(2.))
    """
    check_finite(moments, "moments")
    average = np.asarray(np.trace(moments, axis1=-2, axis2=-1)) / moments.shape[-1]
    known = (average > 0)[..., None, None]
    divisor = np.where(known, average[..., None, None], 1.0)
    return np.where(known, moments / divisor, np.eye(moments.shape[-1])), np.asarray(average)


def fit(
    covariance: Float64[np.ndarray, "channels channels"], metric: Float64[np.ndarray, "channels channels"]
) -> Float64[np.ndarray, "channels channels"]:
    """Rows that whiten the metric and decorrelate the covariance, largest energy first.

    Args:
        covariance: Of what is to be coded, positive semidefinite.
        metric: Positive definite; an eigenvalue counts as at least the share :data:`RIDGE` of the largest, because that of
            a moment which knows few queries may round to a negative one.

    Returns:
        FP64 ``[D, D]``; the component of largest magnitude of each row is positive.

    >>> fit(np.diag([1.0, 9.0]), np.diag([4.0, 1.0]))
    array([[0. , 1. ],
           [0.5, 0. ]])
    """
    check_finite(covariance, "covariance")
    check_finite(metric, "metric")
    energies, vectors = np.linalg.eigh(metric)
    root = np.sqrt(np.maximum(energies, RIDGE * energies[-1]))
    whiten, restore = (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
    _, directions = np.linalg.eigh(whiten @ covariance @ whiten)
    rows = (restore @ directions[:, ::-1]).T
    largest = np.abs(rows).argmax(axis=1)
    return rows * np.where(rows[np.arange(len(rows)), largest] < 0, -1.0, 1.0)[:, None] + 0.0  # no negative zeros


def projector(
    rows: Float64[np.ndarray, "directions channels"], metric: Float64[np.ndarray, "channels channels"]
) -> Float64[np.ndarray, "directions channels"]:
    """What makes of a vector its coefficients: those with the smallest error under the metric.

    >>> projector(np.array([[2.0, 0.0]]), np.eye(2)).round(6)
    array([[0.5, 0. ]])
    """
    weighted = rows @ metric
    gram = weighted @ rows.T
    ridge = RIDGE * np.trace(gram) / len(gram) if len(gram) else 0.0
    return np.linalg.solve(gram + ridge * np.eye(len(gram)), weighted)


explain_errors(globals())
