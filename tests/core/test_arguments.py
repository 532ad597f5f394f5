"""Every public function of the package answers bad arguments by its own errors."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import numpy as np
import pytest

import quantwm_core
from quantwm_core import affine, attention, basis, codebook, methods, psac, statistics, symmetric
from quantwm_core.archive import Dump
from quantwm_core.arguments import explain_errors
from quantwm_core.errors import DomainError, DtypeError, ParameterError, QuantWMError, ShapeError
from quantwm_core.method import scheme
from quantwm_core.rotary import Turning

pytestmark = pytest.mark.usefixtures("unchecked")

STREAMS, TOKENS, CHANNELS, ROWS, RANK, GROUP = (1, 2), 16, 8, 4, 2, 4
GENERATOR = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return GENERATOR.normal(size=shape).astype(np.float32)


VALUES = normal(*STREAMS, TOKENS, CHANNELS)
UNIT = VALUES.astype("bfloat16")
TABLE = normal(*STREAMS, ROWS, CHANNELS).astype("bfloat16")
INDEX = np.zeros((*STREAMS, TOKENS), np.uint8)
MOMENT = statistics.second_moment(UNIT, 2)
WEIGHTS = statistics.sensitivity(MOMENT.mean)
BASIS, ENERGIES = statistics.principal_basis(MOMENT.mean, RANK)
AFFINE, COEFFICIENTS = affine.encode(VALUES, GROUP), psac.encode(VALUES, BASIS, ENERGIES)
CODES = np.ones((TOKENS, CHANNELS), np.uint8)
SEALED, TRANSFORM = scheme("quantwm").seal(UNIT, UNIT), methods.get("klt").seal("keys", UNIT)
SCORES, STEPS = attention.logits(VALUES, VALUES), np.abs(VALUES)
SQUARE, STILL, TURNING = np.eye(CHANNELS), statistics.second_moment(UNIT, 2), Turning(4, (0.5,) * (CHANNELS // 2))
STORED = basis.store([SQUARE, SQUARE], STREAMS)
PACKED, NIBBLES, COUNTS = np.ones((TOKENS, 2), np.uint8), np.ones((TOKENS, 4), np.uint8), (0, 0, 1)
WIDE = np.array([2] * CHANNELS)
ARRAYS = SEALED.keys.arrays

CALLS: dict[str, tuple[Any, ...]] = {
    "affine.default_group_size": (CHANNELS,),
    "affine.check_group_multiple": (GROUP,),
    "affine.check_group_size": (CHANNELS, GROUP),
    "affine.group_range": (VALUES, GROUP),
    "affine.check_scale_candidates": (1,),
    "affine.encode_groups": (VALUES[..., None, :], 2),
    "affine.decode_groups": (
        CODES[None, None],
        STEPS[..., 0].astype("float8_e4m3fn")[:1, :1],
        CODES[None, None, :, 0],
        np.ones(1, np.float32),
    ),
    "affine.encode": (VALUES, GROUP, 2),
    "affine.decode": (AFFINE, 0, TOKENS),
    "affine.unpack_rows": (PACKED[:1], 2, 1, 3),
    "allocation.check_channels": (CHANNELS,),
    "allocation.budget": (4.0, CHANNELS),
    "allocation.token_bytes": (COUNTS,),
    "allocation.directions": (COUNTS,),
    "allocation.widths": (COUNTS,),
    "allocation.water_fill": ([np.array([4.0, 1.0])], 6, 0.0, 0.0),
    "allocation.dynamic": (np.array([4.0, 1.0]), 6),
    "allocation.distortion": (np.array([4.0]), np.array([0, 0, 1], np.uint8)),
    "archive.collect": ({"keys": VALUES, "values": VALUES},),
    "archive.compress": (Dump(VALUES, VALUES), scheme("rtn"), TOKENS),
    "archive.restore": ([SEALED],),
    "archive.rows": ({0: [SEALED]},),
    "attention.logits": (VALUES, VALUES),
    "attention.softmax": (SCORES,),
    "attention.log_sum_exp": (SCORES,),
    "attention.attend": (VALUES, VALUES, VALUES),
    "attention.averaged": (SCORES, VALUES),
    "attention.logit_error": (SCORES, SCORES),
    "attention.check_alike": (SCORES.shape, SCORES.shape),
    "attention.selection_shift": (SCORES, SCORES, 2),
    "attention.attention_kl": (SCORES, SCORES),
    "basis.store": ([SQUARE, SQUARE], STREAMS),
    "basis.wide": STORED.streams()[0],
    "basis.normalised": (SQUARE,),
    "basis.fit": (SQUARE, SQUARE),
    "basis.projector": (SQUARE, SQUARE),
    "blocks.pack": (CODES, COUNTS),
    "blocks.unpack": (PACKED, COUNTS),
    "chunk.stored_nbytes": ([SEALED],),
    "clustered.gather": (TABLE, INDEX),
    "clustered.affine_arrays": (AFFINE,),
    "clustered.affine_code": (ARRAYS,),
    "clustered.table": (ARRAYS,),
    "clustered.encode": (VALUES, TABLE, INDEX, GROUP, 1, np.zeros((*STREAMS, CHANNELS, CHANNELS), np.float32)),
    "clustered.decode": (ARRAYS, 0, TOKENS),
    "codebook.default_size": (TOKENS, 16),
    "codebook.check_size": (ROWS,),
    "codebook.check_rounds": (2, 1.5),
    "codebook.initial_tokens": (TOKENS, ROWS),
    "codebook.fit": (VALUES, ROWS, WEIGHTS, 2, TABLE, 1.5),
    "codebook.nearest": (VALUES, TABLE, WEIGHTS, 2),
    "cost.clustered_nbytes": (TOKENS, CHANNELS, GROUP, ROWS),
    "cost.psac_nbytes": (TOKENS, CHANNELS, RANK),
    "cost.quantwm_nbytes": (TOKENS, CHANNELS, GROUP, ROWS, RANK),
    "cost.transform_nbytes": (TOKENS, CHANNELS, COUNTS, CHANNELS),
    "cost.transform_most_nbytes": (TOKENS, CHANNELS, 2),
    "cost.bits_per_element": (TOKENS, TOKENS, CHANNELS),
    "cost.rank_increment": (TOKENS, CHANNELS, 1, RANK),
    "directions.levels": (CODES, WIDE),
    "directions.quantize": (VALUES[0, 0], WIDE, np.ones(CHANNELS, "bfloat16")),
    "directions.search_steps": (VALUES[0, 0], WIDE),
    "domain.to_bf16": (VALUES, "keys", 4),
    "domain.check_kind": (VALUES, "keys", 4),
    "domain.check_domain": (VALUES, "keys"),
    "domain.check_finite": (VALUES, "keys"),
    "domain.binary_exponent": (VALUES, TABLE),
    "domain.round_up": (STEPS, 3),
    "integer_table.check_bits": (8,),
    "integer_table.largest_code": (8,),
    "integer_table.table_size": (ROWS, CHANNELS, 4),
    "integer_table.encode": (TABLE, 4),
    "integer_table.decode": (np.ones((1, ROWS, CHANNELS), np.int8), np.ones((1, CHANNELS), "bfloat16")),
    "method.decode": (SEALED, 0, TOKENS),
    "method.decode_tensor": (SEALED.keys, 0, TOKENS),
    "method.scheme": ("quantwm",),
    "minmax.encode_groups": (VALUES, GROUP),
    "minmax.decode_groups": (CODES, np.ones((TOKENS, 2), "bfloat16"), np.ones((TOKENS, 2), "bfloat16"), GROUP),
    "packing.packed_size": (TOKENS,),
    "packing.pack": (CODES,),
    "packing.unpack": (PACKED, CHANNELS),
    "packing.nibble_size": (TOKENS,),
    "packing.pack_nibbles": (CODES.astype(np.int8),),
    "packing.unpack_nibbles": (NIBBLES, CHANNELS),
    "psac.check_bits": (8, 0.0),
    "psac.dense_size": (TOKENS, RANK, 8),
    "psac.sparse_size": (TOKENS, RANK, 3),
    "psac.project": (VALUES, BASIS),
    "psac.encode": (VALUES, BASIS, ENERGIES, 0.1),
    "psac.decode": (COEFFICIENTS, TOKENS, 0, TOKENS),
    "psac.correction": (COEFFICIENTS, BASIS, TOKENS, 0, TOKENS),
    "psac.no_sparse_parts": (TOKENS, RANK),
    "qsac.choose": (VALUES, TABLE, GROUP, WEIGHTS, WEIGHTS, 2),
    "rotary.still_moment": (VALUES, 2, 0, TURNING),
    "rotary.coming_moment": (STILL, TOKENS, 2, TURNING),
    "rotary.turned_moment": (STILL.mean, TURNING.angles(0, 2)),
    "rotated_queries.logits": (VALUES, TRANSFORM.arrays, TRANSFORM.shape, 0, TOKENS),
    "rounding.feedback": (MOMENT.mean, BASIS),
    "rounding.refine": (VALUES, AFFINE, MOMENT.mean),
    "scales.encode": (STEPS,),
    "scales.super_scale_of": (STEPS,),
    "scales.store": (STEPS, STEPS.max((-2, -1)) / 448),
    "scales.decode": (STEPS.astype("float8_e4m3fn"), np.ones(STREAMS, np.float32)),
    "statistics.second_moment": (VALUES, 2),
    "statistics.merge": (MOMENT, MOMENT),
    "statistics.check_decay": (0.5,),
    "statistics.check_moment": (MOMENT.mean,),
    "statistics.sensitivity": (MOMENT.mean,),
    "statistics.normalised": (MOMENT.mean,),
    "statistics.principal_basis": (MOMENT.mean, RANK),
    "symmetric.encode": (VALUES, GROUP),
    "symmetric.decode": (symmetric.encode(VALUES, GROUP), 0, TOKENS),
    "transform.decode": (TRANSFORM.arrays, TRANSFORM.shape, 0, TOKENS),
    "transform.matrices": (TRANSFORM.arrays,),
    "transform.product": (np.ones((64, 2), np.float32), np.ones((2, CHANNELS), "bfloat16")),
    "transform.tiles_of": (0, TOKENS),
    "transform_plan.sources": (UNIT, np.zeros((*STREAMS, CHANNELS, CHANNELS)), 0.1),
}

ELSEWHERE = {
    "arguments.explain_errors": "is told of below",
    **dict.fromkeys(
        (
            "errors.lookup",
            "errors.meant",
            "plugin.load",
            "methods.names",
            "methods.parameter_names",
            "methods.distributions",
        ),
        "takes names, which are looked up",
    ),
    **dict.fromkeys(("methods.get", "methods.settings"), "test_methods.py: a method checks its own settings"),
    **{f"chunk.{name}": "test_chunk.py: files" for name in ("save", "load", "write_arrays", "read_arrays")},
    **{f"tensor_file.{name}": "test_tensor_file.py: files" for name in ("make_header", "read_header", "replaced")},
    **{
        f"stream.{name}": "asked of each read: spans of a stream's own"
        for name in ("overlap", "cut", "join", "is_whole")
    },
    **{f"transform.{name}": "takes what the plan makes" for name in ("seal", "kept_basis", "encode", "stored")},
    **{f"transform_plan.{name}": "takes what sources() makes" for name in ("fit", "plans", "in_basis")},
}
"""Public functions that are not called here, and why."""

NOT_LOOKED_AT = {
    "directions.quantize": "search_steps(), by which the steps are found, refuses",
    "domain.check_kind": "says nothing of values",
    "scales.store": "super_scale_of(), by which the super-scale is found, refuses",
}
"""Functions that take NaN and infinity and give ordinary numbers, and why."""


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in pkgutil.iter_modules(quantwm_core.__path__):
        if module.name != "__main__":
            namespace = vars(importlib.import_module(f"quantwm_core.{module.name}"))
            for name, member in namespace.items():
                own = inspect.isfunction(member) and member.__module__ == namespace["__name__"]
                if own and not name.startswith("_"):
                    yield f"{module.name}.{name}", member


FUNCTIONS = dict(public())


def result(name: str, args: tuple[Any, ...]) -> Any:
    """What a function gives, all of it."""
    with np.errstate(all="ignore"):
        given = FUNCTIONS[name](*args)
        return list(given) if inspect.isgenerator(given) else given


def refusal(name: str, args: tuple[Any, ...]) -> QuantWMError | None:
    """The package's error for a call, if it is refused; any other is raised."""
    try:
        result(name, args)
    except QuantWMError as error:
        return error
    return None


