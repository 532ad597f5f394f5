"""Compiles every kernel for every architecture, without a GPU: ``python -m tests.parity.compile_ahead``.

One line of JSON for each: kernel, variant, architecture, bytes of shared memory, registers that had to be spilled.
Triton's interpreter replaces the compiler, so this runs as a process of its own, without ``TRITON_INTERPRET``.
"""

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantwm_kernels.launch import LAUNCHES
from quantwm_kernels.recipe import Form, Recipe
from quantwm_kernels.triton.reading import constants

# Compute capability, and the shared memory that a program may have there.
SHARED_NBYTES: Mapping[int, int] = {
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip
PACKAGE = "quantwm_kernels.triton"


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched.

    Attributes:
        kernel: Module and name.
        launch: Its entry of ``LAUNCHES``.
        arguments: Types of the run-time arguments, in order, by their first letters: ``"codes:*u8 total:i64"``.
        constants: Compile-time arguments beside the blocks of the launch.
        variant: What distinguishes it from other cases of the kernel.
        architectures: All; a further variant of a kernel that has a case with all may name some.
    """

    kernel: str
    launch: str
    arguments: str
    constants: Mapping[str, int] = field(default_factory=dict)
    variant: str = ""
    architectures: tuple[int, ...] = tuple(SHARED_NBYTES)


READ = (
    "table:*i64 keys:*bf16 values:*bf16 key_programs:i32 span:i32 heads:i32 four:i32 "
    "key_batch:i64 key_head:i64 key_token:i64 value_batch:i64 value_head:i64 value_token:i64"
)


def read(
    variant: str,
    keys: Recipe,
    values: Recipe,
    *,
    lanes: int = 8,
    aligned: bool = True,
    architectures: tuple[int, ...] = (86, 90),
) -> Case:
    """The reading kernel for two recipes."""
    recipes = constants("KEY", keys, lanes) | constants("VALUE", values, lanes)
    return Case(
        "reading.read_kernel", "read", READ, recipes | {"LANES": lanes, "ALIGNED": int(aligned)}, variant, architectures
    )


CLUSTERED = Recipe(Form.AFFINE, 128, 64, 1)
CASES = (
    Case("packing.pack_kernel", "pack_codes", "codes:*u8 packed:*u8 codes_per_row:i32 bytes_per_row:i32 total:i64"),
    Case("packing.unpack_kernel", "unpack_codes", "packed:*u8 codes:*u8 codes_per_row:i32 bytes_per_row:i32 total:i64"),
    Case(
        "scales.encode_kernel",
        "encode_scales",
        "steps:*fp32 largest:*fp32 stored:*u8 super_scale:*fp32 per_stream:i32 total:i64",
    ),
    Case("scales.decode_kernel", "decode_scales", "stored:*u8 super_scale:*fp32 steps:*fp32 per_stream:i32 total:i64"),
    read("quantwm", Recipe(Form.AFFINE, 128, 64, 1, rank=8), CLUSTERED, architectures=tuple(SHARED_NBYTES)),
    read("quantwm, sparse", Recipe(Form.AFFINE, 256, 64, 1, rank=16, sparse=True), Recipe(Form.EXACT, 256)),
    read("quantwm, high rank", Recipe(Form.AFFINE, 80, 40, 1, rank=24, sparse=True), Recipe(Form.AFFINE, 80, 40, 1)),
    read("qvg", Recipe(Form.SYMMETRIC, 96, 48, 3), CLUSTERED, lanes=4, aligned=False),
    read("kivi", Recipe(Form.CHANNEL_MINMAX, 128, 32), Recipe(Form.MINMAX, 128, 32)),
    read("rtn", Recipe(Form.CHANNEL_AFFINE, 64, 64), Recipe(Form.AFFINE, 64, 64)),
)


def compiled(case: Case) -> Iterator[dict[str, object]]:
    """Compile a case for every architecture."""
    module, _, name = case.kernel.partition(".")
    kernel = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    types = dict(argument.split(":") for argument in case.arguments.split())
    launch = LAUNCHES[case.launch]
    fixed = {**launch.blocks, **case.constants}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types if types[name][0] == "*"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    for architecture in case.architectures:
        source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
        target = GPUTarget("cuda", architecture, 32)
        binary = triton.compile(source, target=target, options=launch.compiler_options)
        yield {
            "kernel": case.kernel,
            "variant": case.variant,
            "architecture": architecture,
            "shared": binary.metadata.shared,
        }


if __name__ == "__main__":
    for each in CASES:
        for line in compiled(each):
            sys.stdout.write(json.dumps(line) + "\n")
