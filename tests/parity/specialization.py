"""What Triton compiles for a launch: types, compile-time arguments and options; compiled without a GPU, and what to look at."""

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PACKAGE = "quantwm_kernels.triton"
ALIGNMENT = 16


class Device(NamedTuple):
    """A GPU, as launchers see it.

    Attributes:
        shared_nbytes: Shared memory that a program may have.
        processors: Multiprocessors of a usual one.
    """

    shared_nbytes: int
    processors: int


# By compute capability: A100, A10, L40, H100, B200 and RTX 5090.
DEVICES: Mapping[int, Device] = {
    80: Device(163 << 10, 108),
    86: Device(99 << 10, 72),
    89: Device(99 << 10, 142),
    90: Device(227 << 10, 132),
    100: Device(227 << 10, 148),
    120: Device(99 << 10, 170),
}


@dataclass(frozen=True)
class Specialization:
    """A kernel as Triton compiles it.

    Attributes:
        kernel: Module and name.
        types: Of the run-time arguments, by name, as Triton writes them: ``*bf16``, ``i64``; behind a colon ``16`` if it is
            known to be a multiple of 16 (a pointer: to lie at one), or ``1`` if it is known to be 1.
        constants: Compile-time arguments, by name.
        options: What the compiler takes.
        architecture: Compute capability of the device that it is meant for.
    """

    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, float]
    options: Mapping[str, float]
    architecture: int

    @classmethod
    def from_json(cls, line: str) -> Self:
        """What :meth:`to_json` wrote."""
        return cls(**json.loads(line))

    @property
    def function(self) -> Any:
        """What Triton made of the source."""
        module, _, name = self.kernel.partition(".")
        return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name).function

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def compiled(case: Specialization) -> dict[str, Any]:
    """Compile, and return bytes of shared memory and the operands that are too short; in a process without the interpreter."""
    kernel = case.function
    types = {each: text.partition(":") for each, text in case.types.items()}
    ones = {each: 1 for each, (_, _, known) in types.items() if known == "1"}
    signature = {
        each: types[each][0] if each in types and each not in ones else "constexpr" for each in kernel.arg_names
    }
    aligned = {
        (kernel.arg_names.index(each),): [["tt.divisibility", ALIGNMENT]]
        for each, (_, _, known) in types.items()
        if known == str(ALIGNMENT)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs={**case.constants, **ones}, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", case.architecture, 32), options=dict(case.options))
    return {"shared": binary.metadata.shared, "crowded": crowded(binary.asm["ttgir"])}


def crowded(code: str) -> list[str]:
    """Operands of matrix products whose summed axis is shorter than the four threads that share it would fill."""
    found = re.findall(r"tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<{opIdx = (\d), parent = #\w+, kWidth = (\d+)", code)
    operands = {(int(columns if side == "0" else rows), int(width)) for rows, columns, side, width in found}
    return [f"{length} summed, {width} a thread" for length, width in sorted(operands) if length < 4 * width]
