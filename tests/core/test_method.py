import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import quantwm_core
from quantwm_core import decode, methods, second_moment
from quantwm_core.chunk import SealedTensor
from quantwm_core.domain import BF16
from quantwm_core.errors import (
    DomainError,
    DtypeError,
    FormatError,
    ParameterError,
    RangeError,
    ShapeError,
    UnknownNameError,
)
from quantwm_core.method import OF_ALL, PRESETS, Scheme, decode_tensor, scheme
from tests.core import strategies
from tests.core.compare import assert_arrays, assert_bits


def _unit(seed: int = 0, heads: int = 2, tokens: int = 20, channels: int = 32) -> np.ndarray:
    return strategies.unit(("normal",) * heads, seed, tokens, channels)


def test_the_public_names_exist() -> None:
    for name in quantwm_core.__all__:
        assert hasattr(quantwm_core, name)


@pytest.mark.parametrize(
    ("keys", "values", "name"),
    [
        ("quantwm", "bf16", "quantwm+bf16"),
        ("bf16", "quantwm", "bf16+quantwm"),
        ("kivi", "rtn", "kivi+rtn"),
        ("qvg", "qvg", "qvg"),
    ],
)
def test_methods_are_chosen_per_tensor(keys: str, values: str, name: str) -> None:
    chosen = scheme(keys=keys, values=values)
    assert chosen.name == name
    sealed = chosen.seal(_unit(), _unit(1))
    assert (sealed.keys.method, sealed.values.method) == (keys, values)
    assert_arrays("keys", dict(sealed.keys.arrays), dict(methods.get(keys).seal("keys", _unit()).arrays))
    assert_arrays("values", dict(sealed.values.arrays), dict(methods.get(values).seal("values", _unit(1)).arrays))
    got = chosen.decode(sealed, 3, 11)
    assert_bits("keys", got[0], decode_tensor(sealed.keys)[:, :, 3:11])
    assert_bits("values", got[1], decode_tensor(sealed.values)[:, :, 3:11])


def test_two_bit_keys_with_sixteen_bit_values_and_the_reverse() -> None:
    keys, values = _unit(), _unit(1)
    k2v16 = scheme("quantwm", values="bf16").seal(keys, values)
    k16v2 = scheme("quantwm", keys="bf16").seal(keys, values)
    assert_bits("values", decode(k2v16)[1], values)
    assert_bits("keys", decode(k16v2)[0], keys)
    assert k2v16.values.nbytes == k16v2.keys.nbytes == keys.nbytes
    assert k2v16.keys.nbytes < keys.nbytes / 3
    assert k16v2.values.nbytes < keys.nbytes / 3


def test_a_parameter_goes_to_the_methods_that_know_it() -> None:
    chosen = scheme("quantwm", values="kivi", rank=3, residual_length=5, group_size=16)
    assert chosen.keys == methods.get("quantwm", rank=3, group_size=16)
    assert chosen.values == methods.get("kivi", residual_length=5, group_size=16)


def test_what_is_given_wins_over_the_preset() -> None:
    chosen = scheme("quantwm", preset="paper", rank=16, chunks_per_seal=3)
    settings = {name: value for name, value in PRESETS["paper"].items() if name != "chunks_per_seal"}
    assert chosen.keys == methods.get("quantwm", **{**settings, "rank": 16})
    assert chosen.chunks_per_seal == 3
    assert scheme("kivi", preset="paper").keys == methods.get("kivi", group_size=64)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", [["rtn"], None, 3, b"rtn"])
def test_a_method_is_a_name(name: Any) -> None:
    with pytest.raises(ParameterError, match="need the name of one"):
        scheme(name)


@pytest.mark.parametrize("preset", ["fast", "sharp"])
@pytest.mark.parametrize("name", ["rtn", "kivi", "qvg", "klt", "oscar", "kvtc"])
def test_no_other_method_takes_parts_of_a_preset_that_is_whole(name: str, preset: str) -> None:
    with pytest.raises(ParameterError, match=f"preset '{preset}': {name} has no .*rank"):
        scheme(name, preset=preset)
    with pytest.raises(ParameterError, match=f"preset '{preset}': {name} has no"):
        scheme("quantwm", values=name, preset=preset)
    assert scheme("quantwm", values="bf16", preset=preset).name == "quantwm+bf16"