def changed(name: str, make: Callable[[Any], list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Arguments of a call, one of which is made another."""
    for place, argument in enumerate(CALLS[name]):
        for other in make(argument):
            yield (*CALLS[name][:place], other, *CALLS[name][place + 1 :])


def test_every_public_function_is_called_here_or_elsewhere() -> None:
    assert CALLS.keys() | ELSEWHERE.keys() == FUNCTIONS.keys()
    assert not CALLS.keys() & ELSEWHERE.keys()


def misshapen(argument: Any) -> list[Any]:
    """What is no such argument at all, and arrays of other ranks, of nothing, and of no numbers."""
    others = [None, "x", [], [[1.0]], {}, object()]
    if isinstance(argument, np.ndarray):
        others += [argument.ravel()[0], argument.ravel(), argument[None], argument[..., :0], argument[:0]]
        others += [np.asarray(argument.ravel()[0]), np.array([None])]
    return others


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_such_argument_is_refused_by_an_error_of_the_package(name: str) -> None:
    result(name, CALLS[name])
    for args in changed(name, misshapen):
        refused = refusal(name, args)
        if hasattr(refused, "_explains"):
            assert str(refused).partition(":")[0] in inspect.signature(FUNCTIONS[name]).parameters


@pytest.mark.parametrize(
    "name",
    [name for name, each in FUNCTIONS.items() if hasattr(importlib.import_module(each.__module__), "explain_errors")],
)
def test_annotations_can_be_asked(name: str) -> None:
    get_type_hints(inspect.unwrap(FUNCTIONS[name]))


@pytest.mark.parametrize("name", [name for name, args in CALLS.items() if any(isinstance(a, np.ndarray) for a in args)])
def test_no_array_is_taken_for_one(name: str) -> None:
    for args in changed(name, lambda argument: ["x", object()] if isinstance(argument, np.ndarray) else []):
        with pytest.raises((DtypeError, ShapeError), match=r": (got|need)"):
            result(name, args)


def finite(value: Any) -> bool:
    """Whether all numbers of a result are."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iub" or bool(np.isfinite(value.astype(np.float64)).all())
    if isinstance(value, list | tuple):
        return all(map(finite, value))
    return all(map(finite, vars(value).values())) if hasattr(value, "__dict__") else bool(np.isfinite(value))


def spoilt(argument: Any) -> list[Any]:
    """The same array with a NaN and with an infinite number, if it holds any that may be."""
    if not isinstance(argument, np.ndarray) or argument.dtype.kind in "iub":
        return []
    made = []
    for number in (np.nan, np.inf):
        other = argument.copy()
        other.reshape(-1)[0] = number
        made.append(other)
    return made


@pytest.mark.parametrize("name", [name for name in CALLS if any(changed(name, spoilt)) and name not in NOT_LOOKED_AT])
def test_nan_and_infinity_are_refused_or_show(name: str) -> None:
    for args in changed(name, spoilt):
        try:
            given = result(name, args)
        except DomainError:
            continue
        assert not finite(given)


def test_k_means_is_told_what_is_wrong_with_its_numbers() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        values = VALUES.copy()
        values[0, 1, 2, 3] = bad
        with pytest.raises(
            DomainError, match=rf"values: 1 of 256 values are NaN or infinite, first {bad} at index \(0, 1, 2, 3\)"
        ):
            codebook.fit(values, ROWS)
    with pytest.raises(DomainError, match="metric: 16 of 16 values are NaN or infinite"):
        codebook.fit(VALUES, ROWS, np.full_like(WEIGHTS, np.nan))
    with pytest.raises(ShapeError, match=r"metric \(2, 8\) of values \(1, 2, 16, 8\): need \(1, 2, 8\)"):
        codebook.nearest(VALUES, TABLE, WEIGHTS[0])


def test_the_argument_at_fault_is_named() -> None:
    with pytest.raises(DtypeError, match=r"values: got None, need an array, Float32 \[\*streams, tokens, channels\]"):
        affine.encode(None, GROUP)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ParameterError, match="centroids: got 'x', need int or None"):
        codebook.check_size("x")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ShapeError, match=r"basis: got shape \(1, 4, 3\), need BFloat16 \[\*streams, channels, rank\]"):
        psac.project(np.ones((1, 2, 8), np.float32), np.ones((1, 4, 3), "bfloat16"))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'group_size'"):
        affine.encode(VALUES)  # type: ignore[call-arg]  # on purpose


