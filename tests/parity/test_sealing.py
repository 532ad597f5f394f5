"""Whole tensors sealed on a GPU: what core stores of the same codebook and index, byte by byte, or a typed error."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import (
    affine,
    allocation,
    basis,
    blocks,
    clustered,
    codebook,
    directions,
    packing,
    psac,
    rounding,
    symmetric,
    transform_plan,
)
from quantwm_core import methods as core_methods
from quantwm_core.chunk import KINDS, Kind
from quantwm_core.chunk import SealedTensor as CoreTensor
from quantwm_core.clustered import TABLE_SCALES
from quantwm_core.errors import DeviceError, DomainError, ParameterError
from quantwm_core.method import Method, decode_tensor
from quantwm_core.method import scheme as make_scheme
from quantwm_core.methods.quantwm import PSAC_PARTS
from quantwm_core.statistics import QueryMoment as CoreMoment
from quantwm_kernels import methods
from quantwm_kernels.bridge import to_numpy, to_torch
from quantwm_kernels.chunk import SealedTensor
from quantwm_kernels.sealing import Asked, PendingTensors
from quantwm_kernels.statistics import QueryMoment
from tests.core import strategies, variants
from tests.core.compare import assert_arrays, assert_bits
from tests.parity.gate import TOLERANCES, assert_close
from tests.parity.metrics import KINDS as CONTENTS
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.sealing", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

CLUSTERED = ("quantwm", "qvg")
TRANSFORMS = ("klt", "kvtc")
ROTATED = ("oscar",)


def begin(
    device: torch.device,
    asked: Sequence[tuple[Method, Kind, np.ndarray]],
    moment: CoreMoment | None = None,
    previous: Sequence[SealedTensor] = (),
) -> PendingTensors:
    known = None if moment is None else QueryMoment(torch.from_numpy(moment.mean).to(device), moment.count)
    before = [*previous, None, None]
    jobs = [
        Asked(method, kind, to_torch(np.array(unit)).to(device), f"layer 3, chunk 7, {kind}", before[number])
        for number, (method, kind, unit) in enumerate(asked)
    ]
    return kernels.seal(jobs, known)


def numpy_of(sealed: SealedTensor) -> CoreTensor:
    return sealed.to("cpu").to_core()


def residual_of(unit: np.ndarray, sealed: CoreTensor) -> np.ndarray:
    """What the codebooks of all stages leave."""
    left = unit.astype(np.float32)
    for suffix in ("", "_2", "_3"):
        if f"index{suffix}" in sealed.arrays:
            table = clustered.table(sealed.arrays) if suffix == "" else sealed.arrays[f"centroids{suffix}"]
            left = left - clustered.gather(table, sealed.arrays[f"index{suffix}"])
    return left


def check(ours: SealedTensor, unit: np.ndarray, method: Method, kind: Kind, moment: CoreMoment | None) -> None:
    """Hold a sealed tensor against the reference: in form, and in all bytes that follow from codebook and index."""
    sealed, reference = numpy_of(ours), method.seal(kind, unit, moment)
    assert (sealed.method, sealed.parameters, sealed.shape) == (method.name, reference.parameters, unit.shape)
    if method.name in ROTATED:
        check_rotated(sealed, reference, unit, kind)
        return
    if method.name in TRANSFORMS:
        check_transform(sealed, reference, unit, method, kind, moment)
        return
    if method.name not in CLUSTERED:
        assert_arrays(kind, dict(sealed.arrays), dict(reference.arrays))
        return
    layout = set(PSAC_PARTS) - {"basis", "coefficient_scales"}
    assert sealed.arrays.keys() - layout == reference.arrays.keys() - layout
    for name in reference.arrays.keys() - layout:
        kinds = [(array.dtype, array.shape) for array in (sealed.arrays[name], reference.arrays[name])]
        assert kinds[0] == kinds[1], name
    residual, size = residual_of(unit, sealed), unit.shape[-1] // reference.arrays["scales"].shape[-1]
    check_residual(sealed, residual, size, method, moment if kind == "keys" else None)
    if "basis" in sealed.arrays:
        check_compensation(sealed, reference, unit, method)
    assert ours.nbytes == sealed.nbytes


def check_transform(
    sealed: CoreTensor, reference: CoreTensor, unit: np.ndarray, method: Any, kind: Kind, moment: CoreMoment | None
) -> None:
    """Codes that follow from our basis, order and steps; and nothing lost to the reference's choice of these."""
    check_forms(sealed, reference, kind)
    metrics = np.zeros((*unit.shape[:2], unit.shape[3], unit.shape[3]))
    if moment is not None and method.uses_queries(kind):
        metrics = moment.mean.astype(np.float64)
    sources = transform_plan.sources(unit, metrics, getattr(method, "damp", 0.0))
    bases, arrays = basis.Basis.of(sealed.arrays).streams(), sealed.arrays
    byte, direction = 0, 0
    for source, stored, counts in zip(sources, bases, arrays["blocks"].reshape(-1, 3), strict=True):
        size, coded = unit.shape[2] * allocation.token_bytes(counts), allocation.directions(counts)
        rows = basis.wide(*stored)[arrays["order"][direction : direction + coded]]
        coefficients = (source.residual @ basis.projector(rows, source.metric).T).astype(np.float32)
        steps = np.ldexp(arrays["steps"][direction : direction + coded].astype(np.float32), -source.exponent)
        want = directions.quantize(coefficients, allocation.widths(counts), steps.astype("bfloat16"))
        got = blocks.unpack(arrays["codes"][byte : byte + size].reshape(unit.shape[2], -1), counts)
        moves = (steps > 0) & (steps > 1e-5 * np.abs(source.residual).max())  # a direction of rounding errors is noise
        pair = [torch.from_numpy(codes[:, moves].astype(np.float32)) for codes in (got, want)]
        assert_close("codes", pair[0], pair[1], TOLERANCES["coefficients"])
        byte, direction = byte + size, direction + coded
    check_errors(sealed, reference, unit)


