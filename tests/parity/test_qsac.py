"""choose_centroids: a choice is a candidate and no candidate is cheaper, near ties excepted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import affine, qsac
from quantwm_core.codebook import Metric
from quantwm_core.errors import ParameterError, ShapeError
from quantwm_kernels.bridge import to_torch
from tests.core import distances, strategies, tolerances
from tests.parity.gate import assert_equal
from tests.parity.metrics import KINDS, METRICS, fitted, weights_of
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.qsac", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

OPERATORS = ("choose_centroids",)


def on(device: torch.device, array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else to_torch(np.array(array)).to(device)


def costs(unit: np.ndarray, table: np.ndarray, weights: np.ndarray, group_size: int) -> np.ndarray:
    """Cost of every token against every centroid, FP64."""
    residual = unit.astype(np.float64)[:, :, :, None] - table.astype(np.float64)[:, :, None]
    grouped = residual.reshape(*residual.shape[:-1], -1, group_size)
    span = np.maximum(grouped.max(axis=-1), 0) - np.minimum(grouped.min(axis=-1), 0)
    per_group = weights.astype(np.float64).reshape(*weights.shape[:2], 1, 1, -1, group_size).sum(axis=-1)
    return np.asarray((per_group * np.square(span)).sum(axis=-1))


def check(index: np.ndarray, unit: np.ndarray, table: np.ndarray, metric: Metric, cost: np.ndarray, count: int) -> None:
    """Hold choices against FP64 distances and costs."""
    distance = distances.exact(unit, table, metric)
    middle = table.astype(np.float64).mean(axis=-2, keepdims=True)
    size = distances.exact(unit, middle, metric) + distances.exact(table, middle, metric).max(axis=-2, keepdims=True)
    limit = np.sort(distance, axis=-1)[..., count - 1 : count]
    slack = 2.0**-14 * limit + tolerances.EXPANDED_DISTANCE * size
    chosen = index[..., None].astype(np.int64)
    assert (np.take_along_axis(distance, chosen, axis=-1) <= limit + slack).all(), "a choice that is no candidate"
    surely = np.where(distance < limit - slack, cost, np.inf).min(axis=-1)
    # Squares of ranges below 2**-63 of the largest key vanish in FP32, all alike.
    largest = np.abs(unit.astype(np.float64)).max(axis=(-2, -1))
    vanished = table.shape[-1] * (largest * 2.0**-62)[..., None] ** 2
    paid = np.take_along_axis(cost, chosen, axis=-1)[..., 0]
    assert (paid <= surely * (1 + tolerances.NEAR_TIE) + vanished).all(), "a cheaper candidate was left"


@settings(EXAMPLES)
@given(unit=strategies.small_units(KINDS), name=st.sampled_from(METRICS), count=st.sampled_from([1, 2, 4, 256]))
def test_choose_centroids(device: torch.device, unit: np.ndarray, name: str, count: int) -> None:
    weights, metric = weights_of(name, unit.shape[1], unit.shape[3])
    table = fitted(unit, 8, metric)
    size = affine.default_group_size(unit.shape[3])
    index = kernels.choose(on(device, unit), on(device, table), size, on(device, weights), on(device, metric), count)
    assert index.dtype == torch.uint8
    used = min(count, table.shape[2])
    check(index.cpu().numpy(), unit, table, metric, costs(unit, table, weights, size), used)


@pytest.mark.parametrize("candidates", [1, 4])
@pytest.mark.parametrize(("channels", "group_size"), [(80, 20), (96, 48), (128, 64), (256, 64)])
def test_choices_are_those_of_the_reference(
    device: torch.device, channels: int, group_size: int, candidates: int
) -> None:
    unit = strategies.unit(("normal", "offset"), 9, tokens=150, channels=channels)
    weights, metric = weights_of("diagonal", 2, channels)
    table = fitted(unit, 32, metric)
    arguments = on(device, table), group_size, on(device, weights), on(device, metric), candidates
    index = kernels.choose(on(device, unit), *arguments)
    expected = qsac.choose(unit, table, group_size, weights, metric, candidates)
    assert (index.cpu().numpy() != expected).mean() < 1e-2
    assert_equal("index", kernels.choose(on(device, unit), *arguments), index)


def test_ties_go_to_the_nearer_centroid(device: torch.device) -> None:
    keys = torch.zeros(1, 1, 4, device=device)
    table = torch.tensor([[[2.0, 0, 0, 0], [0, 0, 1.0, 1.0], [0, 1.0, 0, 1.0]]], device=device)
    weights = torch.ones(1, 4, device=device)
    assert kernels.choose(keys, table, 4, weights, None, 3).tolist() == [[1]]


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    keys, weights = torch.ones(1, 3, 8, device=device), torch.ones(1, 8, device=device)
    with pytest.raises(ParameterError, match="group size 6"):
        kernels.choose(keys, keys, 6, weights)
    with pytest.raises(ParameterError, match="0 candidates"):
        kernels.choose(keys, keys, 4, weights, None, 0)
    with pytest.raises(ShapeError, match="sensitivity"):
        kernels.choose(keys, keys, 4, weights[:, :4])
