"""second_moment, fold_moment, sensitivity, normalised_moment and principal_basis, against the reference."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import statistics as core
from quantwm_core.errors import DeviceError, ParameterError, ShapeError
from quantwm_kernels import launch
from quantwm_kernels.bridge import to_torch
from quantwm_kernels.statistics import QueryMoment
from tests.core import strategies
from tests.parity.gate import TOLERANCES, Tolerance, assert_close, assert_equal
from tests.parity.metrics import KINDS
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.statistics", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

OPERATORS = ("second_moment", "fold_moment", "sensitivity", "normalised_moment", "principal_basis")

AVERAGED = Tolerance("an average in FP64, summed in another order, rounded to FP32", relative=2.0**-22)


SMALLEST = 2.0**-50  # of the widest channel: the reference brings that to about 1, where smaller squares are subnormal


def correlations(mean: np.ndarray, scale: np.ndarray) -> torch.Tensor:
    """A moment relative to the size of the queries' channels: sums cancel outside of the diagonal."""
    size = np.sqrt(np.diagonal(scale.astype(np.float64), axis1=-2, axis2=-1))
    size = np.maximum(size, SMALLEST * size.max())
    size = np.where(size > 0, size, 1)
    return torch.from_numpy(mean.astype(np.float64) / size[..., :, None] / size[..., None, :])


def check(device: torch.device, queries: np.ndarray, kv_heads: int) -> None:
    ours = kernels.second_moment(to_torch(queries).to(device), kv_heads)
    theirs = core.second_moment(queries, kv_heads)
    assert ours.queries == theirs.count
    assert torch.isfinite(ours.mean).all()
    got, want = correlations(ours.mean.cpu().numpy(), theirs.mean), correlations(theirs.mean, theirs.mean)
    assert_close("moment", got, want, TOLERANCES["second_moment"])


@settings(EXAMPLES)
@given(unit=strategies.units(KINDS, heads=3), grouped=st.booleans())
def test_second_moment(device: torch.device, unit: np.ndarray, grouped: bool) -> None:
    check(device, unit, 1 if grouped else unit.shape[1])


