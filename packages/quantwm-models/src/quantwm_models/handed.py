"""What a caller hands over to be saved or loaded: caches, a path, tensors by name; everything else is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from quantwm_core.errors import ParameterError
from quantwm_models.attach import Attachment
from quantwm_models.cache import LayerCache
from quantwm_models.counter import Counter
from quantwm_models.store import Store

Caches = Attachment | LayerCache | Store | Iterable[LayerCache | Store]
"""What is saved together: all caches of an attached host, or some that are kept by hand, in an order that stays."""


def listed_caches(caches: object) -> list[LayerCache]:
    """Caches that are kept by hand, each once.

    Raises:
        ParameterError: Something is none, there is none, or one is there twice.

    >>> listed_caches([])
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: caches []: need an Attachment, or caches in an order that stays
    """
    several = [caches] if isinstance(caches, LayerCache | Store) else caches
    listed = list(several) if isinstance(several, Iterable) and not isinstance(several, str) else []
    if not listed:
        raise ParameterError(f"caches {caches!r}: need an Attachment, or caches in an order that stays")
    found: list[LayerCache] = []
    for number, each in enumerate(listed):
        cache = each.halves.cache if isinstance(each, Store) else each
        if not isinstance(cache, LayerCache):
            raise ParameterError(f"caches, number {number}: got {each!r}, need a LayerCache or one of its stores")
        if any(cache is other for other in found):
            raise ParameterError(f"caches, number {number}: layer {cache.layer} came before; name each cache once")
        found.append(cache)
    return found


def check_path(path: object) -> None:
    """Raise :class:`ParameterError` for what names no file.

    >>> check_path(3)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: path 3: need the path of a file, as text or a Path
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise ParameterError(f"path {path!r}: need the path of a file, as text or a Path")


def extra_tensors(extra: object) -> dict[str, Tensor]:
    """Tensors of the host by name, counters as tensors.

    Raises:
        ParameterError: It is no mapping of names to dense tensors.

    >>> extra_tensors({"frame": 3})
    Traceback (most recent call last):
    ...
    quantwm_core.errors.ParameterError: extra 'frame': got 3, need a dense tensor, as torch.tensor(3) is one
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ParameterError(f"extra {extra!r}: need a dictionary of tensors by name")
    tensors = {}
    for name, each in extra.items():
        if not isinstance(name, str) or not name.isprintable():
            raise ParameterError(f"extra {name!r}: need a name of printable characters")
        tensor = each.tensor() if isinstance(each, Counter) else each
        if not isinstance(tensor, Tensor):
            raise ParameterError(f"extra {name!r}: got {each!r}, need a dense tensor, as torch.tensor(3) is one")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
            kind = f"{tensor.dtype} of layout {tensor.layout} on {tensor.device}"
            raise ParameterError(f"extra {name!r}: got a tensor of {kind}, need a dense one that holds numbers")
        tensors[name] = tensor
    return tensors


def plain(value: object) -> object:
    """A number of NumPy's as Python's, for JSON.

    Raises:
        ParameterError: It is none.

    >>> plain(np.int64(3))
    3
    """
    if isinstance(value, np.generic):
        return value.item()
    raise ParameterError(f"a cache has the setting {value!r}, which JSON cannot say; make it a number or a text")