def test_what_is_raised_while_values_are_given_is_explained_too() -> None:
    def halves(counts: list[int]) -> Iterator[int]:
        for count in counts:
            yield count // 2

    module: dict[str, Any] = {"__name__": halves.__module__, "halves": halves}
    explain_errors(module)
    assert list(module["halves"]([2, 4])) == [1, 2]
    with pytest.raises(ParameterError, match=r"counts: got \['x'\], need list\[int\] \(TypeError: unsupported operand"):
        list(module["halves"](["x"]))


def test_the_outermost_argument_at_fault_is_named_and_the_first_error_kept() -> None:
    with pytest.raises(DtypeError, match=r"^covariance: got None, need an array, .* \(\w+Error: ") as caught:
        basis.fit(None, SQUARE)  # type: ignore[arg-type]  # on purpose
    assert not isinstance(caught.value.__cause__, QuantWMError)


def test_what_may_be_left_out_is_not_at_fault_for_being_empty() -> None:
    def divided(by: int, named: dict[str, str] | None = None) -> float:
        return 1 / by if not named else 0.0

    module: dict[str, Any] = {"__name__": divided.__module__, "divided": divided}
    explain_errors(module)
    with pytest.raises(ZeroDivisionError):
        module["divided"](0, {})


def test_an_error_that_no_argument_explains_stays() -> None:
    def fails(count: int) -> None:
        raise ValueError(count)

    module: dict[str, Any] = {"__name__": fails.__module__, "fails": fails, "_own": fails}
    explain_errors(module)
    assert module["_own"] is fails
    with pytest.raises(ValueError, match=r"^3$") as caught:
        module["fails"](3)
    assert type(caught.value) is ValueError
    with pytest.raises(ParameterError, match="count: got 'x', need int") as explained:
        module["fails"]("x")
    assert isinstance(explained.value.__cause__, ValueError)
