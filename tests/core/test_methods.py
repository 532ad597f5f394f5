"""What every method promises, whatever it stores: the contract of docs/add-a-method.md."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import chunk, methods
from quantwm_core.chunk import KINDS, Kind, SealedChunk
from quantwm_core.domain import BF16
from quantwm_core.errors import FormatError, ParameterError, PluginError, RangeError, ShapeError, UnknownNameError
from quantwm_core.method import Method, Scheme, decode_tensor, scheme
from quantwm_core.statistics import QueryMoment
from tests.core import strategies
from tests.core.compare import assert_arrays, assert_bits
from tests.core.variants import PARAMETERS, Variant, every
from tests.distributions import install

VARIANTS = pytest.mark.parametrize("variant", list(every()), ids=str)
KIND = pytest.mark.parametrize("kind", KINDS)
# A few sizes with every irregularity: one token, a shared byte of zero-points, a ragged group of tokens.
SHAPES = ((1, 1, 1, 32), (1, 2, 5, 80), (2, 1, 33, 96), (1, 2, 70, 64), (1, 1, 65, 128), (1, 1, 17, 256))


def _unit(shape: tuple[int, int, int, int], seed: int = 0) -> np.ndarray:
    batch, heads, tokens, channels = shape
    return strategies.unit(("channels", "clusters")[:heads], seed, tokens, channels, batch)


def _moment(shape: tuple[int, int, int, int], seed: int = 0) -> QueryMoment:
    return strategies.moment(seed, shape[1], shape[3], batch=shape[0])


def test_every_method_of_the_package_has_variants() -> None:
    assert methods.names() == tuple(sorted(PARAMETERS))


@VARIANTS
@KIND
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [True, False])
def test_seal_and_decode(variant: Variant, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> None:
    method, unit = variant.make(), _unit(shape)
    sealed = method.seal(kind, unit, None if first else _moment(shape))
    assert isinstance(method, Method)
    assert sealed.method == method.name == variant.name
    assert sealed.shape == shape
    assert sealed.bf16_nbytes == unit.nbytes
    assert methods.get(sealed.method, **json.loads(json.dumps(dict(sealed.parameters)))) == method
    named = [name for name in method.array_names(kind) if name in sealed.arrays]
    assert sorted(named) == sorted(sealed.arrays)
    assert all(array.size or name == "coefficients" for name, array in sealed.arrays.items()), (
        "a part that is not needed"
    )
    whole = decode_tensor(sealed)
    assert whole.shape == shape
    assert whole.dtype == BF16
    # Two bits keep most of an ordinary tensor, one bit per token less of it.
    error = np.square(whole.astype(float) - unit.astype(float)).mean() / np.square(unit.astype(float)).mean()
    assert error < 0.6


@VARIANTS
@KIND
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [True, False])
def test_bytes_by_formula_are_bytes_stored(
    variant: Variant, kind: Kind, shape: tuple[int, int, int, int], first: bool
) -> None:
    method = variant.make()
    sealed = method.seal(kind, _unit(shape), None if first else _moment(shape))
    formula = method.nbytes(kind, shape, first)
    assert sealed.nbytes == sum(len(array.tobytes()) for array in sealed.arrays.values())
    if "layout" in sealed.arrays:  # some stream is sparse, which takes a byte a stream to say
        flags = shape[0] * shape[1]
        assert sealed.nbytes < formula + flags
    elif variant.sized_by_content:
        assert sealed.nbytes <= formula
    else:
        assert sealed.nbytes == formula


MISFITS = [
    *((Variant(name, {}), channels) for name in methods.names() for channels in (2, 6, 12, 80)),
    *((Variant("quantwm", {"rank": rank}), 16) for rank in (16, 17, 10**9)),
    *(
        (Variant(name, {"group_size": 12}), channels)
        for name in ("quantwm", "qvg", "rtn", "oscar")
        for channels in (16, 24)
    ),
    *((Variant("klt", {"bits": 0.5}), channels) for channels in (24, 32)),
]


@KIND
@pytest.mark.parametrize(("variant", "channels"), MISFITS, ids=str)
def test_the_formula_refuses_the_channels_that_sealing_refuses(kind: Kind, variant: Variant, channels: int) -> None:
    method, answers = variant.make(), []
    for call in (
        lambda: method.seal(kind, _unit((1, 1, 16, channels))),
        lambda: method.nbytes(kind, (1, 1, 1, channels), True),
        lambda: method.nbytes(kind, (1, 1, 1, channels), False),
    ):
        try:
            call()
        except (ParameterError, ShapeError) as error:
            answers.append(str(error))
        else:
            answers.append("")
    assert answers[0] == answers[1] == answers[2]


def test_channels_of_keys_and_of_values_are_looked_at() -> None:
    chosen = scheme("quantwm", values="klt", rank=20)
    chosen.check_channels(32, 16)
    with pytest.raises(ParameterError, match="quantwm rank 20: need at most 16, the head dimension"):
        chosen.check_channels(16, 16)
    with pytest.raises(ShapeError, match="head dimension 12: a transform code needs a multiple of 8"):
        chosen.check_channels(32, 12)


def test_bytes_by_formula_are_bytes_stored_at_the_papers_shape() -> None:
    shape = (1, 1, 4680, 128)
    chosen = scheme("quantwm", preset="paper")
    sealed = chosen.seal(_unit(shape), _unit(shape, 1), _moment(shape))
    keys, values = (getattr(chosen, kind).nbytes(kind, shape, first=False) for kind in KINDS)
    assert (sealed.keys.nbytes, sealed.values.nbytes) == (keys, values)
    assert round(sealed.bf16_nbytes / sealed.nbytes, 2) == 4.77


@VARIANTS
@KIND
@settings(max_examples=15)  # of each variant
@given(unit=strategies.units(head_dimensions=(32, 80, 128)), data=st.data())
def test_a_range_decodes_as_the_slice_of_the_whole(
    variant: Variant, kind: Kind, unit: np.ndarray, data: st.DataObject
) -> None:
    # Also: no magnitude of the domain makes a number that is not finite, or a warning.
    sealed = variant.make().seal(kind, unit, strategies.moment(0, unit.shape[1], unit.shape[3]))
    whole = decode_tensor(sealed)
    assert np.isfinite(whole.astype(np.float32)).all()
    start = data.draw(st.integers(0, unit.shape[2]))
    stop = data.draw(st.integers(start, unit.shape[2]))
    assert_bits("range", decode_tensor(sealed, start, stop), whole[:, :, start:stop])
    assert_bits("own", variant.make().decode(sealed, start, stop), whole[:, :, start:stop])


@VARIANTS
@KIND
def test_a_range_outside_the_unit_is_refused(variant: Variant, kind: Kind) -> None:
    method = variant.make()
    sealed = method.seal(kind, _unit((1, 1, 9, 32)))
    for start, stop in ((0, 10), (-1, 3), (5, 4), (10, 10)):
        with pytest.raises(RangeError, match=f"tokens {start} to {stop} of a sealed unit of 9"):
            decode_tensor(sealed, start, stop)
        with pytest.raises(RangeError):
            method.decode(sealed, start, stop)


@VARIANTS
@KIND
def test_the_same_input_gives_the_same_bytes_and_is_left_alone(variant: Variant, kind: Kind) -> None:
    method, unit, moment = variant.make(), _unit((1, 2, 70, 64)), _moment((1, 2, 70, 64))
    before, mean = unit.copy(), moment.mean.copy()
    sealed = method.seal(kind, unit, moment)
    assert_arrays("again", dict(variant.make().seal(kind, unit, moment).arrays), dict(sealed.arrays))
    assert_bits("input", unit, before)
    assert_bits("moment", moment.mean, mean)


@VARIANTS
@KIND
def test_a_sealed_tensor_shares_no_memory_with_what_came_or_went(variant: Variant, kind: Kind) -> None:
    method, unit = variant.make(), _unit((1, 2, 70, 64))
    sealed = method.seal(kind, unit, _moment(unit.shape))
    whole = decode_tensor(sealed)
    assert not any(np.shares_memory(array, other) for array in sealed.arrays.values() for other in (unit, whole))
    with np.errstate(all="ignore"):
        unit.view(np.uint16)[:] = 0xA5A5
        decode_tensor(sealed).view(np.uint16)[:] = 0xA5A5
    assert_bits("decoded", decode_tensor(sealed), whole)


@VARIANTS
@KIND
def test_memory_order_does_not_matter(variant: Variant, kind: Kind) -> None:
    unit, moment = _unit((1, 2, 33, 64)), _moment((1, 2, 33, 64))
    want = dict(variant.make().seal(kind, unit, moment).arrays)
    by_token = np.swapaxes(np.ascontiguousarray(np.swapaxes(unit, 1, 2)), 1, 2)
    reversed_twice = np.ascontiguousarray(unit[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]
    for view in (by_token, reversed_twice, np.asfortranarray(unit)):
        assert not view.flags.c_contiguous
        assert_arrays("strides", dict(variant.make().seal(kind, view, moment).arrays), want)


@VARIANTS
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_precisions_are_rounded_to_bf16_first(variant: Variant, dtype: type) -> None:
    keys, values = np.random.default_rng(0).standard_normal((2, 1, 2, 20, 32)).astype(dtype)
    chosen = Scheme(variant.make(), variant.make())
    got, want = chosen.seal(keys, values), chosen.seal(keys.astype(BF16), values.astype(BF16))
    for kind in KINDS:
        assert_arrays(kind, dict(getattr(got, kind).arrays), dict(getattr(want, kind).arrays))


@VARIANTS
def test_saving_and_loading_is_the_identity(variant: Variant, tmp_path: Path) -> None:
    shape = (2, 2, 65, 32)
    chosen = Scheme(variant.make(), variant.make())
    first = chosen.seal(_unit(shape), _unit(shape, 1))
    second = chosen.seal(_unit(shape, 2), _unit(shape, 3), _moment(shape), first, start=65)
    path = tmp_path / "cache.qwm.safetensors"
    chunk.save(path, {3: [first, second]})
    layers, metadata = chunk.load(path)
    assert metadata == {}
    assert list(layers) == [3]
    for got, want in zip(layers[3], (first, second), strict=True):
        assert (got.start, got.version, got.nbytes) == (want.start, want.version, want.nbytes)
        for kind in KINDS:
            loaded, sealed = getattr(got, kind), getattr(want, kind)
            assert (loaded.method, loaded.shape) == (sealed.method, sealed.shape)
            assert dict(loaded.parameters) == dict(sealed.parameters)
            assert_arrays(kind, dict(loaded.arrays), dict(sealed.arrays))
            assert_bits(kind, decode_tensor(loaded, 7, 40), decode_tensor(sealed, 7, 40))


@VARIANTS
@KIND
def test_permuted_heads_permute_streams(variant: Variant, kind: Kind) -> None:
    unit = strategies.unit(("normal", "clusters", "channels"), 0, 64, 32, batch=2)
    mean = strategies.moment(0, 3, 32, batch=2).mean
    if not variant.alone:
        return
    order = [2, 0, 1]
    whole = decode_tensor(variant.make().seal(kind, unit, QueryMoment(mean, 48)))
    permuted = variant.make().seal(kind, unit[:, order], QueryMoment(mean[:, order], 48))
    assert_bits("heads", decode_tensor(permuted), whole[:, order])
    for batch, head in np.ndindex(2, 3):
        one = np.s_[batch : batch + 1, head : head + 1]
        alone = variant.make().seal(kind, unit[one], QueryMoment(mean[one], 48))
        assert_bits(f"stream {batch}, {head}", decode_tensor(alone), whole[one])


@VARIANTS
@KIND
@pytest.mark.parametrize("power", [-40, 1, 40])
def test_powers_of_two_scale_through(variant: Variant, kind: Kind, power: int) -> None:
    unit = strategies.unit(strategies.MODERATE, 0, 40, 64)
    moment = strategies.moment(0, len(strategies.MODERATE), 64)
    scaled = np.ldexp(unit.astype(np.float32), power).astype(BF16)
    got = decode_tensor(variant.make().seal(kind, scaled, moment))
    want = np.ldexp(decode_tensor(variant.make().seal(kind, unit, moment)).astype(np.float32), power).astype(BF16)
    if variant.scales:
        assert_bits("scaled", got + 0 * got, want + 0 * want)  # a zero may lose its sign
    else:
        assert np.isfinite(got.astype(np.float32)).all()


@pytest.mark.parametrize("variant", [each for each in every() if not each.absolute], ids=str)
@KIND
@pytest.mark.parametrize("power", [-30, 30])
def test_the_strength_of_queries_changes_no_byte(variant: Variant, kind: Kind, power: int) -> None:
    unit, moment = _unit((1, 2, 40, 32)), _moment((1, 2, 40, 32))
    louder = QueryMoment(np.ldexp(moment.mean, power), moment.count)
    got, want = (variant.make().seal(kind, unit, each) for each in (louder, moment))
    assert_bits("decoded", decode_tensor(got), decode_tensor(want))


@VARIANTS
@KIND
def test_a_method_says_whether_queries_matter(variant: Variant, kind: Kind) -> None:
    shape = (1, 2, 70, 64)
    arrays = [dict(variant.make().seal(kind, _unit(shape), moment).arrays) for moment in (None, _moment(shape))]
    same = sorted(arrays[0]) == sorted(arrays[1]) and all(
        array.tobytes() == arrays[1][name].tobytes() for name, array in arrays[0].items()
    )
    assert variant.make().uses_queries(kind) != same
    assert Scheme(variant.make(), methods.get("bf16")).uses_queries == variant.make().uses_queries("keys")


@VARIANTS
@KIND
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 2.0**60, -(2.0**60), 2.0**-60])
def test_a_constant_unit(variant: Variant, kind: Kind, value: float) -> None:
    unit = np.full((1, 2, 40, 32), value, np.float32).astype(BF16)
    got = decode_tensor(variant.make().seal(kind, unit, _moment((1, 2, 40, 32)))).astype(float)
    np.testing.assert_allclose(got, value, rtol=variant.constants)


@VARIANTS
@KIND
def test_queries_that_are_zero_count_as_none(variant: Variant, kind: Kind) -> None:
    unit = _unit((1, 2, 40, 32))
    silent = QueryMoment(np.zeros((1, 2, 32, 32), np.float32), 5)
    got, want = (variant.make().seal(kind, unit, each) for each in (silent, None))
    assert_bits("decoded", decode_tensor(got), decode_tensor(want))


@VARIANTS
@KIND
def test_a_unit_that_lacks_an_array_is_refused(variant: Variant, kind: Kind) -> None:
    sealed = variant.make().seal(kind, _unit((1, 2, 70, 64)), _moment((1, 2, 70, 64)))
    for name in sealed.arrays:
        if name == "sparse_values":  # absent where every coefficient is zero; then the bitmap names none
            continue
        arrays = {other: array for other, array in sealed.arrays.items() if other != name}
        damaged = chunk.SealedTensor(sealed.method, sealed.parameters, sealed.shape, arrays)
        with pytest.raises(FormatError, match=variant.name):
            decode_tensor(damaged)


@VARIANTS
@KIND
def test_a_unit_with_an_array_of_another_length_is_refused(variant: Variant, kind: Kind) -> None:
    sealed = variant.make().seal(kind, _unit((1, 2, 70, 64)), _moment((1, 2, 70, 64)))
    for name in ("codes", "index", "exact", "coefficients", "sparse_values", "bitmap"):
        if name in sealed.arrays:
            cut = {**sealed.arrays, name: sealed.arrays[name][..., :-1]}
            with pytest.raises(FormatError, match=variant.name):
                decode_tensor(chunk.SealedTensor(sealed.method, sealed.parameters, sealed.shape, cut))


@VARIANTS
def test_the_unit_before_changes_nothing_but_a_warm_start_and_what_is_shared(variant: Variant) -> None:
    shape = (1, 2, 40, 32)
    unit, other = _unit(shape), _unit(shape, 9)
    previous = variant.make().seal("keys", other)
    for before in (
        previous,
        variant.make().seal("keys", _unit((1, 2, 17, 32))),
        methods.get("bf16").seal("keys", other),
    ):
        got = variant.make().seal("keys", unit, None, before)
        warm = Scheme(methods.get("bf16"), variant.make()).warm_starts and before is previous
        if not warm and not (variant.shares and before.method == variant.name):
            assert_arrays("bytes", dict(got.arrays), dict(variant.make().seal("keys", unit).arrays))


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("quantwm", {"rang": 4}, "quantwm has no parameter 'rang'; known: .*rank"),
        ("bf16", {"rank": 4}, "bf16 has no parameter 'rank'; known: none"),
        ("quantwm", {"rank": 1.5}, "quantwm rank 1.5: need int"),
        ("quantwm", {"rank": True}, "quantwm rank True: need int"),
        ("quantwm", {"centroids": "16"}, "quantwm centroids '16': need int or None"),
        ("quantwm", {"metric": None}, "quantwm metric None: need str"),
        ("quantwm", {"threshold": "1"}, "quantwm threshold '1': need float"),
        ("quantwm", {"rank": -1}, "rank -1"),
        ("quantwm", {"candidates": 0}, "candidates 0"),
        ("quantwm", {"iterations": -1}, "-1 iterations"),
        ("quantwm", {"relaxation": 2.0}, "relaxation 2.0: need 1"),
        ("quantwm", {"threshold": -0.1}, "threshold -0.1"),
        ("quantwm", {"threshold": float("nan")}, "threshold nan"),
        ("quantwm", {"threshold": float("inf")}, "threshold inf"),
        ("quantwm", {"metric": "diag"}, "metric 'diag': known: diagonal, full, uniform"),
        ("quantwm", {"rounding": "up"}, "rounding 'up': known: nearest, feedback"),
        ("quantwm", {"scale_candidates": 5}, r"scale candidates 5: need 1 \(the full range\) to 4"),
        ("quantwm", {"coefficient_bits": 4, "threshold": 0.1}, "4 bits with threshold 0.1"),
        ("quantwm", {"coefficient_bits": 3}, "coefficients of 3 bits"),
        ("quantwm", {"centroid_bits": 5}, "centroids of 5 bits: need 4, 8 or 16"),
        ("quantwm", {"centroids": 0}, "0 centroids: need 1 to 256"),
        ("quantwm", {"centroids": 257}, "257 centroids"),
        ("qvg", {"centroids": 0}, "0 centroids"),
        ("qvg", {"quantizer": "int2"}, "quantizer 'int2': known: symmetric, affine"),
        ("qvg", {"stages": 0}, "stages 0"),
        ("rtn", {"granularity": "head"}, "granularity 'head': known: group, token, channel"),
        ("rtn", {"group_size": 2}, "group size 2"),
        ("rtn", {"group_size": 8, "granularity": "token"}, "none with granularity 'token'"),
        ("kivi", {"group_size": 0}, "group size 0"),
        ("kivi", {"residual_length": -1}, "residual length -1"),
        ("klt", {"bits": 0.25}, "klt bits 0.25: need 0.5 to 8"),
        ("klt", {"bits": float("nan")}, "klt bits nan"),
        ("klt", {"value_bits": 9.0}, "klt bits 9.0"),
        ("klt", {"tolerance": 1.0}, "klt tolerance 1.0"),
        ("klt", {"level": -1.0}, r"level -1.0, tolerance 0.0: need one of them"),
        ("klt", {"level": float("nan")}, "level nan"),
        ("klt", {"level": 0.1, "tolerance": 0.1}, "level 0.1, tolerance 0.1: need one of them"),
        ("klt", {"damp": 0.0}, "damp 0.0"),
        ("klt", {"damp": 1e300}, r"damp 1e\+300: need 0 to 1 and more than 0 up to 1e\+09"),
        ("klt", {"lifetime": -1.0}, "lifetime -1.0"),
        ("klt", {"allocation": "token"}, "allocation 'token': known: head, layer"),
        ("kvtc", {"bits": 8.5}, "kvtc bits 8.5"),
        ("kvtc", {"lifetime": float("inf")}, "kvtc lifetime inf"),
        ("oscar", {"group_size": 0}, "oscar group size 0"),
    ],
)
def test_an_impossible_parameter_is_refused(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        methods.get(name, **parameters)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (name, field, value)
        for name in methods.names()
        for field in methods.parameter_names(name)
        for value in (-1, -1.0, float("nan"), float("inf"))
    ],
)
def test_no_method_takes_a_number_that_none_can_use(name: str, field: str, value: float, unchecked: None) -> None:
    with pytest.raises(ParameterError):
        methods.get(name, **{field: value})


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("quantwm", {"rank": 65}, "rank 65: need at most 64"),
        ("quantwm", {"group_size": 24}, "group size 24 does not fit head dimension 64"),
        ("quantwm", {"group_size": 0}, "group size 0"),
        ("qvg", {"group_size": 128}, "group size 128"),
        ("rtn", {"group_size": 24}, "group size 24"),
    ],
)
def test_a_parameter_that_does_not_fit_the_tensor_is_refused(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        methods.get(name, **parameters).seal("keys", _unit((1, 1, 20, 64)))


@pytest.mark.parametrize("channels", [1, 7, 12])
@pytest.mark.parametrize("name", ["klt", "kvtc", "oscar"])
def test_a_transform_code_of_no_whole_blocks_says_what_it_needs(name: str, channels: int) -> None:
    who = "oscar" if name == "oscar" else "a transform code"
    with pytest.raises(ShapeError, match=f"head dimension {channels}: {who} needs a multiple of 8"):
        methods.get(name).seal("keys", _unit((1, 1, 20, channels)))


def test_a_name_that_nobody_bears() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown method 'quantvm'; did you mean 'quantwm'.* known: bf16, kivi"):
        methods.get("quantvm")


def test_settings_are_no_part_of_the_name() -> None:
    message = "name 'quantwm' and give its settings apart, iterations=5, relaxation=1.5"
    with pytest.raises(UnknownNameError, match=message):
        methods.get("quantwm:iterations=5:relaxation=1.5")
    with pytest.raises(UnknownNameError, match="known: bf16"):
        methods.get("absent:iterations=5")


HALF = """
from dataclasses import asdict, dataclass
import numpy as np
from quantwm_core.chunk import SealedTensor

