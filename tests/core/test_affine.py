from itertools import chain

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quantwm_core import affine, packing, scales
from quantwm_core.domain import BF16, E4M3
from quantwm_core.errors import DomainError, ParameterError, ShapeError
from tests.core import scalar, strategies, tolerances
from tests.core.compare import assert_bits, assert_within

NORMAL_E4M3 = 2.0**-6


def _per_channel(per_group: np.ndarray, group_size: int) -> np.ndarray:
    return np.repeat(per_group, group_size, axis=-1)


def _parts(code: affine.AffineCode) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, zero-points and steps of every element, ``[*streams, tokens, channels]``."""
    tokens, groups = code.scales.shape[-2:]
    channels = code.codes.shape[-1] * 4
    codes = packing.unpack(code.codes, channels).astype(np.int64)
    zero_points = affine.unpack_rows(code.zero_points, groups, 0, tokens).astype(np.int64)
    steps = scales.decode(code.scales, code.super_scale).astype(np.float64)
    size = channels // groups
    return codes, _per_channel(zero_points, size), _per_channel(steps, size)


def _levels(values: np.ndarray, steps: np.ndarray, zero_points: np.ndarray) -> np.ndarray:
    """Codes before clipping."""
    return np.rint((values / np.where(steps > 0, steps, 1)).astype(np.float32)) + zero_points


@given(st.sampled_from([4, 8, 12]).flatmap(strategies.groups))
def test_it_is_the_scalar_code(values: np.ndarray) -> None:
    group_size = values.shape[-1] // 2
    code = affine.encode(values, group_size)
    codes, zero_points, stored, super_scale, decoded = scalar.affine(values[0].tolist(), group_size)
    assert packing.unpack(code.codes, values.shape[-1])[0].tolist() == codes
    assert code.zero_points[0].tolist() == scalar.pack(list(chain(*zero_points)))
    assert code.scales.view(np.uint8)[0].ravel().tolist() == stored
    assert code.super_scale[0] == super_scale
    assert_bits("decoded", affine.decode(code)[0], np.array(decoded, np.float32))


def test_zero_points_and_codes_round_half_to_even() -> None:
    # The last group makes the super-scale 1, so the steps of the others are exactly 1 and 2.
    values = strategies.fp32([[[-0.5, 2.5, 0.5, 1.5], [-2.5, 0.5, -0.5, -1.5], [-3, 3, -1, 1], [0, 1344, 0, 0]]])
    code = affine.encode(values, 4)
    assert code.super_scale == 1
    assert scales.decode(code.scales, code.super_scale).ravel().tolist() == [1, 1, 2, 448]
    assert affine.unpack_rows(code.zero_points, 1, 0, 4).ravel().tolist() == [0, 2, 2, 0]
    assert packing.unpack(code.codes, 4)[0].tolist() == [[0, 2, 0, 2], [0, 2, 2, 0], [0, 3, 2, 2], [0, 3, 0, 0]]


@given(strategies.units(tokens=(1, 3, 17), head_dimensions=(32, 80)))
def test_it_is_the_scalar_code_on_units(unit: np.ndarray) -> None:
    values = unit[0].astype(np.float32)
    size = affine.default_group_size(values.shape[-1])
    code = affine.encode(values, size)
    decoded = affine.decode(code)
    for stream, stream_values in enumerate(values):
        codes, zero_points, stored, super_scale, want = scalar.affine(stream_values.tolist(), size)
        assert packing.unpack(code.codes, values.shape[-1])[stream].tolist() == codes
        assert code.zero_points[stream].tolist() == scalar.pack(list(chain(*zero_points)))
        assert code.scales.view(np.uint8)[stream].ravel().tolist() == stored
        assert code.super_scale[stream] == super_scale
        assert_bits(f"stream {stream}", decoded[stream], np.array(want, np.float32))


@given(st.one_of(strategies.groups(), strategies.units().map(lambda unit: unit[0].astype(np.float32))))
def test_the_residual_is_within_half_a_step_unless_clipped_and_within_0_6875_of_normal_steps(
    values: np.ndarray,
) -> None:
    size = 4 if values.shape[-1] == 8 else affine.default_group_size(values.shape[-1])
    code = affine.encode(values, size)
    _, zero_points, steps = _parts(code)
    error = np.abs(values - affine.decode(code).astype(np.float64))
    slack = tolerances.FP32_ROUNDING * (np.abs(values) + steps)
    levels = _levels(values, steps, zero_points)
    clipped = (levels < 0) | (levels > 3)
    assert_within("unclipped", np.where(clipped, 0, error), np.zeros_like(error), tolerances.HALF_STEP * steps + slack)
    normal = _per_channel(code.scales.astype(np.float32) >= NORMAL_E4M3, size)
    in_domain = np.abs(values).max(axis=(-2, -1), keepdims=True) >= 2.0**-60
    held = normal & in_domain
    assert_within("normal", np.where(held, error, 0), np.zeros_like(error), tolerances.ALWAYS * steps + slack)


@given(strategies.groups(largest=2.0**59))
def test_the_bf16_value_is_within_a_step_unless_clipped(residuals: np.ndarray) -> None:
    centroid = np.array([[[1.0, -3.5, 0.0, 2.0**40, 0.0, 2.0**-30, 100.0, -0.0078125]]], np.float32)
    values = (residuals + centroid).astype(BF16).astype(np.float32)
    code = affine.encode(values - centroid, 4)
    _, zero_points, steps = _parts(code)
    levels = _levels(values - centroid, steps, zero_points)
    clipped = (levels < 0) | (levels > 3)
    final = (centroid + affine.decode(code)).astype(BF16).astype(np.float64)
    error = np.where(clipped, 0, np.abs(final - values))
    slack = tolerances.FP32_ROUNDING * (np.abs(values) + np.abs(centroid) + steps)
    assert_within("bf16", error, np.zeros_like(error), steps + slack)


@given(strategies.groups(), st.integers(0, 2**32 - 1))
def test_coding_a_decoded_unit_again_gives_the_same_codes_unless_clipped(residuals: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scale = np.exp2(np.round(np.log2(np.abs(residuals).max() + 2.0**-126)))
    centroid = (scale * rng.standard_normal((1, 1, 8)) * np.exp(rng.standard_normal(8))).astype(BF16).astype(np.float32)
    values = (residuals + centroid).astype(BF16).astype(np.float32)
    assume(np.abs(values).max() <= 2.0**60)
    code = affine.encode(values - centroid, 4)
    codes, zero_points, steps = _parts(code)
    levels = _levels(values - centroid, steps, zero_points)
    final = (centroid + affine.decode(code)).astype(BF16).astype(np.float32)
    again = np.clip(_levels(final - centroid, steps, zero_points), 0, 3)
    unclipped = (levels >= 0) & (levels <= 3)
    np.testing.assert_array_equal(again[unclipped], codes[unclipped])


def test_a_clipped_value_may_change_its_code_when_coded_again() -> None:
    # BF16 numbers from 128 to 256 lie 1 apart, here more than a step: what decodes to 129.49 is stored as 129.
    centroid = strategies.fp32([[[128, 0, 0, 0, 0, 0, 0, 0]]])
    values = strategies.fp32([[[130, -0.376953125, 0, 0, 15.6875, 0, 0, 0]]])
    code = affine.encode(values - centroid, 4)
    codes, zero_points, steps = _parts(code)
    assert _levels(values - centroid, steps, zero_points)[0, 0, 0] == 4
    final = (centroid + affine.decode(code)).astype(BF16).astype(np.float32)
    assert codes[0, 0, 0] == 3
    assert _levels(final - centroid, steps, zero_points)[0, 0, 0] == 2


@given(strategies.groups(largest=2.0**30, smallest=2.0**-30), st.integers(-30, 30))
def test_powers_of_two_scale_through(values: np.ndarray, power: int) -> None:
    code, scaled = affine.encode(values, 4), affine.encode(np.ldexp(values, power), 4)
    assert_bits("codes", scaled.codes, code.codes)
    assert_bits("zero-points", scaled.zero_points, code.zero_points)
    assert_bits("scales", scaled.scales.view(np.uint8), code.scales.view(np.uint8))
    # A stream of zeros has the smallest super-scale, and keeps it.
    want = np.ldexp(code.super_scale, power) if values.any() else code.super_scale
    assert_bits("super-scale", scaled.super_scale, want)
    assert_bits("decoded", affine.decode(scaled), np.ldexp(affine.decode(code), power))


@given(strategies.groups())
def test_exactly_the_zero_groups_have_scale_zero_and_decode_to_zero(values: np.ndarray) -> None:
    code = affine.encode(values, 4)
    grouped = values.reshape(*code.scales.shape, 4)
    assume(((np.abs(grouped).max(axis=-1) == 0) | (np.abs(grouped).max(axis=-1) >= 2.0**-60)).all())
    zero = ~grouped.any(axis=-1)
    np.testing.assert_array_equal(code.scales.astype(np.float32) == 0, zero)
    assert not affine.decode(code).reshape(grouped.shape)[zero].any()


@given(strategies.groups())
def test_zero_is_exact_in_every_group(values: np.ndarray) -> None:
    decoded = affine.decode(affine.encode(values, 4))
    assert not decoded[values == 0].any()


@given(strategies.groups(tokens=9))
def test_permuted_tokens_permute_codes(values: np.ndarray) -> None:
    order = np.random.default_rng(values.shape[1]).permutation(values.shape[1])
    code, permuted = affine.encode(values, 4), affine.encode(values[:, order], 4)
    assert_bits("codes", permuted.codes, code.codes[:, order])
    assert_bits("scales", permuted.scales.view(np.uint8), code.scales[:, order].view(np.uint8))
    zero_points = [affine.unpack_rows(part.zero_points, 2, 0, len(order)) for part in (permuted, code)]
    assert_bits("zero-points", zero_points[0], zero_points[1][:, order])
    assert_bits("super-scale", permuted.super_scale, code.super_scale)


@given(strategies.units(heads=3))
def test_streams_are_coded_each_for_itself(unit: np.ndarray) -> None:
    values = unit.astype(np.float32)
    size = affine.default_group_size(values.shape[-1])
    together = affine.encode(values, size)
    for head in range(values.shape[1]):
        alone = affine.encode(values[:, head : head + 1], size)
        assert_bits("codes", alone.codes, together.codes[:, head : head + 1])
        assert_bits("scales", alone.scales.view(np.uint8), together.scales.view(np.uint8)[:, head : head + 1])
        assert_bits("zero-points", alone.zero_points, together.zero_points[:, head : head + 1])
        assert_bits("super-scale", alone.super_scale, together.super_scale[:, head : head + 1])


@given(strategies.units(), st.data())
def test_a_range_decodes_as_the_slice_of_the_whole(unit: np.ndarray, data: st.DataObject) -> None:
    tokens, channels = unit.shape[2:]
    code = affine.encode(unit.astype(np.float32), affine.default_group_size(channels))
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    assert_bits("range", affine.decode(code, start, stop), affine.decode(code)[:, :, start:stop])


@given(st.integers(1, 9), st.integers(1, 7), st.data())
def test_rows_that_share_bytes_are_found(rows: int, columns: int, data: st.DataObject) -> None:
    matrix = np.random.default_rng(rows).integers(0, 4, (2, rows, columns)).astype(np.uint8)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    packed = packing.pack(matrix.reshape(2, -1))
    np.testing.assert_array_equal(affine.unpack_rows(packed, columns, start, stop), matrix[:, start:stop])


def test_every_bf16_number_is_coded_against_its_own_range() -> None:
    every = strategies.all_bf16().astype(np.float32)
    values = every[: len(every) // 4 * 4].reshape(-1, 1, 4)
    code = affine.encode(values, 4)
    _, _, steps = _parts(code)
    large = np.abs(values).max(axis=-1, keepdims=True) >= 2.0**-60
    error = np.abs(affine.decode(code).astype(np.float64) - values)
    slack = tolerances.FP32_ROUNDING * np.abs(values)
    assert_within("error", np.where(large, error, 0), np.zeros_like(error), tolerances.ALWAYS * steps + slack)


@pytest.mark.parametrize(("channels", "size"), [(32, 32), (64, 64), (80, 40), (96, 48), (128, 64), (256, 64), (4, 4)])
def test_default_groups(channels: int, size: int) -> None:
    assert affine.default_group_size(channels) == size


@pytest.mark.parametrize("channels", range(4, 300, 4))
def test_default_groups_by_definition(channels: int) -> None:
    fitting = [size for size in range(4, 65, 4) if channels % size == 0]
    assert affine.default_group_size(channels) == max(fitting)
    assert affine.check_group_size(channels, max(fitting)) == channels // max(fitting)


@pytest.mark.parametrize("channels", [0, -4, 2, 66, 127])
def test_a_head_dimension_that_is_no_multiple_of_four_is_refused(channels: int) -> None:
    with pytest.raises(ShapeError, match=f"head dimension {channels}: need a positive multiple of 4"):
        affine.default_group_size(channels)


@pytest.mark.parametrize("size", [0, -4, 2, 6, 48, 128])
def test_a_group_size_that_does_not_fit_is_refused_and_one_that_fits_proposed(size: int) -> None:
    with pytest.raises(ParameterError, match=f"group size {size} does not fit head dimension 64.*such as 64"):
        affine.encode(np.zeros((1, 1, 64), np.float32), size)


def test_memory_order_does_not_matter() -> None:
    values = np.random.default_rng(0).standard_normal((2, 16, 8), np.float32)
    view = np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 0, 1)), 1, 0)
    assert_bits("codes", affine.encode(view, 4).codes, affine.encode(values, 4).codes)
    assert affine.encode(values, 4).scales.dtype == E4M3


def _lost(values: np.ndarray, code: affine.AffineCode, group_size: int) -> np.ndarray:
    """Squared error of every group, FP64."""
    error = np.square(values.astype(np.float64) - affine.decode(code).astype(np.float64))
    return error.reshape(*code.scales.shape, group_size).sum(axis=-1)


@given(strategies.units(tokens=(1, 3, 17), head_dimensions=(32, 80)), st.integers(2, len(affine.FRACTIONS)))
def test_a_search_loses_no_group_more_than_fewer_candidates(unit: np.ndarray, candidates: int) -> None:
    values = unit.astype(np.float32)
    lost = [_lost(values, affine.encode(values, 16, count), 16) for count in (candidates - 1, candidates)]
    assert (lost[1] <= lost[0] * (1 + 1e-5) + 1e-30).all()


def test_a_search_clips_an_outlier_and_keeps_the_rest() -> None:
    # The last group makes the super-scale 1.
    values = strategies.fp32([[[0, 3, 6, 9], [0, 2, 2, 3.6], [0, 1344, 0, 0]]])
    plain, searched = affine.encode(values, 4), affine.encode(values, 4, 4)
    steps = [scales.decode(code.scales, code.super_scale)[0, :, 0].tolist() for code in (plain, searched)]
    assert searched.super_scale == plain.super_scale == 1
    assert steps[0][0] == steps[1][0] == 3  # nothing is lost on the full range, and a tie goes to it
    assert (steps[0][1], steps[1][1]) == (1.25, 1)  # 1.2 and 1.2 * 7/8, in E4M3
    assert affine.decode(searched)[0, 1].tolist() == [0, 2, 2, 3]


def test_a_search_takes_a_fifth_off_the_error_of_ordinary_groups() -> None:
    values = strategies.unit(("normal",), 0, 200, 128).astype(np.float32)
    plain, searched = (_lost(values, affine.encode(values, 64, count), 64).mean() for count in (1, 4))
    assert searched < 0.8 * plain


@pytest.mark.parametrize("candidates", [0, 5])
def test_an_impossible_search_is_refused(candidates: int) -> None:
    with pytest.raises(ParameterError, match=f"scale candidates {candidates}"):
        affine.check_scale_candidates(candidates)


@pytest.mark.filterwarnings("ignore:invalid value")  # Inf less Inf
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("candidates", [1, 4])
def test_values_that_no_group_holds_are_refused(bad: float, candidates: int) -> None:
    values = np.ones((2, 3, 8), np.float32)
    values[1, 2, 5] = bad
    with pytest.raises(DomainError, match=r"^group scales: NaN or infinite, as those of such values are"):
        affine.encode(values, 4, candidates)
