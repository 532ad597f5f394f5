import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import (
    affine,
    attention,
    clustered,
    codebook,
    integer_table,
    methods,
    packing,
    psac,
    scales,
    statistics,
)
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.domain import BF16
from quantwm_core.method import PRESETS, decode_tensor, scheme
from quantwm_core.statistics import QueryMoment
from tests.core import scalar, strategies, tolerances
from tests.core.compare import assert_arrays, assert_bits, assert_within

PSAC = {"basis", "coefficient_scales", "coefficients"}


def _moment(unit: np.ndarray, seed: int = 0, rank: int | None = None) -> QueryMoment:
    return strategies.moment(seed, unit.shape[1], unit.shape[3], rank, unit.shape[0])


def _parts(sealed: SealedTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, zero-points, steps and centroid of every element."""
    code = clustered.affine_code(sealed.arrays)
    groups = code.scales.shape[-1]
    size = sealed.shape[3] // groups
    codes = packing.unpack(code.codes, sealed.shape[3]).astype(int)
    zero_points = np.repeat(affine.unpack_rows(code.zero_points, groups, 0, sealed.shape[2]), size, axis=-1)
    steps = np.repeat(scales.decode(code.scales, code.super_scale), size, axis=-1)
    return codes, zero_points.astype(int), steps, clustered.gather(sealed.arrays["centroids"], sealed.arrays["index"])


@pytest.mark.parametrize("kind", ["keys", "values"])
@given(unit=strategies.units(kinds=strategies.MODERATE), candidates=st.sampled_from([1, 4]))
def test_a_bf16_value_is_within_a_step_and_keeps_its_code_unless_clipped(
    kind: Kind, unit: np.ndarray, candidates: int
) -> None:
    sealed = methods.get("quantwm", rank=0, candidates=candidates).seal(kind, unit, _moment(unit))
    codes, zero_points, steps, centroids = _parts(sealed)
    wide, decoded = unit.astype(np.float32), decode_tensor(sealed).astype(np.float32)
    divisor = np.where(steps > 0, steps, np.float32(1))
    levels = np.rint((wide - centroids) / divisor) + zero_points
    np.testing.assert_array_equal(np.clip(levels, 0, 3), codes)
    unclipped = (levels >= 0) & (levels <= 3)
    error = np.where(unclipped, np.abs(decoded.astype(float) - wide), 0)
    slack = tolerances.FP32_ROUNDING * (np.abs(wide) + np.abs(centroids) + steps)
    assert_within("decoded", error, np.zeros_like(error), steps + slack)
    again = np.clip(np.rint((decoded - centroids) / divisor) + zero_points, 0, 3)
    np.testing.assert_array_equal(again[unclipped], codes[unclipped])


def test_the_first_unit_is_uniform_and_not_compensated() -> None:
    unit = strategies.unit(("channels",), 0, 70, 64)
    first = methods.get("quantwm").seal("keys", unit)
    assert not PSAC & first.arrays.keys()
    plain = methods.get("quantwm", metric="uniform", rank=0).seal("keys", unit, _moment(unit))
    assert_arrays("first", dict(first.arrays), dict(plain.arrays))


def test_without_queries_and_candidates_it_is_affine_qvg() -> None:
    unit = strategies.unit(("channels", "normal"), 0, 70, 64)
    want = methods.get("qvg", quantizer="affine").seal("keys", unit)
    bare = methods.get("quantwm", metric="uniform", candidates=1, rank=0).seal("keys", unit, _moment(unit))
    assert_arrays("keys", dict(bare.arrays), dict(want.arrays))
    assert_arrays("values", dict(methods.get("quantwm").seal("values", unit, _moment(unit)).arrays), dict(want.arrays))


def test_queries_of_few_directions() -> None:
    unit = strategies.unit(("normal",), 0, 70, 32)
    sealed = methods.get("quantwm").seal("keys", unit, _moment(unit, rank=2))
    assert sealed.arrays["basis"].shape == (1, 1, 32, 8)
    assert np.isfinite(decode_tensor(sealed).astype(np.float32)).all()


def test_the_key_error_along_the_basis_is_half_a_coefficient_step() -> None:
    unit = strategies.unit(("normal", "channels"), 0, 300, 64)
    sealed = methods.get("quantwm").seal("keys", unit, _moment(unit))
    arrays = sealed.arrays
    code = psac.PsacCode(
        arrays["coefficient_scales"], arrays["coefficients"], np.zeros(0, np.uint8), np.zeros((0, 300), np.uint8),
        np.zeros(0, np.int8), np.zeros((0, 5), np.int32),
    )  # fmt: skip
    final = clustered.decode(arrays, 0, 300) + psac.correction(code, arrays["basis"], 300, 0, 300)
    left = (unit.astype(np.float32) - final).astype(float)
    basis = arrays["basis"].astype(float)
    gram = np.swapaxes(basis, -1, -2) @ basis
    coefficients = left @ basis @ np.linalg.inv(gram)
    allowed = arrays["coefficient_scales"].astype(float)[..., None, :] / 2 * (1 + tolerances.PSAC_PROJECTION)
    assert_within("left", coefficients, np.zeros_like(coefficients), allowed)
    assert_bits("decoded", decode_tensor(sealed), final.astype(BF16))


def _logit_error(unit: np.ndarray, mean: np.ndarray, **parameters: int | str) -> float:
    """Mean of ``e^T M e`` over the tokens, for queries of second moment ``M``."""
    moment = QueryMoment(mean, 100)
    decoded = decode_tensor(methods.get("quantwm", **parameters).seal("keys", unit, moment))
    error = decoded.astype(float) - unit.astype(float)
    return float(np.einsum("bhni,bhij,bhnj->", error, mean.astype(float), error))


@pytest.mark.parametrize("kind", ["channels", "normal", "clusters"])
def test_compensation_lowers_the_logit_error_and_more_of_it_lowers_it_further(kind: str) -> None:
    unit = strategies.unit((kind, kind), 0, 300, 64)
    mean = _moment(unit).mean
    errors = [_logit_error(unit, mean, rank=rank) for rank in (0, 1, 8, 16, 64)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.8 * errors[0]
    assert errors[-1] < 0.001 * errors[0]


@pytest.mark.parametrize("metric", ["diagonal", "full", "uniform"])
def test_candidates_lower_the_weighted_ranges(metric: str) -> None:
    unit = strategies.unit(("channels", "normal"), 0, 300, 64)
    weights = np.ones((1, 2, 64)) if metric == "uniform" else statistics.sensitivity(_moment(unit).mean).astype(float)
    costs = []
    for candidates in (1, 2, 4, 16):
        sealed = methods.get("quantwm", metric=metric, candidates=candidates).seal("keys", unit, _moment(unit))
        residual = unit.astype(float) - _parts(sealed)[3]
        low, high = affine.group_range(residual, 64)
        costs.append(float((weights.sum(axis=-1)[..., None, None] * np.square(high - low)).sum()))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


def test_a_rank_of_all_directions_leaves_only_the_coefficient_steps() -> None:
    unit = strategies.unit(("normal",), 0, 60, 32)
    decoded = decode_tensor(methods.get("quantwm", rank=32).seal("keys", unit, _moment(unit)))
    error = np.abs(decoded.astype(float) - unit.astype(float))
    assert error.max() < 0.05


def test_a_warm_start_continues_from_the_unit_before() -> None:
    method = methods.get("quantwm", warm_start=True, centroids=4)
    first, second = (strategies.unit(("normal",), seed, 60, 32) for seed in (0, 1))
    previous = method.seal("values", first)
    sealed = method.seal("values", second, None, previous)
    want = codebook.fit(second, 4, None, 2, previous.arrays["centroids"])
    assert_bits("centroids", sealed.arrays["centroids"], want)
    start = previous.arrays["centroids"][0, 0].astype(np.float32)
    assert_bits("scalar", want[0, 0], np.array(scalar.lloyd(second[0, 0].astype(np.float32), 4, 2, start), BF16))


def test_a_threshold_stores_sparse_what_decodes_like_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = strategies.unit(("normal", "channels"), 0, 130, 64)
    method = methods.get("quantwm", threshold=0.1)
    sparse = method.seal("keys", unit, _moment(unit))
    assert {"layout", "bitmap", "sparse_values", "sparse_counts"} <= sparse.arrays.keys()
    monkeypatch.setattr(psac, "sparse_size", lambda *_: 1 << 30)
    dense = method.seal("keys", unit, _moment(unit))
    assert "layout" not in dense.arrays
    assert sparse.nbytes < dense.nbytes == method.nbytes("keys", unit.shape, first=False)
    for start, stop in ((0, 130), (1, 2), (63, 65), (100, 130)):
        assert_bits("decoded", decode_tensor(sparse, start, stop), decode_tensor(dense, start, stop))


def test_a_threshold_beyond_every_effect_leaves_no_coefficient() -> None:
    unit = strategies.unit(("normal",), 0, 70, 64)
    sealed = methods.get("quantwm", threshold=1e9).seal("keys", unit, _moment(unit))
    assert "sparse_values" not in sealed.arrays
    plain = methods.get("quantwm", rank=0).seal("keys", unit, _moment(unit))
    assert_bits("decoded", decode_tensor(sealed), decode_tensor(plain))


def test_the_sensitivity_is_that_of_the_moment() -> None:
    # All queries lie in channel 0: its error counts alone.
    rng = np.random.default_rng(0)
    unit = rng.standard_normal((1, 1, 256, 32)).astype(np.float32).astype(BF16)
    queries = np.zeros((1, 1, 5, 32), np.float32)
    queries[..., 0] = 2
    moment = statistics.second_moment(queries, 1)
    sealed, plain = (
        methods.get("quantwm", rank=0, metric=metric).seal("keys", unit, moment) for metric in ("diagonal", "uniform")
    )
    errors = [np.abs(decode_tensor(each).astype(float) - unit.astype(float))[..., 0].mean() for each in (sealed, plain)]
    spread = [np.abs(unit.astype(float) - _parts(each)[3])[..., 0].mean() for each in (sealed, plain)]
    assert spread[0] < 0.5 * spread[1]
    assert errors[0] < errors[1]


def test_the_paper_preset() -> None:
    chosen = scheme("quantwm", preset="paper")
    method = methods.get("quantwm", centroids=256, group_size=64, candidates=4, rank=8, iterations=10)
    assert chosen.keys == chosen.values == method
    assert chosen.chunks_per_seal == 2


def test_the_fast_preset_is_the_papers_but_for_its_rounds() -> None:
    paper = scheme("quantwm", preset="paper", iterations=5, relaxation=1.5)
    assert scheme("quantwm", preset="fast") == paper


def test_the_sharp_preset() -> None:
    chosen = scheme("quantwm", preset="sharp")
    assert chosen.keys == chosen.values
    assert chosen.chunks_per_seal == 2
    # Fewer bytes than the paper's setting at the paper's shape, with twice the directions.
    sizes = [
        scheme("quantwm", preset=name).keys.nbytes("keys", (1, 1, 9360, 128), first=False)
        for name in ("sharp", "paper")
    ]
    assert sizes[0] < sizes[1]


def test_sharp_loses_less_of_the_logits_than_the_paper_for_fewer_bytes() -> None:
    rng = np.random.default_rng(7)
    mixing = rng.standard_normal((64, 64)) * np.exp(-np.arange(64) / 8)
    queries = (rng.standard_normal((1, 2, 800, 64)) @ mixing.T).astype(np.float32)
    keys = strategies.unit(("clusters", "normal"), 3, 512, 64)
    moment = statistics.second_moment(queries[:, :, :400], 2)
    exact = attention.logits(queries[:, :, 400:], keys)
    found = {}
    for name, parameters in (("paper", {}), ("sharp", {**PRESETS["sharp"], "rank": 8})):
        parameters.pop("chunks_per_seal", None)
        sealed = methods.get("quantwm", **parameters).seal("keys", keys, moment)
        logits = attention.logits(queries[:, :, 400:], decode_tensor(sealed))
        found[name] = (sealed.nbytes, attention.logit_error(exact, logits).mean())
    assert found["sharp"][0] < found["paper"][0]
    assert found["sharp"][1] < 0.6 * found["paper"][1]


def test_settings_that_came_later_are_stated_only_where_they_differ() -> None:
    unit = strategies.unit(("normal",), 0, 20, 32)
    assert "rounding" not in methods.get("quantwm").seal("values", unit).parameters
    sealed = methods.get("quantwm", rounding="feedback", centroid_bits=8).seal("values", unit)
    assert {name: sealed.parameters.get(name) for name in ("rounding", "centroid_bits", "scale_candidates")} == {
        "rounding": "feedback", "centroid_bits": 8, "scale_candidates": None,
    }  # fmt: skip
    assert methods.get("quantwm", **sealed.parameters) == methods.get("quantwm", rounding="feedback", centroid_bits=8)


def test_a_warm_start_from_integers_continues_from_what_they_stand_for() -> None:
    method = methods.get("quantwm", warm_start=True, centroids=4, centroid_bits=8)
    first, second = (strategies.unit(("normal",), seed, 60, 32) for seed in (0, 1))
    previous = method.seal("values", first)
    sealed = method.seal("values", second, None, previous)
    want = codebook.fit(second, 4, None, 2, clustered.table(previous.arrays))
    codes, scales_ = integer_table.encode(want, 8)
    assert_bits("centroids", sealed.arrays["centroids"], codes)
    assert_bits("scales", sealed.arrays["centroid_scales"], scales_)
