"""Searched steps and packed codes of a transform code, against the reference: codes and bytes to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import allocation, blocks
from quantwm_core import directions as core
from quantwm_kernels.bridge import to_numpy
from tests.parity.gate import assert_equal
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.directions", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

COUNTS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)).filter(any)


def made(
    counts: list[tuple[int, int, int]], tokens: int, seed: int, content: str = "normal"
) -> tuple[np.ndarray, np.ndarray]:
    """FP32 coefficients ``[S, tokens, K]`` and int64 widths ``[S, K]``, padded with zeros."""
    most = max(map(allocation.directions, counts))
    rng = np.random.default_rng(seed)
    coefficients = np.zeros((len(counts), tokens, most), np.float32)
    widths = np.zeros((len(counts), most), np.int64)
    for each, row, own in zip(coefficients, widths, counts, strict=True):
        coded = allocation.directions(own)
        row[:coded] = allocation.widths(own)
        drawn = rng.standard_normal((tokens, coded)) * np.exp(rng.standard_normal(coded))
        each[:, :coded] = np.round(drawn * 4) / 4 if content == "ties" else drawn
    if content == "constant":
        coefficients[..., ::3] = 0
    return coefficients, widths


@settings(EXAMPLES)
@given(
    counts=st.lists(COUNTS, min_size=1, max_size=3),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 99),
    content=st.sampled_from(["normal", "ties", "constant"]),
)
def test_packed(device: torch.device, counts: list[tuple[int, int, int]], tokens: int, seed: int, content: str) -> None:
    coefficients, widths = made(counts, tokens, seed, content)
    steps = np.zeros(widths.shape, "bfloat16")
    for each, row, own in zip(coefficients, steps, counts, strict=True):
        coded = allocation.directions(own)
        row[:coded] = core.search_steps(each[:, :coded], allocation.widths(own))
    tensors = [torch.from_numpy(array).to(device) for array in (coefficients, widths)]
    stored = torch.from_numpy(steps.view(np.int16)).view(torch.bfloat16).to(device)
    want = [
        blocks.pack(
            core.quantize(
                each[:, : allocation.directions(own)], allocation.widths(own), row[: allocation.directions(own)]
            ),
            own,
        ).ravel()
        for each, row, own in zip(coefficients, steps, counts, strict=True)
    ]
    got = kernels.packed(*tensors, stored, [list(own) for own in counts])
    assert_equal("codes", got, torch.from_numpy(np.concatenate(want)))


@settings(EXAMPLES)
@given(
    counts=COUNTS, tokens=st.integers(1, 60), seed=st.integers(0, 99), content=st.sampled_from(["normal", "constant"])
)
def test_search_steps(device: torch.device, counts: tuple[int, int, int], tokens: int, seed: int, content: str) -> None:
    coefficients, widths = made([counts], tokens, seed, content)
    tensors = [torch.from_numpy(array).to(device) for array in (coefficients, widths)]
    got = to_numpy(kernels.search_steps(*tensors).cpu())[0]
    want = core.search_steps(coefficients[0], widths[0])
    # Sums in another order may prefer another of two steps that are as good, and round the spread to another neighbour.
    errors = [_errors(coefficients[0], widths[0], steps) for steps in (got, want)]
    assert (errors[0] <= errors[1] * (1 + 2.0**-6) + 1e-12).all()
    assert ((got == 0) == (want == 0)).all()


def _errors(coefficients: np.ndarray, widths: np.ndarray, steps: np.ndarray) -> np.ndarray:
    coded = core.levels(core.quantize(coefficients, widths, steps), widths) * steps.astype(np.float32)
    return np.asarray(np.square(coefficients - coded).sum(axis=0))


@pytest.mark.gpu
def test_a_long_unit_is_searched_in_pieces(gpu: torch.device) -> None:
    coefficients, widths = made([(2, 4, 4), (1, 5, 2)], 9361, 3)
    tensors = [torch.from_numpy(array).to(gpu) for array in (coefficients, widths)]
    steps = kernels.search_steps(*tensors)
    assert_equal("twice", kernels.search_steps(*tensors), steps)
    for each, row, own in zip(coefficients, to_numpy(steps.cpu()), ((2, 4, 4), (1, 5, 2)), strict=True):
        coded = allocation.directions(own)
        want = core.search_steps(each[:, :coded], allocation.widths(own))
        assert (np.abs(row[:coded].astype(float) / want.astype(float) - 1) < 0.1).mean() > 0.95
