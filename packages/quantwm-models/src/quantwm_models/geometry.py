"""Checking what a host hands over, and copying what it appends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core import statistics as core
from quantwm_core.errors import DtypeError, ParameterError, ShapeError
from quantwm_core.stream import is_whole
from quantwm_kernels.bridge import check_detached, to_numpy
from quantwm_kernels.launch import ceil_div, check_served
from quantwm_kernels.sealing import ACCEPTED
from quantwm_kernels.statistics import QueryMoment


class Geometry(NamedTuple):
    """What every chunk of a cache has in common."""

    batch: int
    heads: int
    key_channels: int
    value_channels: int
    device: torch.device

    @property
    def token_nbytes(self) -> int:
        """BF16 bytes of a token's keys and values.

        >>> Geometry(1, 2, 64, 32, torch.device("cpu")).token_nbytes
        384
        """
        return 2 * self.batch * self.heads * (self.key_channels + self.value_channels)


def exact_chunk(
    keys: Tensor, values: Tensor, known: Geometry | None, *, copy: bool = True
) -> tuple[Tensor, Tensor, Geometry]:
    """A chunk in BF16, and its geometry.

    Args:
        keys, values: BF16, FP16 or FP32 ``[B, H, N, D]`` of any strides.
        known: Geometry of the chunks before, which this one must have, or None.
        copy: Return contiguous copies; otherwise what is BF16 already is returned as it is.

    Raises:
        StateError: A tensor requires grad.
        DeviceError: A tensor lives where no implementation serves it.
        DtypeError, ShapeError: The tensors do not fit each other or ``known``.

    >>> exact_chunk(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 8), None)[2][:4]
    (1, 2, 4, 8)

    What is BF16 and handed over is not copied:

    >>> keys, values = torch.ones(2, 1, 2, 3, 4, dtype=torch.bfloat16)
    >>> exact_chunk(keys, values, None, copy=False)[0] is keys, exact_chunk(keys, values, None)[0] is keys
    (True, False)
    """
    for name, tensor in (("keys", keys), ("values", values)):
        check_detached(tensor, name)
        check_served(tensor, name)
        if tensor.dtype not in ACCEPTED:
            raise DtypeError(f"{name}: got {tensor.dtype}, need torch.bfloat16, float16 or float32")
    shape, value_shape = tuple(keys.shape), tuple(values.shape)
    if len(shape) != 4 or len(value_shape) != 4 or shape[:3] != value_shape[:3]:
        raise ShapeError(f"keys {shape} and values {value_shape}: need [B, H, N, D] with the same B, H and N")
    if 0 in shape or value_shape[3] == 0:
        raise ShapeError(f"keys {shape} and values {value_shape}: an empty chunk; need at least one token")
    geometry = Geometry(shape[0], shape[1], shape[3], value_shape[3], keys.device)
    if known is not None and known != geometry:
        raise ShapeError(f"a chunk of {geometry} after chunks of {known}; clear() before changing it")
    if not copy:
        if not (keys.dtype is values.dtype is torch.bfloat16):
            keys, values = keys.to(torch.bfloat16), values.to(torch.bfloat16)
        return keys, values, geometry
    copies = [torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device) for tensor in (keys, values)]
    return copies[0].copy_(keys), copies[1].copy_(values), geometry


def chunk_sizes(tokens: Sequence[int]) -> list[int]:
    """Tokens of each chunk of a history.

    Raises:
        ShapeError: They are no whole numbers above 0, or none.

    >>> chunk_sizes(5)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ShapeError: chunks of 5 tokens; need whole numbers above 0, such as [32, 32]
    """
    try:
        sizes = list(tokens)
    except TypeError:  # a single number, too, of an array without axes
        sizes = []
    if not sizes or not all(is_whole(each) and each > 0 for each in sizes):
        raise ShapeError(f"chunks of {sizes or tokens!r} tokens; need whole numbers above 0, such as [32, 32]")
    return [int(each) for each in sizes]


def chunks_of(name: str, tensor: Tensor, tokens: list[int]) -> Sequence[Tensor]:
    """The chunks of so many ``tokens`` each that ``[B, H, N, D]`` consists of.

    Raises:
        DtypeError: It is no tensor.
        StateError: The tensor requires grad.
        ShapeError: It is not of so many tokens.

    >>> [tuple(each.shape) for each in chunks_of("keys", torch.ones(1, 2, 5, 4), [3, 2])]
    [(1, 2, 3, 4), (1, 2, 2, 4)]
    """
    check_detached(tensor, name)
    if tensor.ndim != 4 or tensor.shape[2] != sum(tokens):
        raise ShapeError(f"{name}: got {tuple(tensor.shape)}, need [B, H, N, D] of {sum(tokens)} tokens, {tokens}")
    return tensor.split(tokens, dim=2)


def check_queries(queries: Tensor) -> None:
    """Refuse what no statistics can be made of.

    Raises:
        StateError: The queries require grad.
        DeviceError: They live where no implementation serves them.
        DtypeError: They are of another number format.

    >>> check_queries(torch.ones(1, 2, 3, 4, dtype=torch.int8))
    Traceback (most recent call last):
    ...
    quantwm_core.errors.DtypeError: queries: got torch.int8, need torch.bfloat16, float16 or float32
    """
    check_detached(queries, "queries")
    check_served(queries, "queries")
    if queries.dtype not in ACCEPTED:
        raise DtypeError(f"queries: got {queries.dtype}, need torch.bfloat16, float16 or float32")


def check_moment(moment: QueryMoment) -> None:
    """Refuse what is no second moment of queries. The numbers of one on a GPU are not looked at, which would wait for them.

    Raises:
        StateError: The mean requires grad.
        DeviceError: It lives where no implementation serves it.
        DtypeError, ShapeError: It is no FP32 ``[B, H, D, D]``.
        ParameterError: Its queries are no whole number above 0.
        DomainError: On a CPU, it holds NaN or Inf, or less than 0 on the diagonal.

    >>> check_moment(QueryMoment(torch.zeros(1, 2, 4, 4), 0))
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: moment: of 0 queries; need a whole number above 0
    """
    if not isinstance(moment, QueryMoment):
        raise DtypeError(f"moment: got {type(moment).__name__}, need a QueryMoment, which second_moment() makes")
    mean, queries = moment
    check_detached(mean, "moment")
    check_served(mean, "moment")
    if mean.dtype != torch.float32:
        raise DtypeError(f"moment: got {mean.dtype}, need torch.float32")
    if mean.ndim != 4 or mean.shape[2] != mean.shape[3] or mean.numel() == 0:
        raise ShapeError(f"moment: got {tuple(mean.shape)}, need [B, H, D, D], not empty")
    if not is_whole(queries) or queries < 1:
        raise ParameterError(f"moment: of {queries!r} queries; need a whole number above 0")
    if not mean.is_cuda:
        core.check_moment(to_numpy(mean, "moment"), "moment")


def shared_by(heads: int, own: int) -> int:
    """Ranks that share a layer's ``heads``, of which each holds ``own``.

    >>> shared_by(40, 10), shared_by(40, 40)
    (4, 1)
    """
    return ceil_div(heads, own)