def test_settings_of_every_scheme_are_named() -> None:
    kinds = {name: each.kind for name, each in inspect.signature(scheme).parameters.items()}
    assert [name for name in sorted(kinds) if kinds[name] is inspect.Parameter.KEYWORD_ONLY] == list(OF_ALL)


def test_names_and_settings_that_do_not_exist() -> None:
    with pytest.raises(UnknownNameError, match="unknown method 'qgv'; did you mean 'qvg'"):
        scheme("qgv")
    with pytest.raises(UnknownNameError, match="unknown method 'rtm'"):
        scheme(values="rtm")
    with pytest.raises(UnknownNameError, match="unknown preset 'papper'; did you mean 'paper'"):
        scheme(preset="papper")
    with pytest.raises(
        ParameterError, match=r"quantwm\+bf16 has no parameter 'stages'; known: candidates, .*warm_start"
    ):
        scheme("quantwm", values="bf16", stages=2)
    with pytest.raises(
        ParameterError, match=r"no parameter 'chunk_per_seal'; did you mean 'chunks_per_seal'\? known: .*rank"
    ):
        scheme(chunk_per_seal=2)
    with pytest.raises(
        ParameterError, match="bf16 has no parameter 'rank'; known: none; of every scheme: chunks_per_seal"
    ):
        scheme("bf16", rank=8)
    with pytest.raises(ParameterError, match="chunks_per_seal 0"):
        scheme(chunks_per_seal=0)
    for decay in (1.0, -0.5, float("nan")):
        with pytest.raises(ParameterError, match="decay"):
            scheme(decay=decay)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**61])
@pytest.mark.parametrize("name", methods.names())
@pytest.mark.parametrize("tensor", ["keys", "values"])
def test_what_cannot_be_sealed_is_named(bad: float, name: str, tensor: str) -> None:
    tensors = {"keys": _unit().astype(np.float32), "values": _unit(1).astype(np.float32)}
    tensors[tensor][0, 1, 7, 3] = bad
    with pytest.raises(DomainError, match=rf"^layer 3, chunk 7, {tensor}: 1 of 1280 values .*at index \(0, 1, 7, 3\)"):
        scheme(name).seal(tensors["keys"], tensors["values"], label="layer 3, chunk 7")


def test_shapes_that_do_not_fit_are_named(unchecked: None) -> None:
    unit = _unit()
    with pytest.raises(ShapeError, match=r"layer 1, keys \(1, 2, 20, 32\) and values \(1, 2, 19, 32\)"):
        scheme().seal(unit, unit[:, :, :19], label="layer 1")
    with pytest.raises(ShapeError, match=r"keys: got shape \(1, 2, 0, 32\), which holds no element"):
        scheme().seal(unit[:, :, :0], unit[:, :, :0])
    with pytest.raises(ShapeError, match="head dimension 30: need a positive multiple of 4"):
        scheme().seal(unit[..., :30], unit)


def test_ranks_and_dtypes_that_do_not_fit_are_named(unchecked: None) -> None:
    unit = _unit()
    with pytest.raises(ShapeError, match=r"values: got shape \(2, 20, 32\), need 4 dimensions"):
        scheme().seal(unit, unit[0])
    with pytest.raises(DtypeError, match="keys: got float64, need bfloat16, float16 or float32"):
        scheme().seal(unit.astype(np.float64), unit)


@pytest.mark.parametrize(("heads", "channels", "batch"), [(1, 32, 1), (4, 32, 1), (2, 64, 1), (2, 32, 2)])
def test_a_moment_of_another_cache_is_refused(heads: int, channels: int, batch: int) -> None:
    moment = strategies.moment(0, heads, channels, batch=batch)
    with pytest.raises(ShapeError, match=r"query moment .* does not fit keys \(1, 2, 20, 32\)"):
        scheme().seal(_unit(), _unit(), moment)


def test_keys_and_values_may_have_different_channels() -> None:
    keys, values = _unit(), _unit(1, channels=64)
    sealed = scheme("quantwm").seal(keys, values, second_moment(keys, 2))
    assert [tensor.shape for tensor in decode(sealed)] == [keys.shape, values.shape]


