"""fit_codebook and nearest_centroids, against the reference: up to near ties, and exactly where numbers are."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import codebook as core
from quantwm_core.codebook import Metric
from quantwm_core.errors import DtypeError, ParameterError, ShapeError
from quantwm_kernels import launch
from quantwm_kernels.bridge import to_numpy, to_torch
from tests.core import distances, strategies, tolerances
from tests.parity.gate import assert_equal
from tests.parity.metrics import KINDS, METRICS, fitted, weights_of
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.codebook", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

OPERATORS = ("fit_codebook", "nearest_centroids")

# Behind the nearest centroid, ranks are told apart by the 15 highest bits of mantissa of how much farther they are.
RANKED = 2.0**-15
# A round multiplies in BF16; k-means ends in another optimum that is as good.
OBJECTIVE = 1e-3
LARGE = 227 << 10
"""Fast memory of a program on an H100 or H200, bytes."""


def on(device: torch.device, array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else to_torch(np.array(array)).to(device)


def objective(unit: np.ndarray, table: np.ndarray, metric: Metric) -> np.ndarray:
    """Sum of squared distances to the nearest centroid, per stream."""
    return np.asarray(distances.exact(unit, table, metric).min(axis=-1).sum(axis=-1))


@settings(EXAMPLES)
@given(
    unit=strategies.units(KINDS, tokens=(1, 5, 17, 33, 65)),
    name=st.sampled_from(METRICS),
    size=st.integers(1, 20),
    count=st.integers(1, 6),
)
def test_nearest_centroids(device: torch.device, unit: np.ndarray, name: str, size: int, count: int) -> None:
    _, metric = weights_of(name, unit.shape[1], unit.shape[3])
    table = fitted(unit, size, metric)
    rows = table.shape[2]
    index = kernels.nearest(on(device, unit), on(device, table), on(device, metric), min(count, rows)).cpu().numpy()
    assert index.shape == (*unit.shape[:3], min(count, rows))
    distances.assert_nearest(index[..., :1], unit, table, metric)
    distances.assert_nearest(index, unit, table, metric, near_tie=RANKED)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("kind", ["normal", "offset", "channels"])
def test_nearest_is_nearest_to_1e_5(device: torch.device, kind: str, name: str) -> None:
    unit = strategies.unit((kind, kind), 7, tokens=200, channels=64)
    _, metric = weights_of(name, 2, 64)
    table = core.fit(unit, 32, metric)
    index = kernels.nearest(on(device, unit), on(device, table), on(device, metric)).cpu().numpy()
    distances.assert_nearest(index, unit, table, metric, frame=False)


@pytest.mark.parametrize(("kind", "name", "products"), [
    ("normal", "uniform", 1), ("normal", "diagonal", 2), ("normal", "full", 3), ("offset", "uniform", 3), ("offset", "diagonal", 3),
])  # fmt: skip
def test_a_large_offset_and_a_metric_ask_for_more_products(
    device: torch.device, kind: str, name: str, products: int
) -> None:
    unit = strategies.unit((kind,), 3, tokens=100, channels=64)
    _, metric = weights_of(name, 1, 64)
    table = core.fit(unit, 16, metric)
    frame = kernels.framed(on(device, unit), on(device, table), on(device, metric))
    assert frame.products.tolist() == [products]


@pytest.mark.parametrize("offset", [10, 300])
def test_a_large_common_offset_does_not_blur_distances(device: torch.device, offset: float) -> None:
    rng = np.random.default_rng(0)
    values = (offset * rng.standard_normal(128) + rng.standard_normal((1, 400, 128))).astype(np.float32)
    unit = to_numpy(torch.from_numpy(values).bfloat16())
    table = core.fit(unit, 64)
    for codebook in (table, to_numpy(kernels.fit(on(device, unit), 64, None, 2).cpu())):
        index = kernels.nearest(on(device, unit), on(device, codebook)).cpu().numpy()
        distance = distances.exact(unit, codebook, None)
        chosen = np.take_along_axis(distance, index, axis=-1)[..., 0]
        assert (chosen <= (1 + tolerances.NEAR_TIE) * distance.min(axis=-1)).all()
    ours = kernels.fit(on(device, unit), 64, None, 2)
    ratio = objective(unit, to_numpy(ours.cpu()), None) / objective(unit, core.fit(unit, 64, None, 2), None)
    assert np.abs(ratio - 1).max() < OBJECTIVE


def test_ties_go_to_the_lowest_index(device: torch.device) -> None:
    table = torch.tensor([[[1, 0, 0, 0], [0, 1, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0]]], dtype=torch.bfloat16)
    origin = torch.zeros(1, 1, 4, dtype=torch.bfloat16, device=device)
    assert kernels.nearest(origin, table.to(device), count=4).ravel().tolist() == [0, 1, 2, 3]
    many = torch.zeros(1, 256, 4, dtype=torch.bfloat16, device=device)
    many[0, 200:] = 5
    order = kernels.nearest(torch.full_like(origin, 4), many, count=256)
    assert order.ravel().tolist() == [*range(200, 256), *range(200)]


@settings(EXAMPLES)
@given(
    tokens=st.lists(st.lists(st.integers(-4, 4), min_size=4, max_size=4), min_size=1, max_size=14),
    size=st.integers(1, 6),
    weights=st.sampled_from([None, [1.0, 2.0, 0.0, 4.0]]),
)
def test_small_integers_are_ranked_exactly(
    device: torch.device, tokens: list[list[int]], size: int, weights: list[float] | None
) -> None:
    # The mean centroid is zero and every distance is exact, so ties are ties and nothing may differ.
    values = np.array([tokens], np.float32)
    metric = None if weights is None else np.array([weights], np.float32)
    table = np.concatenate([values[:, :size], -values[:, :size]], axis=1)
    index = kernels.nearest(on(device, values), on(device, table), on(device, metric), table.shape[1])
    assert_equal("index", index, torch.from_numpy(core.nearest(values, table, metric, table.shape[1])))


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("kind", ["normal", "clusters", "offset", "channels"])
def test_fit_codebook(device: torch.device, kind: str, name: str) -> None:
    # Many tokens a centroid: one that falls to the other side of a near tie must not move a mean by much.
    unit = strategies.unit((kind,), 3, tokens=2000, channels=64)
    _, metric = weights_of(name, 1, 64)
    start = unit[:, :, 5:1989:124]
    for initial in (None, start):
        ours = kernels.fit(on(device, unit), 16, on(device, metric), 1, on(device, initial))
        theirs = core.fit(unit, 16, metric, 1, initial)
        assert ours.dtype == torch.bfloat16
        assert tuple(ours.shape) == theirs.shape
        got, want = objective(unit, to_numpy(ours.cpu()), metric), objective(unit, theirs, metric)
        assert np.abs(got / want - 1).max() < OBJECTIVE
    for rounds, relaxation in ((0, 1.0), (8, 1.0), (4, 1.5)):
        ours = kernels.fit(on(device, unit), 16, on(device, metric), rounds, relaxation=relaxation)
        got = objective(unit, to_numpy(ours.cpu()), metric)
        theirs = core.fit(unit, 16, metric, rounds, relaxation=relaxation)
        assert (got <= objective(unit, theirs, metric) * (1 + 5 * OBJECTIVE)).all()


@pytest.mark.parametrize("name", METRICS)
def test_a_relaxed_round_goes_farther_the_same_way(device: torch.device, name: str) -> None:
    unit = strategies.unit(("normal", "clusters"), 4, tokens=300, channels=80)
    _, metric = weights_of(name, 2, 80)
    frame = kernels.framed(on(device, unit), on(device, core.fit(unit, 16, metric, 0)), on(device, metric))
    start = frame.table.clone()
    index = frame.layer.empty(frame.layer.tokens, dtype=torch.uint8)
    kernels.prepare(frame, None, final=False)
    kernels.assign(frame, index)
    update, _ = kernels.add_members(frame, index)
    tables = []
    for relaxation in (1.0, 1.5):
        frame.table.copy_(start)
        kernels.prepare(frame, update, final=False, relaxation=relaxation)
        tables.append(frame.table.clone())
    assert_equal("centroids", tables[1], start + 1.5 * (tables[0] - start))
    assert not torch.equal(*tables)


@settings(EXAMPLES)
@given(unit=strategies.small_units(), size=st.sampled_from([1, 5, 256]), name=st.sampled_from(METRICS))
def test_any_unit_gives_finite_centroids(device: torch.device, unit: np.ndarray, size: int, name: str) -> None:
    _, metric = weights_of(name, unit.shape[1], unit.shape[3])
    table = kernels.fit(on(device, unit), size, on(device, metric), 2)
    assert tuple(table.shape) == (*unit.shape[:2], min(size, unit.shape[2]), unit.shape[3])
    assert torch.isfinite(table.float()).all()


@settings(EXAMPLES)
@given(unit=strategies.small_units(KINDS), size=st.integers(1, 9))
def test_without_rounds_the_codebook_is_the_first(device: torch.device, unit: np.ndarray, size: int) -> None:
    assert_equal("centroids", kernels.fit(on(device, unit), size, None, 0), to_torch(core.fit(unit, size, None, 0)))
    initial = core.fit(unit, size, None, 1).astype(np.float32) * np.float32(1.01)
    warm = kernels.fit(on(device, unit), size, None, 0, on(device, initial))
    assert_equal("centroids", warm, to_torch(core.fit(unit, size, None, 0, initial)))


@settings(EXAMPLES)
@given(unit=strategies.small_units(("constant", "zeros")), size=st.integers(1, 9))
def test_equal_tokens_have_equal_centroids(device: torch.device, unit: np.ndarray, size: int) -> None:
    table = kernels.fit(on(device, unit), size)
    expected = np.broadcast_to(unit[:, :, :1], table.shape).copy()
    assert_equal("centroids", table, to_torch(expected))


def test_an_empty_cluster_keeps_its_centroid(device: torch.device) -> None:
    values = torch.tensor([[[1, 1], [2, 2], [1, 2], [2, 1]]], dtype=torch.bfloat16, device=device)
    initial = torch.tensor([[[1, 1], [100, -100], [2, 2]]], dtype=torch.bfloat16, device=device)
    assert kernels.fit(values, 3, None, 5, initial)[0, 1].tolist() == [100, -100]


def small(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Launch with more programs, so that pieces are summed, or with codebooks streamed."""
    launches = {
        name: replace(entry, programs=64, **changes) if entry.programs else entry  # type: ignore[arg-type]  # fields of a Launch
        for name, entry in launch.LAUNCHES.items()
    }
    monkeypatch.setattr("quantwm_kernels.triton.codebook.LAUNCHES", launches)