def check_rotated(sealed: CoreTensor, reference: CoreTensor, unit: np.ndarray, kind: Kind) -> None:
    check_forms(sealed, reference, kind)
    assert_bits("fitted", sealed.arrays["shared_fitted"], reference.arrays["shared_fitted"])
    check_errors(sealed, reference, unit)


def check_forms(sealed: CoreTensor, reference: CoreTensor, kind: Kind) -> None:
    assert sealed.arrays.keys() == reference.arrays.keys()
    for name, want in reference.arrays.items():
        assert (sealed.arrays[name].dtype, sealed.arrays[name].ndim) == (want.dtype, want.ndim), name
    method = core_methods.get(sealed.method, **sealed.parameters)
    assert sealed.nbytes <= method.nbytes(kind, sealed.shape, first=False)


def check_errors(sealed: CoreTensor, reference: CoreTensor, unit: np.ndarray) -> None:
    """Eigenvectors of eigenvalues that are alike turn freely, so the two may err differently, but not more."""
    exact = unit.astype(np.float64)
    scale = np.abs(exact).max()
    ours, theirs = (
        float(np.square((decode_tensor(each).astype(np.float64) - exact) / max(scale, 1e-300)).mean())
        for each in (sealed, reference)
    )
    assert ours <= 1.3 * theirs + 2.0**-18


def check_residual(sealed: CoreTensor, residual: np.ndarray, size: int, method: Any, moment: CoreMoment | None) -> None:
    """Codes of the residual that our codebook and index leave."""
    code: Any = affine.encode(residual, size) if "zero_points" in sealed.arrays else symmetric.encode(residual, size)
    if method.name == "quantwm":
        fed = method.rounding == "feedback" and moment is not None
        code = searched(sealed, residual, size, method.scale_candidates, fed=fed)
        if fed and moment is not None:
            check_feedback(sealed, residual, code, rounding.feedback(moment.mean, sealed.arrays.get("basis")))
            return
    for name, want in vars(code).items():
        assert_bits(name, sealed.arrays[name], want)


