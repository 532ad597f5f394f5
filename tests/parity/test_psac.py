"""project_error, encode_psac and decode_psac, against the reference: within one step on one entry of a thousand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import psac as core
from quantwm_core import statistics
from quantwm_core.domain import BF16
from quantwm_core.errors import ShapeError
from quantwm_kernels.bridge import to_torch
from quantwm_kernels.psac import PsacCode
from tests.core import strategies
from tests.parity.gate import TOLERANCES, Tolerance, assert_close, assert_equal
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.psac", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

OPERATORS = ("project_error", "encode_psac", "decode_psac")

PROJECTED = Tolerance("FP32 sums over channels in another order, in three TF32 parts", relative=1e-4, absolute=1e-5)


def case(tokens: int, channels: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Error, basis and energies of two heads."""
    error = np.random.default_rng(seed).standard_normal((1, 2, tokens, channels)).astype(np.float32)
    return error, *statistics.principal_basis(strategies.moment(seed, 2, channels).mean, rank)


def on(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    return [to_torch(np.array(array)).to(device) for array in arrays]


@settings(EXAMPLES)
@given(
    tokens=st.sampled_from([1, 5, 63, 64, 65, 140]),
    channels=st.sampled_from([32, 64, 80, 128]),
    rank=st.sampled_from([1, 3, 8, 20]),
    threshold=st.sampled_from([0.0, 0.3, 0.8, 1e9]),
    seed=st.integers(0, 99),
)
def test_encode_psac(device: torch.device, tokens: int, channels: int, rank: int, threshold: float, seed: int) -> None:
    error, basis, energies = case(tokens, channels, rank, seed)
    ours = kernels.encode(*on(device, error, basis, energies), threshold)
    theirs = core.encode(error, basis, energies, threshold)
    steps = kernels.decode(ours, tokens) / ours.scales.float().where(ours.scales > 0, 1.0)[..., None, :]
    assert_close("scales", ours.scales, to_torch(theirs.scales), Tolerance("a maximum next to a BF16 number", 2.0**-7))
    same = (ours.scales.cpu() == to_torch(theirs.scales))[..., None, :]
    wide = theirs.scales.astype(np.float32)[..., None, :]
    expected = torch.from_numpy(core.decode(theirs, tokens) / np.where(wide > 0, wide, np.float32(1)))
    assert_close("steps", steps.cpu() * same, expected * same, TOLERANCES["coefficients"])
    if same.all() and torch.equal(steps.cpu().round(), expected.round()):
        for name in PsacCode._fields:
            want = np.array(getattr(theirs, name))
            assert_equal(name, getattr(ours, name), to_torch(want.ravel() if name == "layout" else want))


@settings(EXAMPLES)
@given(tokens=st.sampled_from([1, 65, 130]), threshold=st.sampled_from([0.0, 0.3, 0.8, 1e9]), seed=st.integers(0, 99))
def test_decode_psac(device: torch.device, tokens: int, threshold: float, seed: int) -> None:
    code = core.encode(*case(tokens, 32, 8, seed), threshold)
    parts = on(device, *(getattr(code, name) for name in PsacCode._fields))
    ours = PsacCode(*parts)._replace(layout=parts[2].flatten())
    for start, stop in ((0, tokens), (tokens // 2, tokens), (3, 3)):
        if start <= tokens:
            want = to_torch(core.decode(code, tokens, start, min(stop, tokens)))
            assert_equal("coefficients", kernels.decode(ours, tokens, start, min(stop, tokens)), want)


def test_one_sparse_stream_beside_a_dense_one(device: torch.device) -> None:
    error, basis, energies = case(200, 32, 8)
    energies[:, 0], energies[:, 1] = 1e-6, 1e6
    ours = kernels.encode(*on(device, error, basis, energies), 0.2)
    theirs = core.encode(error, basis, energies, 0.2)
    assert theirs.layout.ravel().tolist() == [1, 0]
    for name in PsacCode._fields:
        want = np.array(getattr(theirs, name))
        assert_equal(name, getattr(ours, name), to_torch(want.ravel() if name == "layout" else want))


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_project_error(device: torch.device, rank: int) -> None:
    error, basis, _ = case(70, 80, rank)
    skewed = (basis.astype(np.float32) * np.float32(0.7) + np.float32(0.02)).astype(BF16)
    for directions in (basis, skewed):
        assert_close(
            "coefficients", kernels.project(*on(device, error, directions)),
            torch.from_numpy(core.project(error, directions)), PROJECTED,
        )  # fmt: skip


def test_without_a_direction_nothing_is_coded(device: torch.device) -> None:
    error, basis, energies = case(70, 32, 4)
    basis[:, 1], energies[:, 1] = 0, 0
    code = kernels.encode(*on(device, error, basis, energies))
    assert not code.scales[0, 1].any()
    assert not kernels.decode(code, 70)[0, 1].any()
    assert kernels.decode(code, 70)[0, 0].any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    error, basis, _ = case(5, 32, 4)
    with pytest.raises(ShapeError, match="do not fit"):
        kernels.project(*on(device, error, basis[..., :16, :]))
