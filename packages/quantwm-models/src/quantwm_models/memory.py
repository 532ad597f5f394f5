"""Saying what would fit when memory runs out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from quantwm_models.errors import CacheMemoryError
from quantwm_models.report import CacheReport

_RAN_OUT = re.compile("DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA error: out of memory")
"""What is a plain RuntimeError: of a CPU on POSIX and on Windows, and of memory that is pinned for a GPU."""


def free_nbytes(device: torch.device) -> int | None:
    """Bytes that could still be allocated on a GPU, those that PyTorch holds back included; None for other devices."""
    if device.type != "cuda":
        return None
    held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held_back


def advice(report: CacheReport, token_nbytes: int, free: int | None, *, offloaded: bool) -> str:
    """What a layer's cache takes, and what would take less.

    Args:
        report: Of the layer.
        token_nbytes: BF16 bytes of a token's keys and values in one layer.
        free: Bytes that are left, if that is known.
        offloaded: Whether sealed units are in host memory already.

    >>> report = CacheReport(tokens=900, sealed_nbytes=2**21, active_nbytes=2**20, workspace_nbytes=2**22)
    >>> print(advice(report, 8192, 2**21, offloaded=False))
    this layer holds 2.0 MiB sealed and 1.0 MiB in BF16 for 900 tokens; the layers share 4.0 MiB to read; 2.0 MiB are free: a read
    of 768 tokens would fit, so a window of so many; offload=True would keep what is sealed in host memory
    """
    sealed, active = _mib(report.sealed_nbytes), _mib(report.active_nbytes)
    parts = [
        f"this layer holds {sealed} sealed and {active} in BF16 for {report.tokens} tokens",
        f"the layers share {_mib(report.workspace_nbytes + report.staging_nbytes)} to read",
    ]
    if free is not None and token_nbytes:
        tokens = (free + report.workspace_nbytes) // token_nbytes
        parts.append(f"{_mib(free)} are free: a read of {tokens} tokens would fit, so a window of so many")
    if not offloaded:
        parts.append("offload=True would keep what is sealed in host memory")
    return "; ".join(parts)


@contextmanager
def explained(advise: Callable[[], str]) -> Iterator[None]:
    """Turn an error of PyTorch, a GPU's or a CPU's, or of NumPy, which seals on a CPU, into one that says what would fit.

    Raises:
        CacheMemoryError: Memory ran out inside; it is an ``OutOfMemoryError`` and a ``MemoryError``, too, for hosts that
            catch those.
    """
    try:
        yield
    except CacheMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not _RAN_OUT.search(str(error)):
            raise
        raise CacheMemoryError(f"out of memory, and the cache is as it was: {advise()}") from error


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