def test_pieces_of_grouped_heads_and_strides(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = dict(launch.LAUNCHES)
    entry = launches["second_moment"]
    launches["second_moment"] = launch.Launch(entry.warps, entry.stages, entry.blocks, programs=24)
    monkeypatch.setattr(kernels, "LAUNCHES", launches)
    queries = np.concatenate([strategies.unit(("normal", "offset", "channels", "ties"), 1, 150, 80)] * 2)
    check(device, queries, 2)
    tensor = to_torch(queries).to(device)
    straight = kernels.second_moment(tensor, 2)
    turned = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    assert_equal("moment", kernels.second_moment(turned, 2).mean, straight.mean)
    assert_equal("moment", kernels.second_moment(tensor.mT.contiguous().mT, 2).mean, straight.mean)
    assert_equal("moment", kernels.second_moment(tensor, 2).mean, straight.mean)
    if device.type == "cuda":  # the product that the interpreter takes is symmetric on some processors only
        assert_equal("moment", straight.mean.mT.contiguous(), straight.mean)


@pytest.mark.parametrize("programs", [1, 24], ids=["one piece", "pieces"])
def test_a_moment_that_counts_those_before_is_the_two_merged(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    entry = launch.LAUNCHES["second_moment"]
    fixed = launch.Launch(entry.warps, entry.stages, entry.blocks, programs=programs if device.type == "cpu" else 1)
    monkeypatch.setattr(kernels, "LAUNCHES", dict(launch.LAUNCHES) | {"second_moment": fixed})
    queries = torch.randn(2, 1, 2, 150, 32, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    first, second = (kernels.second_moment(each, 2) for each in queries)
    both = kernels.second_moment(queries[1], 2, first)
    merged = kernels.merge(first, second)
    assert both.queries == merged.queries == 300
    assert_equal("moment", both.mean, merged.mean)
    assert_close("moment", both.mean, (first.mean + second.mean) / 2, TOLERANCES["second_moment"])
    with pytest.raises(ShapeError, match=r"query moments: got shapes \(1, 1, 32, 32\)"):
        kernels.second_moment(queries[1], 2, QueryMoment(first.mean[:, :1], 150))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_number_formats_are_rounded_first(device: torch.device, dtype: torch.dtype) -> None:
    queries = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    assert_equal("moment", kernels.second_moment(queries, 2).mean, kernels.second_moment(queries.bfloat16(), 2).mean)


def test_a_query_that_is_no_number_shows(device: torch.device) -> None:
    queries = torch.ones(1, 2, 40, 32, dtype=torch.bfloat16, device=device)
    queries[0, 1, 7, 3] = torch.nan
    mean = kernels.second_moment(queries, 2).mean
    assert torch.isfinite(mean[0, 0]).all()
    assert mean[0, 1, 3, 3].isnan()


def test_fold_moment(device: torch.device) -> None:
    first, second = (strategies.moment(seed, 2, 32) for seed in (1, 2))
    ours = [QueryMoment(torch.from_numpy(each.mean).to(device), count) for each, count in ((first, 30), (second, 10))]
    theirs = [core.QueryMoment(each.mean, count) for each, count in ((first, 30), (second, 10))]
    merged = kernels.merge(*ours)
    assert merged.queries == 40
    assert_close("moment", merged.mean, torch.from_numpy(core.merge(*theirs).mean), TOLERANCES["second_moment"])
    faded = core.QueryStatistics(*theirs).sealed(0.25).past
    assert faded is not None
    assert_close("moment", kernels.merge(*ours, 0.25).mean, torch.from_numpy(faded.mean), TOLERANCES["second_moment"])
    with pytest.raises(ParameterError, match="decay 1"):
        kernels.merge(*ours, 1.0)
    with pytest.raises(ShapeError, match="query moments"):
        kernels.merge(ours[0], QueryMoment(ours[1].mean[:, :1], 10))
    with pytest.raises(DeviceError, match=f"on meta and {ours[1].mean.device}; move one to the other"):
        kernels.merge(QueryMoment(ours[0].mean.to("meta"), 30), ours[1])


@pytest.mark.parametrize("channels", [32, 80, 128, 256])
@pytest.mark.parametrize("scale", [1.0, 2.0**-110, 2.0**118])
def test_sensitivity_and_normalised_moment(device: torch.device, channels: int, scale: float) -> None:
    mean = np.concatenate([strategies.moment(4, 2, channels).mean, np.zeros((1, 2, channels, channels), np.float32)])
    scaled = mean * np.float32(scale)
    tensor = torch.from_numpy(scaled).to(device)
    assert_close("sensitivity", kernels.sensitivity(tensor), torch.from_numpy(core.sensitivity(scaled)), AVERAGED)
    assert_close("moment", kernels.normalised(tensor), torch.from_numpy(core.normalised(scaled)), AVERAGED)


@pytest.mark.parametrize(("channels", "rank"), [(32, 1), (32, 32), (80, 8), (128, 8), (64, 16), (256, 8)])
def test_principal_basis(device: torch.device, channels: int, rank: int) -> None:
    seeds = ((1, None), (2, 20)) if rank < 20 else ((1, None),)
    mean = np.concatenate([strategies.moment(seed, 1, channels, directions).mean for seed, directions in seeds])
    basis, energies = kernels.principal_basis(torch.from_numpy(mean).to(device), rank)
    want, known = core.principal_basis(mean, rank)
    assert basis.dtype == torch.bfloat16
    wide, exact = basis.float().cpu(), to_torch(want).float()
    assert_close("projector", wide @ wide.mT, exact @ exact.mT, TOLERANCES["projector"])
    size = known.max(axis=-1, keepdims=True)
    eigenvalue = Tolerance("eigenvalues in FP32", absolute=1e-5)
    assert_close("energies", energies.cpu() / torch.from_numpy(size), torch.from_numpy(known / size), eigenvalue)


@pytest.mark.parametrize("channels", [128, 256])
@pytest.mark.parametrize("spectrum", ["level", "steep", "one direction far above all others"])
def test_principal_basis_of_every_spectrum(device: torch.device, channels: int, spectrum: str) -> None:
    # Rounds of level eigenvalues filter; of others they multiply, because FP32 would lose the smaller ones.
    place = np.arange(channels)
    values = np.exp(-place / (1.5 if spectrum == "steep" else 4))
    values[0] = 1e3 if spectrum.startswith("one") else values[0]
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((channels, channels)))[0]
    mean = ((turn * values) @ turn.T).astype(np.float32)[None, None]
    basis, energies = kernels.principal_basis(torch.from_numpy(mean).to(device), 8)
    wide, exact = basis.float().cpu()[0, 0], torch.from_numpy(turn[:, :8]).float()
    assert_close("projector", wide @ wide.mT, exact @ exact.mT, TOLERANCES["projector"])
    size = Tolerance("eigenvalues in FP32", absolute=1e-5)
    assert_close("energies", energies.cpu()[0, 0] / values[0], torch.from_numpy(values[:8] / values[0]).float(), size)


def test_a_basis_scales_with_its_moment_and_may_be_empty(device: torch.device) -> None:
    mean = torch.from_numpy(strategies.moment(4, 1, 32).mean).to(device)
    basis, energies = kernels.principal_basis(mean, 3)
    lone = torch.ones(1, 1, 32, 1, device=device)
    for scale in (2.0**-100, 2.0**110):
        same, larger = kernels.principal_basis(mean * scale, 3)
        assert_equal("basis", same, basis)
        assert_equal("energies", larger, energies * scale)
    for empty in (mean * 0, mean * torch.nan, mean * torch.inf):
        assert not kernels.principal_basis(empty, 3)[0].any()
    single, known = kernels.principal_basis(lone @ lone.mT, 3)
    assert_close(
        "direction", single.float().cpu()[..., 0], torch.full((1, 1, 32), 32**-0.5), Tolerance("BF16", 2.0**-8)
    )
    assert not single[..., 1:].any()
    assert known[0, 0, 0].item() == pytest.approx(32, rel=1e-5)


def test_a_basis_of_few_channels_reads_nothing_behind_its_own_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean = torch.from_numpy(strategies.moment(5, 1, 8).mean).to(device)
    basis, _ = kernels.principal_basis(mean, 3)

    def before_nan(shape: Sequence[int], **options: Any) -> torch.Tensor:
        """Memory that numbers follow which would show."""
        size = math.prod(shape)
        return torch.full((size + 4096,), torch.nan, **options)[:size].view(shape)

    monkeypatch.setattr(torch, "empty", before_nan)
    assert_equal("basis", kernels.principal_basis(mean, 3)[0], basis)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    queries = torch.ones(1, 3, 4, 32, device=device)
    for bad, heads in ((queries, 2), (queries[:, :, :0], 3), (queries, 0), (queries[0], 1)):
        with pytest.raises(ShapeError, match="queries"):
            kernels.second_moment(bad, heads)
    for rank in (0, 33):
        with pytest.raises(ParameterError, match=f"rank {rank}"):
            kernels.principal_basis(torch.ones(1, 32, 32, device=device), rank)