def searched(sealed: CoreTensor, residual: np.ndarray, size: int, candidates: int, *, fed: bool) -> affine.AffineCode:
    """The reference's code; where another share of the range loses as little, the one that was stored.

    ``fed``: the stored codes are chosen with feedback, so they do not say what the search saw.
    """
    best = affine.encode(residual, size, candidates)
    if candidates == 1:
        return best
    ours = clustered.affine_code(sealed.arrays)
    lost = [
        np.square(residual - affine.decode(each)).reshape(*best.scales.shape, size).sum(-1) for each in (ours, best)
    ]
    same = ours.scales.view(np.uint8) == best.scales.view(np.uint8)
    assert fed or (lost[0] <= lost[1] * (1 + 1e-5) + 1e-30)[~same].all()
    assert (~same).mean() <= TOLERANCES["searched"].share
    return rounding.refine(residual, ours, np.zeros((*residual.shape[:2], *residual.shape[-1:] * 2), np.float32))


def check_feedback(sealed: CoreTensor, residual: np.ndarray, code: affine.AffineCode, matrix: np.ndarray) -> None:
    """The matrix is computed otherwise, so a code next to a tie may fall to either side, and those after it follow."""
    want = rounding.refine(residual, code, matrix)
    stored = (sealed.arrays["codes"], want.codes)
    ours, theirs = (torch.from_numpy(packing.unpack(each, residual.shape[-1])) for each in stored)
    assert_close("codes", ours, theirs, TOLERANCES["feedback"])


def check_compensation(sealed: CoreTensor, reference: CoreTensor, unit: np.ndarray, method: Any) -> None:
    """PSAC of the error that our codes leave, along our basis."""
    bases = [torch.from_numpy(each.arrays["basis"].astype(np.float32)) for each in (sealed, reference)]
    assert_close("projector", bases[0] @ bases[0].mT, bases[1] @ bases[1].mT, TOLERANCES["projector"])
    error = unit.astype(np.float32) - clustered.decode(sealed.arrays, 0, unit.shape[2])
    coefficients = psac.project(error, sealed.arrays["basis"])
    scales = sealed.arrays["coefficient_scales"].astype(np.float32)
    most = psac.COEFFICIENT_MAX[method.coefficient_bits]
    largest = np.abs(coefficients).max(axis=-2)
    if method.coefficient_bits == 4:
        largest = np.minimum(largest, 3 * np.sqrt(np.square(coefficients).mean(axis=-2)))
    assert (largest <= scales * np.float32(most * 1.00001)).all()
    assert (scales <= largest / most * (1 + 2.0**-6)).all()
    steps = torch.from_numpy(np.round(method.decode(sealed).astype(np.float32) * 0))  # decodes at all
    assert torch.isfinite(steps).all()
    if "layout" not in sealed.arrays and not method.threshold:
        ratio = np.clip(np.rint(coefficients / np.where(scales > 0, scales, np.inf)[..., None, :]), -most, most)
        stored = sealed.arrays["coefficients"]
        whole = packing.unpack_nibbles(stored, ratio.shape[-1]) if method.coefficient_bits == 4 else stored
        ours = torch.from_numpy(whole.astype(np.float32).reshape(ratio.shape))
        assert_close("steps", ours, torch.from_numpy(ratio), TOLERANCES["coefficients"])


@settings(EXAMPLES)
@given(
    keys=strategies.small_units(CONTENTS, heads=1),
    seed=st.integers(0, 99),
    variant=st.sampled_from(list(variants.every())),
    first=st.booleans(),
)
def test_seal(device: torch.device, keys: np.ndarray, seed: int, variant: variants.Variant, first: bool) -> None:
    values = strategies.unit(("normal",), seed, keys.shape[2], keys.shape[3])
    method = variant.make()
    moment = None if first else strategies.moment(seed, 1, keys.shape[3])
    sealed = begin(device, [(method, "keys", keys), (method, "values", values)], moment).wait()
    for ours, unit, kind in zip(sealed, (keys, values), KINDS, strict=True):
        check(ours, unit, method, kind, moment)


@pytest.mark.parametrize("variant", list(variants.every()), ids=str)
def test_every_method_and_several_streams(device: torch.device, variant: variants.Variant) -> None:
    method = variant.make()
    keys = strategies.unit(("channels", "clusters"), 1, 65, 96)
    values = strategies.unit(("offset", "normal"), 2, 65, 96)
    moment = strategies.moment(5, 2, 96)
    asked: list[tuple[Method, Kind, np.ndarray]] = [(method, "keys", keys), (method, "values", values)]
    together = begin(device, asked, moment).wait()
    for ours, unit, kind in zip(together, (keys, values), KINDS, strict=True):
        check(ours, unit, method, kind, moment)