@dataclass(frozen=True)
class Half:
    keep: float = 0.5
    name = "half"
    recent_tokens = 0

    def uses_queries(self, kind):
        return False

    def array_names(self, kind):
        return ("kept",)

    def seal(self, kind, values, moment=None, previous=None):
        count = int(values.shape[3] * self.keep)
        return SealedTensor(self.name, asdict(self), values.shape, {"kept": values[..., :count].copy()})

    def decode(self, sealed, start=0, stop=None):
        first, last = sealed.token_range(start, stop)
        kept = sealed.arrays["kept"][:, :, first:last]
        whole = np.zeros((*kept.shape[:3], sealed.shape[3]), kept.dtype)
        whole[..., : kept.shape[3]] = kept
        return whole

    def nbytes(self, kind, shape, first):
        return 2 * shape[0] * shape[1] * shape[2] * int(shape[3] * self.keep)
"""


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution with a method of its own, on the path; what is known by name is forgotten before and after."""
    (tmp_path / "half_method.py").write_text(HALF)
    install(tmp_path, "half-method", "quantwm.methods", {"half": "half_method:Half"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "half_method", raising=False)
    methods.implementation.cache_clear()
    yield tmp_path
    methods.implementation.cache_clear()


def test_a_registered_method_is_known_by_its_name(half: Path) -> None:
    assert methods.names() == ("bf16", "half", "kivi", "klt", "kvtc", "oscar", "quantwm", "qvg", "rtn")
    assert methods.parameter_names("half") == ("keep",)
    unit = _unit((1, 2, 20, 32))
    sealed = scheme("half", values="quantwm", keep=0.25).seal(unit, unit)
    assert sealed.keys.arrays["kept"].shape == (1, 2, 20, 8)
    assert sealed.keys.nbytes == methods.get("half", keep=0.25).nbytes("keys", unit.shape, first=True)
    assert_bits("kept", decode_tensor(sealed.keys, 3, 9)[..., :8], unit[:, :, 3:9, :8])
    with pytest.raises(ParameterError, match="half keep 'x': need float"):
        methods.get("half", keep="x")


def test_a_registered_method_cannot_replace_one_of_the_package(half: Path) -> None:
    install(half, "impostor", "quantwm.methods", {"bf16": "half_method:Half"})
    assert cast("Any", methods.get("bf16")).name == "bf16"


def test_a_name_that_two_distributions_register_is_refused(half: Path) -> None:
    install(half, "second-method", "quantwm.methods", {"half": "other_method:Half"})
    told = r"half_method:Half \(registered by half-method\), other_method:Half \(registered by second-method\)"
    with pytest.raises(PluginError, match=f"'half' stands for several entry points of quantwm.methods: {told}"):
        methods.get("half")


def test_a_chunk_of_a_method_that_is_not_installed_names_it() -> None:
    unit = _unit((1, 1, 4, 32))
    sealed = methods.get("bf16").seal("keys", unit)
    foreign = chunk.SealedTensor("absent", {}, sealed.shape, sealed.arrays)
    with pytest.raises(UnknownNameError, match="unknown method 'absent'"):
        decode_tensor(foreign)
    assert SealedChunk(foreign, foreign).nbytes == 2 * unit.nbytes


def test_methods_are_values() -> None:
    for variant in every():
        assert variant.make() == variant.make()
        assert hash(variant.make()) == hash(variant.make())
        assert set(asdict(cast("Any", variant.make()))) == set(methods.parameter_names(variant.name))


@VARIANTS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 63, 65, 10**13])  # of 64; the last is more than any memory
def test_a_unit_that_claims_other_tokens_than_it_holds_is_refused(variant: Variant, kind: Kind, tokens: int) -> None:
    shape = (1, 2, 64, 32)
    sealed = variant.make().seal(kind, _unit(shape), _moment(shape))
    claimed = replace(sealed, shape=(1, 2, tokens, 32))
    for stop in (1, None):
        with pytest.raises(FormatError, match="do not fit together"):
            decode_tensor(claimed, 0, stop)
