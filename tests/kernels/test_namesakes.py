"""Each function gives what its namesake in quantwm-core gives, argument by argument."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwm_core import psac as core_psac
from quantwm_core import statistics as core_statistics
from quantwm_core.errors import ParameterError, QuantWMError, ShapeError
from quantwm_kernels import affine, packing, psac, statistics
from quantwm_kernels.bridge import to_numpy
from tests.kernels.operators import moment, normal

KEYS, TABLE, QUERIES = normal(1, 2, 30, 8), normal(1, 2, 6, 8, seed=1), normal(1, 4, 9, 8, seed=2)
WEIGHTS, MATRIX = normal(1, 2, 8, seed=3).abs() + 0.1, moment()
EXACT, APPROXIMATE = normal(1, 2, 9, 30), normal(1, 2, 9, 30, seed=1)
BASIS = statistics.principal_basis(MATRIX, 3)

# Settings differ from every default, so that an argument that gets lost or swapped shows.
CALLS: dict[str, tuple[Any, ...]] = {
    "packing.pack": (torch.arange(14, dtype=torch.uint8).view(2, 7) % 4,),
    "packing.unpack": (torch.tensor([[57, 2], [1, 3]], dtype=torch.uint8), 6),
    "scales.encode": (KEYS.abs(),),
    "scales.decode": (torch.tensor([[[448.0, 1.0]]]).to(torch.float8_e4m3fn), torch.tensor([0.3])),
    "affine.encode": (KEYS, 4, 3),
    "codebook.fit": (KEYS, 6, WEIGHTS, 3, TABLE),
    "codebook.nearest": (KEYS, TABLE, MATRIX, 3),
    "statistics.sensitivity": (MATRIX,),
    "statistics.normalised": (MATRIX,),
    "statistics.principal_basis": (MATRIX, 3),
    "qsac.choose": (KEYS, TABLE, 4, WEIGHTS, MATRIX, 2),
    "psac.project": (KEYS, BASIS[0]),
    "psac.encode": (KEYS, *BASIS, 0.4, 8),
    "attention.attend": (QUERIES, KEYS, normal(1, 2, 30, 8, seed=4)),
    "attention.logits": (QUERIES, KEYS),
    "attention.logit_error": (EXACT, APPROXIMATE),
    "attention.selection_shift": (EXACT, APPROXIMATE, 3),
    "attention.attention_kl": (EXACT, APPROXIMATE),
}


def functions(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function here and its namesake."""
    module, function = name.split(".")
    here, core = (importlib.import_module(f"{package}.{module}") for package in ("quantwm_kernels", "quantwm_core"))
    return getattr(here, function), getattr(core, function)


def flat(result: Any) -> list[np.ndarray]:
    """Arrays of a result: tensors, arrays, tuples of them, or a dataclass of them."""
    if isinstance(result, Tensor):
        return [to_numpy(result)]
    if isinstance(result, np.ndarray):
        return [result]
    parts = result if isinstance(result, tuple) else vars(result).values()
    return [array for part in parts for array in flat(part)]


def same(ours: Any, theirs: Any) -> bool:
    pairs = list(zip(flat(ours), flat(theirs), strict=True))
    return all(
        one.dtype == two.dtype and one.ravel().tobytes() == two.ravel().tobytes() and one.size == two.size
        for one, two in pairs
    )


def test_int4_coefficients_are_those_of_core() -> None:
    error, basis, energies = map(to_numpy, (KEYS, *BASIS))
    ours, theirs = psac.encode(KEYS, *BASIS, bits=4), core_psac.encode(error, basis, energies, bits=4)
    assert same(ours, theirs)
    assert psac.decode(ours, 30).numpy().tobytes() == core_psac.decode(theirs, 30).tobytes()


@pytest.mark.parametrize("name", CALLS)
def test_a_function_gives_what_its_namesake_gives(name: str) -> None:
    here, core = functions(name)
    arguments = [to_numpy(item) if isinstance(item, Tensor) else item for item in CALLS[name]]
    assert same(here(*CALLS[name]), core(*arguments))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
)
def test_packing_is_inverted(codes: list[int], rows: int) -> None:
    tensor = torch.tensor([codes] * rows, dtype=torch.uint8)
    assert torch.equal(packing.unpack(packing.pack(tensor), len(codes)), tensor)


@pytest.mark.parametrize(("start", "stop"), [(0, 30), (1, 2), (7, 30), (5, 5)])
def test_affine_ranges_decode_to_parts_of_the_whole(start: int, stop: int) -> None:
    code = affine.encode(KEYS, 4)
    whole = affine.decode(code)
    assert torch.equal(affine.decode(code, start, stop), whole[:, :, start:stop])
    assert (whole - KEYS).abs().max() < KEYS.abs().max() / 2


@pytest.mark.parametrize("threshold", [0.0, 0.4, 1e9])
def test_psac_ranges_decode_to_parts_of_the_whole(threshold: float) -> None:
    error = normal(1, 2, 70, 8)
    code = psac.encode(error, *BASIS, threshold)
    whole = psac.decode(code, 70)
    assert torch.equal(psac.decode(code, 70, 3, 66), whole[:, :, 3:66])
    exact = psac.project(error, BASIS[0])
    if threshold == 0.0:
        assert (whole - exact).abs().max() <= code.scales.float().max() / 2 * 1.001
    assert bool(whole.any()) == (threshold < 1e9)


def test_moments_merge_as_in_core() -> None:
    first, second = (statistics.second_moment(normal(1, 4, count, 8, seed=count), 2) for count in (3, 5))
    theirs = [core_statistics.second_moment(normal(1, 4, count, 8, seed=count).numpy(), 2) for count in (3, 5)]
    merged, expected = statistics.merge(first, second), core_statistics.merge(*theirs)
    assert merged.queries == expected.count == 16
    assert merged.mean.numpy().tobytes() == expected.mean.tobytes()
    faded = core_statistics.QueryStatistics(*theirs).sealed(0.25).past
    assert faded is not None
    assert statistics.merge(first, second, 0.25).mean.numpy().tobytes() == faded.mean.tobytes()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: packing.pack(torch.full((3,), 4, dtype=torch.uint8)), ShapeError),
        (lambda: packing.unpack(torch.zeros(3, dtype=torch.uint8), 99), ShapeError),
        (lambda: affine.encode(KEYS, 6), ParameterError),
        (lambda: statistics.second_moment(normal(1, 3, 4, 8), 2), ShapeError),
        (
            lambda: statistics.merge(statistics.QueryMoment(MATRIX, 1), statistics.QueryMoment(MATRIX[:, :1], 1)),
            ShapeError,
        ),
        (lambda: statistics.principal_basis(MATRIX, 9), ParameterError),
    ],
)
def test_errors_of_core_pass_through_the_operator(call: Callable[[], object], error: type[QuantWMError]) -> None:
    with pytest.raises(error):
        call()