@pytest.mark.parametrize("channels", [64, 80, 256])
def test_pieces_and_streamed_codebooks_change_nothing_much(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, channels: int
) -> None:
    unit = strategies.unit(("normal", "clusters"), 5, tokens=300, channels=channels)
    whole = kernels.fit(on(device, unit), 16, None, 2)
    index = kernels.nearest(on(device, unit), whole, None, 3)
    small(monkeypatch)
    pieces = kernels.fit(on(device, unit), 16, None, 2)
    monkeypatch.setattr("quantwm_kernels.triton.codebook.shared_memory", lambda _: 0)
    streamed = kernels.fit(on(device, unit), 16, None, 2)
    for table in (pieces, streamed):
        got = objective(unit, to_numpy(table.cpu()), None)
        assert np.abs(got / objective(unit, to_numpy(whole.cpu()), None) - 1).max() < OBJECTIVE
    again = kernels.nearest(on(device, unit), whole, None, 3).cpu().numpy()
    distances.assert_nearest(again, unit, to_numpy(whole.cpu()), None, near_tie=RANKED)
    assert (again != index.cpu().numpy()).mean() < 1e-2


def test_wide_heads_with_many_centroids(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = strategies.unit(("normal", "clusters"), 6, tokens=260, channels=160)
    monkeypatch.setattr("quantwm_kernels.triton.codebook.shared_memory", lambda _: 0)
    streamed = kernels.fit(on(device, unit), 200, None, 1)
    monkeypatch.undo()
    if device.type == "cpu":  # where no launch takes too much
        monkeypatch.setattr("quantwm_kernels.triton.codebook.shared_memory", lambda _: LARGE)
    table = kernels.fit(on(device, unit), 200, None, 1)
    ours, theirs = (objective(unit, to_numpy(each.cpu()), None) for each in (table, streamed))
    assert np.abs(ours / theirs - 1).max() < OBJECTIVE
    index = kernels.nearest(on(device, unit), table, None, 3).cpu().numpy()
    distances.assert_nearest(index, unit, to_numpy(table.cpu()), None, near_tie=RANKED)


@pytest.mark.parametrize(("channels", "dtype"), [(160, torch.bfloat16), (256, torch.float32)])
def test_sums_by_blocks_of_centroids_and_channels(device: torch.device, channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(1, 2, 300, channels, generator=generator).to(dtype)
    index = torch.randint(0, 200, (2, 300), generator=generator)
    frame = kernels.begin(kernels.Layer.of(values.to(device)), 200, None, None)
    (sums, counts), _ = kernels.add_members(frame, index.to(torch.uint8).to(device))
    members = torch.nn.functional.one_hot(index, 200).double().mT
    torch.testing.assert_close(sums.sum(1).cpu().double(), members @ values[0].double(), rtol=1e-5, atol=1e-5)
    assert counts.sum(1).cpu().tolist() == members.sum(2).tolist()


@pytest.mark.parametrize(
    ("room", "channels", "size", "dtype", "assigns", "ranks"),
    [
        (227, 128, 256, torch.bfloat16, "", ""),
        (227, 256, 256, torch.bfloat16, "_wide", "_wide"),
        (227, 256, 256, torch.float32, "_streamed", "_wide"),
        (227, 256, 64, torch.bfloat16, "", ""),
        (163, 128, 256, torch.bfloat16, "", "_streamed"),
        (163, 256, 256, torch.bfloat16, "_streamed", "_wide"),
        (99, 64, 256, torch.bfloat16, "", ""),
        (99, 128, 256, torch.bfloat16, "_streamed", "_streamed"),
        (99, 256, 256, torch.bfloat16, "_streamed", "_streamed"),
    ],
)
def test_codebooks_stay_in_fast_memory_where_they_fit(
    monkeypatch: pytest.MonkeyPatch, room: int, channels: int, size: int, dtype: torch.dtype, assigns: str, ranks: str
) -> None:
    monkeypatch.setattr("quantwm_kernels.triton.codebook.shared_memory", lambda _: room << 10)
    first = torch.zeros(1, dtype=dtype)
    frame = SimpleNamespace(layer=SimpleNamespace(channels=channels, first=first), centroids=size)
    for name, tables, end in (("assign_centroids", 1, assigns), ("rank_centroids", 2, ranks)):
        entry, used = launch.LAUNCHES[name + end], kernels._table_launch(name, frame, tables)
        assert used == replace(entry, blocks={"BLOCK_K": channels, **entry.blocks})


def test_the_same_bytes_twice_and_in_any_layout(device: torch.device) -> None:
    unit = to_torch(strategies.unit(("normal", "channels"), 2, tokens=130, channels=80)).to(device)
    weights, _ = weights_of("diagonal", 2, 80)
    metric = on(device, weights)
    first = kernels.fit(unit, 32, metric, 4)
    assert_equal("centroids", kernels.fit(unit, 32, metric, 4), first)
    turned = unit.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    assert_equal("centroids", kernels.fit(turned, 32, metric, 4), first)
    apart = unit.repeat_interleave(2, dim=-1)[..., ::2]
    assert_equal("index", kernels.nearest(apart, first, metric, 4), kernels.nearest(unit, first, metric, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_number_formats(device: torch.device, dtype: torch.dtype) -> None:
    values = torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    table = core.fit(values.numpy(), 16, None, 2)
    index = kernels.nearest(values.to(device), on(device, table)).cpu().numpy()
    distances.assert_nearest(index, values.numpy(), table, None)
    ours = to_numpy(kernels.fit(values.to(device), 16, None, 2).cpu())
    ratio = objective(values.numpy(), ours, None) / objective(values.numpy(), table, None)
    assert np.abs(ratio - 1).max() < OBJECTIVE


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    values = torch.ones(1, 8, 4, device=device)
    for size in (0, 257):
        with pytest.raises(ParameterError, match=f"{size} centroids"):
            kernels.fit(values, size)
    with pytest.raises(ParameterError, match="-1 iterations"):
        kernels.fit(values, 2, None, -1)
    with pytest.raises(ShapeError, match="initial centroids"):
        kernels.fit(values, 2, None, 1, torch.ones(1, 3, 4, device=device))
    with pytest.raises(ShapeError, match="metric"):
        kernels.fit(values, 2, torch.ones(1, 5, device=device))
    with pytest.raises(DtypeError, match="metric"):
        kernels.fit(values, 2, torch.ones(1, 4, dtype=torch.float64, device=device))
    with pytest.raises(DtypeError, match="float64"):
        kernels.fit(values.double(), 2)
    with pytest.raises(ParameterError, match="9 nearest of 8"):
        kernels.nearest(values, values, count=9)
    with pytest.raises(ShapeError, match="do not fit"):
        kernels.nearest(values, values[..., :2])
    with pytest.raises(ShapeError, match="not empty"):
        kernels.fit(values[:, :0], 2)
