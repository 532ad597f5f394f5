"""How the Triton kernels are launched: sizes and warps as data, one decision about rounding, and what must hold first.

A launcher finds its entry of :data:`LAUNCHES` under the name of what it does. Whatever differs between devices is a line of data
here, so a benchmark can try other sizes and a test can fix one, without touching a kernel.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from quantwm_core.errors import DeviceError

FUSE_MULTIPLY_ADD = False
"""Whether ``a * b + c`` may round once. NumPy rounds twice, so a kernel does too, or stored codes would differ."""

SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes of fast memory that a program may take on the smallest devices, sm_86, sm_89 and sm_120."""

_TRUE = ("1", "true", "yes", "on", "y")


@dataclass(frozen=True)
class Launch:
    """Sizes that one kernel is compiled and launched with.

    Attributes:
        warps: Warps of a program.
        stages: Depth of the software pipeline.
        blocks: Sizes that the kernel takes as compile-time constants, by the name of the argument.
        programs: Where a program may take several tiles: programs per processor that are worth having first.
        most_tiles: Tiles that a program takes at most, where they are bounded.
        least_tiles: Tiles that a program takes at least, where there are as many.
        registers: Registers of a thread at most, so that more programs run at once; 0 leaves it to the compiler.
    """

    warps: int = 4
    stages: int = 1
    blocks: Mapping[str, int] = field(default_factory=dict)
    programs: int = 0
    most_tiles: int = 1
    least_tiles: int = 1
    registers: int = 0

    @property
    def options(self) -> dict[str, int | bool]:
        """Keyword arguments of the launch: the blocks and what Triton's compiler takes.

        >>> Launch(warps=2, blocks={"BLOCK": 64}).options
        {'BLOCK': 64, 'num_warps': 2, 'num_stages': 1, 'enable_fp_fusion': False}
        """
        return dict(self._options)

    @cached_property
    def _options(self) -> Mapping[str, int | bool]:
        return {**self.blocks, **self.compiler_options}

    @property
    def compiler_options(self) -> dict[str, int | bool]:
        """What Triton's compiler takes, without the blocks."""
        options: dict[str, int | bool] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers:
            options["maxnreg"] = self.registers
        return options | {"enable_fp_fusion": FUSE_MULTIPLY_ADD}


LAUNCHES: Mapping[str, Launch] = {
    "pack_codes": Launch(blocks={"BLOCK": 1024}),
    "unpack_codes": Launch(blocks={"BLOCK": 1024}),
    "encode_scales": Launch(blocks={"BLOCK": 1024}),
    "decode_scales": Launch(blocks={"BLOCK": 1024}),
    "read": Launch(warps=2, blocks={"BLOCK_TOKENS": 16}, programs=16, most_tiles=8, registers=96),
    "read_groups": Launch(warps=4, blocks={"BLOCK_TOKENS": 64}, programs=3, most_tiles=8),
    "read_groups_wide": Launch(warps=4, blocks={"BLOCK_TOKENS": 64}, programs=4, most_tiles=16, registers=128),
    "read_light": Launch(warps=4, blocks={"BLOCK_TOKENS": 64}, programs=4, most_tiles=8, registers=128),
    "read_product": Launch(warps=4, blocks={"BLOCK_TOKENS": 64}, programs=4, most_tiles=32, registers=128),
    "read_product_wide": Launch(warps=4, blocks={"BLOCK_TOKENS": 64}, programs=3, most_tiles=32, registers=168),
    "search_steps": Launch(blocks={"TILE": 8, "BLOCK_K": 16}, programs=8),
    "pack_directions": Launch(blocks={"TILE": 16}),
    "attend": Launch(warps=8, blocks={"BLOCK_QUERIES": 128, "BLOCK_TOKENS": 32}, programs=1, least_tiles=16),
    "attend_wide": Launch(warps=8, blocks={"BLOCK_QUERIES": 64, "BLOCK_TOKENS": 16}, programs=1, least_tiles=32),
    "attend_rotated": Launch(warps=8, blocks={"BLOCK_QUERIES": 64, "BLOCK_TOKENS": 32}, programs=1, least_tiles=16),
    "merge_attention": Launch(blocks={"BLOCK_QUERIES": 16}),
    "magnitude": Launch(warps=8, blocks={"TILE": 32}, programs=16),
    "frame": Launch(warps=8, blocks={"ROWS": 128}),
    "prepare_centroids": Launch(blocks={"ROWS": 16}),
    "assign_centroids": Launch(warps=4, stages=3, blocks={"TILE": 64}, programs=2),
    "assign_centroids_wide": Launch(warps=4, stages=2, blocks={"TILE": 64}, programs=3),
    "assign_centroids_streamed": Launch(warps=4, stages=2, blocks={"TILE": 64, "BLOCK_K": 32}, programs=8),
    "sum_members": Launch(warps=8, stages=3, blocks={"TILE": 64, "BLOCK_C": 256, "BLOCK_K": 128}, programs=1),
    "sum_members_wide": Launch(
        warps=8, stages=3, blocks={"TILE": 64, "BLOCK_C": 128, "BLOCK_K": 128}, programs=3, registers=128
    ),
    "choose_centroids": Launch(blocks={"TILE": 32}, programs=32, registers=96),
    "group_ranges": Launch(blocks={"TILE": 32}, programs=16),
    "encode_groups": Launch(warps=8, blocks={"TILE": 64}, registers=128),
    "decode_groups": Launch(blocks={"TILE": 32}),
    "encode_symmetric": Launch(blocks={"TILE": 32}),
    "invert_gram": Launch(),
    "project_error": Launch(blocks={"TILE": 32}),
    "quantize_coefficients": Launch(blocks={"TILE": 256}),
    "second_moment": Launch(warps=8, stages=3, blocks={"TILE": 64}, programs=1),
    "add_moments": Launch(blocks={"BLOCK": 1024}),
    "sensitivity": Launch(),
    "principal_basis": Launch(warps=4, blocks={"BLOCK_K": 64, "ROUNDS": 20, "SWEEPS": 7}),
    "principal_basis_128": Launch(warps=8, blocks={"BLOCK_K": 128, "ROUNDS": 20, "SWEEPS": 7}),
    "principal_basis_wide": Launch(warps=8, blocks={"BLOCK_K": 32, "ROUNDS": 20, "SWEEPS": 7}),
    "rank_centroids": Launch(warps=8, stages=1, blocks={"TILE": 128}, programs=4),
    "rank_centroids_wide": Launch(warps=8, stages=3, blocks={"TILE": 128, "BLOCK_K": 32}, programs=4),
    "rank_centroids_streamed": Launch(warps=4, stages=2, blocks={"TILE": 64, "BLOCK_K": 32}, programs=8),
}