def test_the_same_bytes_twice_together_and_apart(device: torch.device) -> None:
    method = core_methods.get("quantwm", iterations=2)
    moment = strategies.moment(5, 2, 64, batch=2)
    units = [strategies.unit(("normal", "clusters"), seed, 65, 64, batch=2) for seed in (1, 2)]
    asked: list[tuple[Method, Kind, np.ndarray]] = [(method, "keys", units[0]), (method, "values", units[1])]
    together = begin(device, asked, moment).wait()
    again = begin(device, asked, moment).wait()
    apart = [begin(device, [each], moment).wait()[0] for each in asked]
    for first, second, third, unit, kind in zip(together, again, apart, units, KINDS, strict=True):
        check(first, unit, method, kind, moment)
        assert_arrays("twice", dict(numpy_of(second).arrays), dict(numpy_of(first).arrays))
        assert_arrays("apart", dict(numpy_of(third).arrays), dict(numpy_of(first).arrays))


def test_methods_and_head_dimensions_may_differ(device: torch.device) -> None:
    keys, values = strategies.unit(("normal",), 1, 40, 64), strategies.unit(("normal",), 2, 40, 32)
    moment = strategies.moment(3, 1, 64)
    for key_method, value_method in (("quantwm", "quantwm"), ("quantwm", "bf16"), ("kivi", "qvg")):
        made = core_methods.get(key_method), core_methods.get(value_method)
        sealed = begin(device, [(made[0], "keys", keys), (made[1], "values", values)], moment).wait()
        check(sealed[0], keys, made[0], "keys", moment)
        check(sealed[1], values, made[1], "values", moment)


def test_a_warm_start_begins_from_the_unit_before(device: torch.device) -> None:
    method = core_methods.get("quantwm", warm_start=True, rank=0, iterations=0)
    units = [strategies.unit(("clusters",), seed, 64, 64) for seed in (1, 2)]
    asked: list[tuple[Method, Kind, np.ndarray]] = [(method, "keys", units[0]), (method, "values", units[1])]
    first = begin(device, asked).wait()
    warm = begin(device, [(method, "keys", units[1]), (method, "values", units[0])], None, first).wait()
    for ours, unit, before in zip(warm, (units[1], units[0]), first, strict=True):
        want = codebook.fit(unit, 4, None, 2, numpy_of(before).arrays["centroids"])
        got = ours.arrays["centroids"].float().cpu().numpy()
        np.testing.assert_allclose(got, want.astype(np.float32), atol=2e-2)
    # A codebook of another size is no start, and a start for one tensor alone keeps them apart.
    other = begin(device, [(method, "keys", units[0][:, :, :20]), (method, "values", units[1][:, :, :20])], None, first)
    assert other.wait()[0].arrays["centroids"].shape[2] == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of what the interpreter computes with them
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), 2.0**61])
@pytest.mark.parametrize("name", core_methods.names())
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_cannot_be_sealed_are_named(device: torch.device, name: str, kind: Kind, bad: float) -> None:
    units = {each: np.array(strategies.unit(("normal", "normal"), 1, 20, 32)) for each in KINDS}
    units[kind][0, 1, 7, 5] = bad
    method = core_methods.get(name)
    pending = begin(device, [(method, each, units[each]) for each in KINDS])
    match = rf"layer 3, chunk 7, {kind}: 1 of 1280 values are NaN, infinite or beyond 2\*\*60, first .* \(0, 1, 7, 5\)"
    for _ in range(2):
        with pytest.raises(DomainError, match=match):
            pending.wait()


def test_numbers_are_judged_before_they_are_rounded(device: torch.device) -> None:
    values = torch.ones(1, 1, 20, 32, device=device)
    values[0, 0, 3, 4] = 2.0**60 * (1 + 2.0**-20)
    for name in ("quantwm", "rtn"):
        with pytest.raises(DomainError, match="1 of 640"):
            kernels.seal([Asked(core_methods.get(name), "values", values, "values")]).wait()
    half = torch.full((1, 1, 20, 32), 60000.0, dtype=torch.float16, device=device)
    (sealed,) = kernels.seal([Asked(core_methods.get("bf16"), "keys", half, "keys")]).wait()
    assert torch.equal(sealed.arrays["exact"], half.bfloat16())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the same
