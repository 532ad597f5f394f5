"""Every method sealed, read and attended to once on a GPU, small and ragged, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.parity.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.parity.sanitize

Without a cache of its own PyTorch takes each tensor's memory from CUDA, so that a step beyond its end is seen. Results are
held against nothing here: the other tests do that. Names of methods leave the others out. ``nox -s sanitize`` runs both tools.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from quantwm_core.chunk import KINDS
from quantwm_core.method import Scheme
from quantwm_kernels.attention import attend
from quantwm_kernels.methods import seal_chunk
from quantwm_kernels.packed_attention import attend_packed
from quantwm_kernels.reading import Piece, ReadPlan
from quantwm_kernels.statistics import merge, principal_basis, second_moment
from tests.core import variants

SHAPES = ((1, 2, 77, 64), (1, 1, 130, 128), (2, 1, 33, 96), (1, 1, 150, 192))  # batch, heads, tokens, channels


def tokens(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tuple(shape), device="cuda", generator=generator).bfloat16()


def watch(variant: variants.Variant, shape: tuple[int, int, int, int]) -> None:
    """Two units of a method, the second with what is known by then, read in both layouts and attended to."""
    batch, heads, count, channels = shape
    method = variant.make()
    scheme = Scheme(method, method)
    queries = tokens((batch, heads, 40, channels), 7)
    moment = second_moment(queries, heads)
    principal_basis(moment.mean, min(8, channels))
    first = seal_chunk(scheme, tokens(shape, 0), tokens(shape, 1), None)
    second = seal_chunk(scheme, tokens(shape, 2), tokens(shape, 3), merge(moment, moment), first, count)
    plan = ReadPlan([Piece(first, 3, count, 1), Piece(second, 0, count - 2, count)])
    room = (batch, 2 * count, heads, channels)
    outputs = [torch.empty(room, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in KINDS]
    plan.into(outputs[0], outputs[1])
    attend_packed(queries, plan, [(tokens((batch, heads, 9, channels), 4), tokens((batch, heads, 9, channels), 5))])
    attend(queries, outputs[0][:, :, 1 : count - 2].contiguous(), outputs[1][:, :, 1 : count - 2].contiguous())


def main(names: Sequence[str]) -> None:
    """Every variant of the methods in one shape, by turns, and what a method is by default in all."""
    for number, variant in enumerate(variants.every()):
        if names and variant.name not in names:
            continue
        for shape in SHAPES if not variant.parameters else SHAPES[number % len(SHAPES) :][:1]:
            watch(variant, shape)
        sys.stdout.write(f"{variant}\n")
        sys.stdout.flush()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