MOST_ATTENDED_CHANNELS = 256
"""Head dimensions up to which attention from the packed cache fits into a processor."""

MOST_PACKED_ROWS = 0
"""Query rows per KV head up to which attention from the packed cache is faster than reading and attending.

It reconstructs keys and values again for every block of rows, a read does so once. 0: not measured to be faster anywhere.
"""


def ceil_div(dividend: int, divisor: int) -> int:
    """Quotient, rounded up; Triton's own takes ten times as long on the host.

    >>> ceil_div(7, 3)
    3
    """
    return -(-dividend // divisor)


def next_power_of_two(number: int) -> int:
    """Smallest power of two that is at least a positive ``number``.

    >>> [next_power_of_two(number) for number in (1, 3, 8)]
    [1, 4, 8]
    """
    return 1 << (number - 1).bit_length()


def packed_attention_pays(rows: int, channels: int) -> bool:
    """Whether attention from the packed cache is faster, for as many query rows per KV head and channels.

    >>> packed_attention_pays(MOST_PACKED_ROWS + 1, 128)
    False
    """
    return rows <= MOST_PACKED_ROWS and channels <= MOST_ATTENDED_CHANNELS


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 where there is none.

    >>> processors(torch.device("cpu"))
    1
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_ranks = ContextVar("ranks", default=1)


def ranks() -> int:
    """Devices that hold as many of a layer's streams each as this one does.

    Where a sum over tokens is split into pieces, their number follows from the streams; it counts those of all ranks, so that
    each sum rounds as it would on a device that held them all.
    """
    return _ranks.get()


@contextmanager
def one_of(count: int) -> Iterator[None]:
    """Launch for one of ``count`` ranks that share a layer's heads.

    >>> with one_of(4):
    ...     ranks()
    4
    >>> ranks()
    1
    """
    before = _ranks.set(count)
    try:
        yield
    finally:
        _ranks.reset(before)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of fast memory that a program may take; without a device as much as the smallest one has."""
    if device.type != "cuda":
        return SMALLEST_SHARED_MEMORY
    known: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return known or SMALLEST_SHARED_MEMORY


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on tensors in the memory of the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def check_available(name: str = "tensor") -> None:
    """Refuse to launch where there is no Triton.

    Raises:
        DeviceError: The triton package is not installed.
    """
    if not _has_triton():
        raise DeviceError(
            f"{name}: kernels for CUDA tensors need the package triton, which is not installed; "
            "install quantwm-kernels[gpu], or move the tensor with tensor.cpu()"
        )


def check_served(tensor: Tensor, name: str = "tensor") -> None:
    """Refuse a tensor on a device for which there is neither the reference nor a kernel.

    Raises:
        DeviceError: It lives neither on the CPU nor on a CUDA device.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"{name}: the tensor lives on {tensor.device}; quantwm serves CPU tensors and CUDA tensors, "
            "so move it with tensor.cuda() or tensor.cpu()"
        )


def on_device(tensor: Tensor, name: str = "tensor") -> AbstractContextManager[object]:
    """Context in which a kernel runs where ``tensor`` lives.

    Raises:
        DeviceError: It lives on the CPU and the interpreter is off, or on a device that Triton does not serve here.
    """
    if tensor.is_cuda:
        current = tensor.device.index == torch.cuda.current_device()
        return nullcontext() if current else torch.cuda.device(tensor.device)
    if tensor.device.type == "cpu" and interpreted():
        return nullcontext()
    raise DeviceError(
        f"{name}: the tensor lives on {tensor.device} and this kernel runs on CUDA devices; move it with tensor.cuda(), "
        "or set TRITON_INTERPRET=1 before Python starts to run kernels on CPU tensors"
    )


@contextmanager
def full_precision() -> Iterator[None]:
    """FP32 matrix products in FP32, whatever the host has allowed for its own; the setting comes back afterwards.

    >>> torch.set_float32_matmul_precision("high")
    >>> with full_precision():
    ...     torch.get_float32_matmul_precision()
    'highest'
    >>> torch.get_float32_matmul_precision()
    'high'
    >>> torch.set_float32_matmul_precision("highest")
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the host set it by torch's newer names, which the older ones refuse to describe
        with _ieee_products():
            yield
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _ieee_products() -> Iterator[None]:
    """The same by torch's newer setting, which releases that know the older one alone lack."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before
