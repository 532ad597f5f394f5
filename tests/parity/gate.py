"""How two implementations of an operator are held against each other.

Integers, packed codes and stored scales are compared bit for bit. Floating-point results that depend on the order of a
sum get a line in :data:`TOLERANCES`, with its reason. A failure names the tensor, the first bad index, the maximum and
the RMS of the difference. Results are written into poisoned memory, so that an element that nobody wrote shows.
"""

import ast
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

POISON = 0xA5


@dataclass(frozen=True)
class Tolerance:
    """How far a result may lie from the reference.

    Attributes:
        reason: Why it may differ at all.
        relative: Of the reference's element.
        absolute: Added to it.
        largest: Of the reference's largest element, added too.
        share: Of elements that may lie outside nevertheless.
    """

    reason: str
    relative: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0
    share: float = 0.0


TOLERANCES: Mapping[str, Tolerance] = {
    "second_moment": Tolerance("FP32 sums over queries in another order", relative=1e-5, absolute=1e-6),
    "projector": Tolerance(
        "bases are compared as U U^T; BF16 storage, eigenvectors rotate in near-ties", absolute=2e-2
    ),
    "coefficients": Tolerance("INT8 steps: a value next to a tie may fall to either side", absolute=1.0, share=1e-3),
    "searched": Tolerance("two shares of a range may lose nearly the same", share=2e-2),
    "feedback": Tolerance(
        "codes after a code that fell to the other side of a tie differ too", absolute=3.0, share=2e-2
    ),
    "decoded": Tolerance(
        "BF16: the FP32 sum before the one rounding may differ in its last bit, which shows where its terms cancel; "
        "matrix units flush subnormal products",
        relative=2.0**-7,
        absolute=2.0**-120,
        largest=2.0**-20,
    ),
    "dense_attention": Tolerance("FP32 products and sums over tokens in another order", relative=1e-4, absolute=2e-5),
    "log_sum_exp": Tolerance("FP32 sums over channels and tokens in another order", relative=1e-5, absolute=1e-3),
    "rotated_log_sum_exp": Tolerance(
        "keys are not rounded to BF16, rotated queries are", relative=2.0**-8, absolute=2e-2
    ),
    "attention": Tolerance("online softmax sums in blocks; BF16 output", relative=2.0**-6, absolute=2.0**-8),
}


def poison(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Fresh memory with a pattern in every byte."""
    size = torch.empty((), dtype=dtype).itemsize
    return torch.full((*shape, size), POISON, dtype=torch.uint8, device=device).view(dtype)[..., 0]


def assert_equal(name: str, result: Tensor, reference: Tensor) -> None:
    """Every bit is the same; a negative zero is not a zero.

    Raises:
        AssertionError: Shape, number format or a bit differs.
    """
    _same_kind(name, result, reference)
    ours, theirs = (tensor.cpu().contiguous().unsqueeze(-1).view(torch.uint8) for tensor in (result, reference))
    _judge(name, (ours != theirs).any(-1), result, reference, allowed=0.0)


def assert_close(name: str, result: Tensor, reference: Tensor, tolerance: Tolerance) -> None:
    """All but a share of the elements lie within a tolerance; a NaN lies outside.

    Raises:
        AssertionError: Shape or number format differs, or too many elements do.
    """
    _same_kind(name, result, reference)
    ours, theirs = result.cpu().double(), reference.cpu().double()
    allowed = tolerance.absolute + tolerance.relative * theirs.abs()
    if tolerance.largest and theirs.numel():
        allowed += tolerance.largest * theirs.abs().max()
    within = (ours - theirs).abs() <= allowed
    _judge(name, ~within, result, reference, allowed=tolerance.share)


def declared_operators(text: str) -> tuple[str, ...]:
    """What a parity test says that it holds against the reference: its constant ``OPERATORS``.

    >>> declared_operators("OPERATORS = ('pack_codes', 'unpack_codes')")
    ('pack_codes', 'unpack_codes')
    """
    for statement in ast.parse(text).body:
        match statement:
            case ast.Assign(targets=[ast.Name("OPERATORS")], value=value):
                return tuple(ast.literal_eval(value))
    return ()


def missing_tests(kernels: Iterable[tuple[str, str]], tests: Mapping[str, Collection[str]]) -> list[str]:
    """What has no parity test.

    Args:
        kernels: Module and operator of every implementation beside the reference: ``("packing", "pack_codes")``.
        tests: Operators that every parity test declares, by the module that it is named after.

    >>> missing_tests([("packing", "pack_codes"), ("qsac", "choose")], {"packing": ("pack_codes",)})
    ['qsac: choose']
    """
    return [f"{module}: {name}" for module, name in kernels if name not in tests.get(module, ())]


def _same_kind(name: str, result: Tensor, reference: Tensor) -> None:
    ours, theirs = (result.dtype, tuple(result.shape)), (reference.dtype, tuple(reference.shape))
    assert ours == theirs, f"{name}: got {ours}, the reference has {theirs}"


def _judge(name: str, bad: Tensor, result: Tensor, reference: Tensor, allowed: float) -> None:
    if bad.sum() <= allowed * bad.numel():
        return
    ours, theirs = result.cpu().double(), reference.cpu().double()
    difference = (ours - theirs).abs()
    first = tuple(int(index) for index in bad.nonzero()[0])
    raise AssertionError(
        f"{name}: {int(bad.sum())} of {bad.numel()} elements differ, first at {first}: {ours[first]} for {theirs[first]}; "
        f"maximum {difference.max():.3g}, RMS {difference.square().mean().sqrt():.3g}"
    )