@pytest.mark.parametrize("metric", ["uniform", "diagonal", "full"])
def test_a_moment_that_is_no_number_is_refused(device: torch.device, metric: str) -> None:
    unit = strategies.unit(("normal",), 1, 40, 32)
    moment = strategies.moment(1, 1, 32)
    moment.mean[0, 0, 3, 3] = np.nan
    with pytest.raises(DomainError, match="chunk 7, keys: the queries that it is sealed with"):
        begin(device, [(core_methods.get("quantwm", metric=metric, iterations=0), "keys", unit)], moment).wait()


def test_a_moment_that_nothing_uses_is_not_judged(device: torch.device) -> None:
    unit, moment = strategies.unit(("normal",), 1, 20, 32), strategies.moment(1, 1, 32)
    moment.mean[0, 0, 3, 3] = np.nan
    made = core_methods.get("quantwm", metric="uniform", rank=0, iterations=0)
    sealed = begin(device, [(made, "keys", unit)], moment).wait()[0]
    check(sealed, unit, made, "keys", None)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    unit = strategies.unit(("normal",), 1, 40, 32)
    for method, match in (
        (core_methods.get("quantwm", rank=33), "rank 33"),
        (core_methods.get("quantwm", group_size=24), "group size 24"),
        (core_methods.get("qvg", group_size=24), "group size 24"),
    ):
        with pytest.raises(ParameterError, match=match):
            begin(device, [(method, "keys", unit)], strategies.moment(1, 1, 32))
    for name in TRANSFORMS:
        with pytest.raises(ParameterError, match=r"0\.5 bits an element of head dimension 16: need 1\.0"):
            begin(device, [(core_methods.get(name, bits=0.5), "keys", unit[..., :16])])


@pytest.mark.parametrize("name", [*TRANSFORMS, *ROTATED])
def test_a_unit_is_sealed_in_the_basis_of_the_one_before(device: torch.device, name: str) -> None:
    units = [strategies.unit(("normal", "clusters"), seed, 65, 64) for seed in (1, 2)]
    moment = strategies.moment(5, 2, 64)
    settings: list[tuple[dict[str, Any], bool]] = [({"lifetime": 0.0}, True), ({"lifetime": 1e9}, name == "oscar")]
    for parameters, same in settings:
        method = core_methods.get(name, **({} if name == "oscar" else parameters))
        first = begin(device, [(method, "keys", units[0]), (method, "values", units[0])], moment).wait()
        second = begin(device, [(method, "keys", units[1]), (method, "values", units[1])], moment, first).wait()
        for before, after, kind in zip(first, second, KINDS, strict=True):
            assert (after.arrays["shared_basis"] is before.arrays["shared_basis"]) == same
            if same:
                reference = method.seal(kind, units[1], moment, numpy_of(before))
                check_errors(numpy_of(after), reference, units[1])