def test_a_unit_knows_where_it_stands() -> None:
    sealed = scheme("bf16").seal(_unit(), _unit(), start=100)
    assert (sealed.start, sealed.stop, sealed.tokens) == (100, 120, 20)
    assert sealed.nbytes == sealed.bf16_nbytes == 2 * 2 * 2 * 20 * 32
    with pytest.raises(RangeError, match="tokens 0 to 21 of a sealed unit of 20"):
        decode(sealed, 0, 21)


@pytest.mark.parametrize(("start", "stop"), [(0.5, 3), (0, 3.0), ("0", 3), (True, 3), (0, np.float32(3))])
def test_a_range_is_of_whole_numbers(start: Any, stop: Any, unchecked: None) -> None:
    sealed = scheme("rtn").seal(_unit(), _unit())
    with pytest.raises(RangeError, match=r"tokens .* of a sealed unit of 20: need .* in whole numbers"):
        decode(sealed, start, stop)
    first: Any = np.int64(0)
    assert decode(sealed, first, first + 3)[0].shape == (1, 2, 3, 32)


def test_what_is_no_chunk_moment_or_unit_before_is_refused(unchecked: None) -> None:
    unit: Any = _unit()
    wrong: Any
    for wrong in ("x", None, unit):
        with pytest.raises(ParameterError, match=rf"^chunk: got a {type(wrong).__name__}, need a SealedChunk"):
            decode(wrong)
    with pytest.raises(ParameterError, match=r"^moment: got a str, need a QueryMoment"):
        scheme().seal(unit, unit, "m")  # type: ignore[arg-type]  # the point of it
    with pytest.raises(ParameterError, match=r"^previous: got a SealedTensor, need a SealedChunk"):
        scheme().seal(unit, unit, None, scheme().seal(unit, unit).keys)  # type: ignore[arg-type]  # the point of it


@pytest.mark.parametrize("parameters", [{"rank": None}, {"rank": -1}, {"x": 1}])
def test_a_unit_that_cannot_have_been_sealed_as_it_says_is_damaged(parameters: dict[str, Any]) -> None:
    sealed = scheme("quantwm").seal(_unit(), _unit()).keys
    with pytest.raises(
        FormatError, match=r"cannot have been sealed as it says: quantwm .*; it is damaged, or of a later"
    ):
        decode_tensor(replace(sealed, parameters=parameters))


def test_one_wrong_setting_is_named_alone() -> None:
    with pytest.raises(ParameterError, match=r"^quantwm rank -1: need at least 0, which switches PSAC off$"):
        scheme("quantwm", rank=-1)


def test_a_unit_that_claims_another_shape_is_refused() -> None:
    sealed = methods.get("bf16").seal("keys", _unit())
    claims = SealedTensor("bf16", {}, (1, 2, 20, 64), sealed.arrays)
    with pytest.raises(FormatError, match="decodes to"):
        decode_tensor(claims)


def test_a_scheme_is_a_value() -> None:
    assert scheme("quantwm", rank=4) == scheme("quantwm", rank=4) != scheme("quantwm")
    assert Scheme(methods.get("bf16"), methods.get("bf16")).name == "bf16"
    assert decode(scheme("bf16").seal(_unit(), _unit()))[0].dtype == BF16


@pytest.mark.parametrize("per_seal", [0, -1, True])
def test_chunks_per_seal_is_a_whole_number_of_at_least_one(per_seal: int) -> None:
    with pytest.raises(ParameterError, match="chunks_per_seal"):
        scheme("quantwm", chunks_per_seal=per_seal)


@pytest.mark.parametrize("name", ["quantwm", "qvg"])
@pytest.mark.parametrize("group_size", [0, -8, 7])
def test_a_group_size_that_fits_nothing_is_refused_at_once(name: str, group_size: int) -> None:
    with pytest.raises(ParameterError, match="group size"):
        scheme(name, group_size=group_size)


def test_an_empty_name_is_no_name() -> None:
    with pytest.raises(UnknownNameError):
        scheme("quantwm", values="")