@pytest.mark.parametrize("name", ["klt", "oscar"])
def test_streams_may_be_taken_a_few_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    most, sizes, clipped = 65 * 64 * 2, list[int](), kernels.baselines._clipped

    def noted(rotated: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(rotated.numel())
        return cast("torch.Tensor", clipped(rotated, *others))

    monkeypatch.setattr("quantwm_kernels.triton.transform_sealing.MOST_WIDE", most)
    monkeypatch.setattr("quantwm_kernels.triton.baselines._clipped", noted)
    method, unit = core_methods.get(name), strategies.unit(("normal", "clusters", "channels"), 1, 65, 64)
    moment = strategies.moment(5, 3, 64)
    for kind in KINDS:
        (sealed,) = begin(device, [(method, kind, unit)], moment).wait()
        check(sealed, unit, method, kind, moment)
    assert max(sizes, default=0) <= most
    assert bool(sizes) == (name == "oscar")


def test_a_basis_that_needs_more_bytes_for_the_same_error_is_renewed(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    flat, normal = (rng.standard_normal((1, 1, 300, 32)) for _ in range(2))
    steep = (normal * np.exp2(-np.arange(32) / 4)).astype("bfloat16")
    method = core_methods.get("klt", tolerance=0.02)
    first = begin(device, [(method, "values", flat.astype("bfloat16"))]).wait()
    (fresh,), (after,) = (begin(device, [(method, "values", steep)], None, each).wait() for each in ((), first))
    assert after.arrays["codes"].nbytes == fresh.arrays["codes"].nbytes < first[0].arrays["codes"].nbytes / 2


def test_a_level_gives_the_same_bits(device: torch.device) -> None:
    unit, moment = strategies.unit(("normal", "clusters"), 1, 65, 64), strategies.moment(3, 2, 64)
    method = core_methods.get("klt", level=0.01)
    (sealed,) = begin(device, [(method, "keys", unit)], moment).wait()
    check(sealed, unit, method, "keys", moment)
    assert sealed.arrays["blocks"].tolist() == method.seal("keys", unit, moment).arrays["blocks"].tolist()


def test_a_moment_of_few_queries_is_damped_as_little_as_one_likes(device: torch.device) -> None:
    unit, moment = strategies.unit(("normal",), 1, 65, 64), strategies.moment(3, 1, 64, rank=2)
    assert np.linalg.eigvalsh(moment.mean).min() < 0
    method = core_methods.get("klt", damp=1e-8)
    check(begin(device, [(method, "keys", unit)], moment).wait()[0], unit, method, "keys", moment)


@pytest.mark.parametrize("name", [*TRANSFORMS, *ROTATED])
def test_a_basis_that_is_not_whole_is_not_kept(device: torch.device, name: str) -> None:
    method, unit = core_methods.get(name), strategies.unit(("normal",), 1, 40, 32)
    first = begin(device, [(method, "values", unit)]).wait()[0]
    for part in first.shared:
        damaged = replace(first, arrays={other: array for other, array in first.arrays.items() if other != part})
        (sealed,) = begin(device, [(method, "values", unit)], None, [damaged]).wait()
        assert_arrays("fitted anew", dict(numpy_of(sealed).arrays), dict(numpy_of(first).arrays))


def test_a_basis_elsewhere_is_refused(device: torch.device) -> None:
    method, unit = core_methods.get("klt"), strategies.unit(("normal",), 1, 40, 32)
    before = [sealed.to("meta") for sealed in begin(device, [(method, "keys", unit)]).wait()]
    with pytest.raises(DeviceError, match="chunk 7, keys: the basis of the unit before is on meta"):
        begin(device, [(method, "keys", unit)], None, before)


def test_a_codebook_without_its_scales_is_no_warm_start(device: torch.device) -> None:
    method = core_methods.get("quantwm", warm_start=True, centroid_bits=8, rank=0, iterations=1)
    unit = strategies.unit(("normal",), 1, 40, 32)
    (first,) = begin(device, [(method, "values", unit)]).wait()
    damaged = replace(first, arrays={name: array for name, array in first.arrays.items() if name != TABLE_SCALES})
    (sealed,) = begin(device, [(method, "values", unit)], None, [damaged]).wait()
    assert_arrays("begun anew", dict(numpy_of(sealed).arrays), dict(numpy_of(first).arrays))
    reference = method.seal("values", unit, None, numpy_of(damaged))
    assert_arrays("of core", dict(reference.arrays), dict(method.seal("values", unit).arrays))


def test_a_codebook_elsewhere_is_no_warm_start(device: torch.device) -> None:
    method = core_methods.get("quantwm", warm_start=True, iterations=0)
    unit = strategies.unit(("normal",), 1, 40, 32)
    before = [sealed.to("meta") for sealed in begin(device, [(method, "keys", unit)]).wait()]
    with pytest.raises(DeviceError, match="chunk 7, keys: a warm start from a unit on meta"):
        begin(device, [(method, "keys", unit)], None, before)


def test_a_method_without_kernels_is_refused(device: torch.device) -> None:
    class Foreign:
        name = "foreign"

    unit = torch.ones(1, 1, 4, 32, device=device)
    with pytest.raises(DeviceError, match="no kernel seals with method 'foreign'"):
        kernels.seal([Asked(Foreign(), "keys", unit, "keys")])  # type: ignore[arg-type]  # a method that fulfils nothing


@pytest.mark.gpu
def test_nothing_is_waited_for_while_a_chunk_is_begun(gpu: torch.device) -> None:
    keys, values = (torch.randn(1, 4, 300, 128, device=gpu).bfloat16() for _ in range(2))
    moment = QueryMoment(torch.randn(1, 4, 200, 128, device=gpu).mT @ torch.randn(1, 4, 200, 128, device=gpu), 200)
    moment = QueryMoment(moment.mean @ moment.mean.mT, 200)
    schemes = [*(make_scheme(name) for name in core_methods.names()), make_scheme("quantwm", preset="sharp")]
    for scheme in (*schemes, *schemes):  # compiled, then recorded, and pinned memory cached
        methods.seal_chunk(scheme, keys, values, moment)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [methods.begin_chunk(scheme, keys, values, moment, start=5) for scheme in schemes]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [each.wait().start for each in pending] == [5] * len(schemes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "late"),
    [("klt", "transform_sealing.flattened"), ("oscar", "baselines.packing.pack")],
)
def test_a_unit_is_finished_on_the_stream_on_which_it_was_begun(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, late: str
) -> None:
    unit = torch.randn(1, 4, 3000, 128, device=gpu).bfloat16()
    method = core_methods.get(name)
    (want,) = kernels.seal([Asked(method, "values", unit, "values")]).wait()
    begun, caller = (torch.cuda.Stream(gpu) for _ in range(2))
    used, original = [], attrgetter(late)(kernels)

    def delayed(*args: Any) -> Any:
        used.append(torch.cuda.current_stream(gpu))
        torch.cuda._sleep(200_000_000)  # a caller that does not wait would come first
        return original(*args)

    monkeypatch.setattr(f"quantwm_kernels.triton.{late}", delayed)
    torch.cuda.synchronize()
    with torch.cuda.stream(begun):
        pending = kernels.seal([Asked(method, "values", unit, "values")])
    with torch.cuda.stream(caller):
        (got,) = pending.wait()
        copies = {part: array.clone() for part, array in got.arrays.items()}
        unit.zero_()
    torch.cuda.synchronize()
    assert set(used) == {begun}
    for part, array in want.arrays.items():
        assert torch.equal(copies[part].view(torch.uint8), array.view(torch.uint8)), part


@pytest.mark.gpu
def test_a_rotation_takes_no_more_memory_for_more_streams(gpu: torch.device) -> None:
    extra = []
    for heads in (8, 32):
        unit = torch.randn(1, heads, 29640, 128, device=gpu).bfloat16()
        torch.cuda.reset_peak_memory_stats(gpu)
        before = torch.cuda.memory_allocated(gpu)
        (sealed,) = kernels.seal([Asked(core_methods.get("oscar"), "values", unit, "values")]).wait()
        extra.append(torch.cuda.max_memory_allocated(gpu) - before - 3 * unit.nbytes)  # what is stored is less
        assert sealed.nbytes < unit.nbytes
    assert max(extra) < 3 << 30
    assert extra[1] < 1.25 * extra[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*core_methods.names(), "sharp"])
def test_a_sealed_unit_is_read_back(gpu: torch.device, name: str) -> None:
    keys, values = (torch.randn(2, 3, 300, 64, device=gpu).bfloat16() for _ in range(2))
    scheme = make_scheme("quantwm", preset=name) if name == "sharp" else make_scheme(name)
    made = scheme.keys
    queries = torch.randn(2, 3, 200, 64, device=gpu)
    chunk = methods.seal_chunk(scheme, keys, values, QueryMoment(queries.mT @ queries / 200, 200))
    for sealed, exact in ((chunk.keys, keys), (chunk.values, values)):
        out = torch.empty_like(exact)
        methods.decode_into(sealed, out)
        want = to_torch(np.array(made.decode(numpy_of(sealed))))
        assert_close("decoded", out, want, TOLERANCES["decoded"])
        assert to_numpy(out.cpu()).shape == sealed.shape
    single = methods.seal(made, "values", values)
    assert single.nbytes == chunk.values.nbytes
