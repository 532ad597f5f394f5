"""Every method seals and reads through the operators exactly as it does in core."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantwm_core import method as core_method
from quantwm_core import methods as core_methods
from quantwm_core import plugin
from quantwm_core import statistics as core_statistics
from quantwm_core.chunk import KINDS, Kind
from quantwm_core.chunk import SealedTensor as CoreTensor
from quantwm_core.errors import (
    DeviceError,
    DomainError,
    DtypeError,
    ParameterError,
    QuantWMError,
    RangeError,
    ShapeError,
    StateError,
    UnknownNameError,
)
from quantwm_core.statistics import QueryMoment as CoreMoment
from quantwm_kernels import methods, statistics
from quantwm_kernels.bridge import to_numpy
from quantwm_kernels.chunk import SealedTensor
from quantwm_kernels.sealing import Asked
from tests.kernels.operators import normal

TOKENS, CHANNELS = 40, 16
VALUES = normal(2, 3, TOKENS, CHANNELS, dtype=torch.bfloat16)
QUERIES = normal(2, 6, 50, CHANNELS, seed=1, dtype=torch.bfloat16)
POISON = 0xA5


def poisoned(*shape: int) -> Tensor:
    """BF16 memory in which an unwritten element shows."""
    return torch.full((*shape, 2), POISON, dtype=torch.uint8).view(torch.bfloat16)[..., 0]


def moments() -> tuple[statistics.QueryMoment, CoreMoment]:
    return statistics.second_moment(QUERIES, 3), core_statistics.second_moment(to_numpy(QUERIES), 3)


def equal(ours: SealedTensor, theirs: CoreTensor) -> bool:
    return (
        (ours.method, dict(ours.parameters), ours.shape) == (theirs.method, dict(theirs.parameters), theirs.shape)
        and list(ours.arrays) == list(theirs.arrays)
        and all(
            tuple(ours.arrays[name].shape) == array.shape
            and to_numpy(ours.arrays[name]).dtype == array.dtype
            and to_numpy(ours.arrays[name]).tobytes() == array.tobytes()
            for name, array in theirs.arrays.items()
        )
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", core_methods.names())
def test_seal_and_decode_equal_the_reference(name: str, kind: Kind) -> None:
    method, (ours, theirs) = core_methods.get(name), moments()
    sealed = methods.seal(method, kind, VALUES, ours)
    expected = method.seal(kind, to_numpy(VALUES), theirs)
    assert equal(sealed, expected)
    assert sealed.nbytes == expected.nbytes
    for start, stop in ((0, TOKENS), (3, 17), (TOKENS - 1, TOKENS), (5, 5)):
        out = poisoned(2, stop - start, 3, CHANNELS).transpose(1, 2)
        methods.decode_into(sealed, out, start, stop)
        assert to_numpy(out).tobytes() == method.decode(expected, start, stop).tobytes()


@pytest.mark.parametrize("name", core_methods.names())
def test_a_range_is_written_into_a_workspace_and_nothing_beside_it(name: str) -> None:
    sealed = methods.seal(core_methods.get(name), "keys", VALUES)
    workspace = poisoned(2, 64, 3, CHANNELS)
    methods.decode_into(sealed, workspace[:, 10:30].transpose(1, 2), 4, 24)
    whole = poisoned(2, 3, TOKENS, CHANNELS)
    methods.decode_into(sealed, whole)
    assert torch.equal(workspace[:, 10:30].transpose(1, 2), whole[:, :, 4:24])
    untouched = torch.cat([workspace[:, :10], workspace[:, 30:]], 1)
    assert (untouched.contiguous().view(torch.uint8) == POISON).all()


def test_a_sealed_tensor_shares_no_memory_with_its_input() -> None:
    values = VALUES.clone()
    sealed = methods.seal(core_methods.get("bf16"), "keys", values)
    values.zero_()
    out = poisoned(2, 3, TOKENS, CHANNELS)
    methods.decode_into(sealed, out)
    assert torch.equal(out, VALUES)


def test_the_codebook_of_the_unit_before_arrives() -> None:
    method = core_methods.get("quantwm", warm_start=True)
    first = methods.seal(method, "keys", VALUES)
    warm = methods.seal(method, "keys", VALUES * 1.5, previous=first)
    assert equal(warm, method.seal("keys", to_numpy(VALUES * 1.5), None, first.to_core()))
    cold = methods.seal(method, "keys", VALUES * 1.5)
    assert not torch.equal(warm.arrays["index"], cold.arrays["index"])


def test_sparse_coefficients_cross_the_operator() -> None:
    method, (ours, theirs) = core_methods.get("quantwm", threshold=0.12), moments()
    sealed = methods.seal(method, "keys", VALUES, ours)
    assert "sparse_values" in sealed.arrays
    assert equal(sealed, method.seal("keys", to_numpy(VALUES), theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_half_and_single_precision_are_rounded_first(dtype: torch.dtype) -> None:
    precise = normal(1, 1, 20, CHANNELS, dtype=dtype)
    method = core_methods.get("quantwm")
    wide, narrow = (methods.seal(method, "keys", tensor) for tensor in (precise, precise.bfloat16()))
    assert equal(wide, narrow.to_core())


def test_a_scheme_seals_both_halves() -> None:
    mixed = core_method.scheme("quantwm", values="bf16")
    ours, theirs = moments()
    chunk = methods.seal_chunk(mixed, VALUES, VALUES[..., :8], ours, start=80)
    expected = mixed.seal(to_numpy(VALUES), to_numpy(VALUES[..., :8]), theirs, start=80)
    assert (chunk.start, chunk.nbytes) == (80, expected.nbytes)
    assert equal(chunk.keys, expected.keys)
    assert equal(chunk.values, expected.values)


@dataclass(frozen=True)
class Negated:
    """A method of another distribution: stores the negative, and a count as an odd-sized array of another dtype."""

    bias: int = 0
    name = "negated"
    recent_tokens = 0

    def uses_queries(self, kind: Kind) -> bool:
        return False

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        return ("absent", "negative", "count")

    def seal(
        self, kind: Kind, values: np.ndarray, moment: CoreMoment | None = None, previous: CoreTensor | None = None
    ) -> CoreTensor:
        batch, heads, tokens, channels = values.shape
        arrays: dict[str, np.ndarray] = {"count": np.array([tokens, 1, 2], np.int32), "negative": -values}
        return CoreTensor(self.name, {"bias": self.bias}, (batch, heads, tokens, channels), arrays)

    def decode(self, sealed: CoreTensor, start: int = 0, stop: int | None = None) -> np.ndarray:
        return -sealed.arrays["negative"][:, :, start:stop]

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        return 2 * int(np.prod(shape)) + 12


@dataclass(frozen=True)
class Talkative(Negated):
    """Writes an array that it does not list."""

    name = "talkative"

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        return ("negative",)


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("negated", f"{__name__}:Negated", "quantwm.methods"),
        EntryPoint("talkative", f"{__name__}:Talkative", "quantwm.methods"),
    ]

    def entry_points(group: str, **selected: Any) -> EntryPoints:
        return EntryPoints(points).select(group=group, **selected)

    monkeypatch.setattr(plugin, "entry_points", entry_points)
    core_methods.implementation.cache_clear()


@pytest.mark.usefixtures("third_party")
def test_a_registered_method_works_without_a_line_here() -> None:
    sealed = methods.seal(core_methods.get("negated", bias=3), "values", VALUES)
    assert list(sealed.arrays) == ["count", "negative"]
    assert sealed.parameters == {"bias": 3}
    assert sealed.arrays["count"].tolist() == [TOKENS, 1, 2]
    out = poisoned(2, 3, 4, CHANNELS)
    methods.decode_into(sealed, out, 6, 10)
    assert torch.equal(out, VALUES[:, :, 6:10])


@pytest.mark.usefixtures("third_party")
def test_a_method_that_writes_more_than_it_lists_is_refused() -> None:
    with pytest.raises(StateError, match=r"talkative.*\['count'\]"):
        methods.seal(core_methods.get("talkative"), "keys", VALUES)


def test_an_unregistered_method_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="negated"):
        methods.seal(Negated(), "keys", VALUES)


def spoiled(value: float) -> Tensor:
    values = VALUES.clone()
    values[1, 2, 3, 4] = value
    return values


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (spoiled(float("nan")), DomainError, r"layer 3, chunk 7, keys: 1 of .*index \(1, 2, 3, 4\)"),
        (spoiled(float("inf")), DomainError, "layer 3, chunk 7, keys"),
        (spoiled(2.0**61), DomainError, "layer 3, chunk 7, keys"),
        (VALUES.double(), DtypeError, "layer 3, chunk 7, keys: got float64"),
        (VALUES[0], ShapeError, "layer 3, chunk 7, keys"),
        (VALUES[:, :, :0], ShapeError, "layer 3, chunk 7, keys"),
        (VALUES[..., :6], ShapeError, "head dimension 6"),
        (VALUES.clone().requires_grad_(True), StateError, "layer 3, chunk 7, keys: .*requires grad"),
    ],
)
def test_bad_input_is_refused_by_name(values: Tensor, error: type[QuantWMError], message: str) -> None:
    with pytest.raises(error, match=message):
        methods.seal(core_methods.get("quantwm"), "keys", values, label="layer 3, chunk 7")


@pytest.mark.parametrize(
    ("out", "start", "stop", "error"),
    [
        (poisoned(2, 3, 5, CHANNELS), 0, 4, ShapeError),
        (poisoned(2, 3, 5, CHANNELS).float(), 0, 5, DtypeError),
        (poisoned(2, 3, 5, CHANNELS), 38, 43, RangeError),
        (poisoned(2, 3, 5, CHANNELS), -1, 4, RangeError),
        (torch.zeros(2, 3, 5, CHANNELS, dtype=torch.bfloat16, requires_grad=True), 0, 5, StateError),
    ],
)
def test_an_unfit_workspace_or_range_is_refused(out: Tensor, start: int, stop: int, error: type[QuantWMError]) -> None:
    sealed = methods.seal(core_methods.get("rtn"), "keys", VALUES)
    with pytest.raises(error):
        methods.decode_into(sealed, out, start, stop)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda mean: mean[:, :2], ShapeError, r"unit 5, keys: query moment \(2, 2, 16, 16\) does not fit"),
        (lambda mean: mean[..., :8], ShapeError, "need .2, 3, 16, 16"),
        (lambda mean: mean.double(), DtypeError, "unit 5, keys: query moment of torch.float64"),
        (lambda mean: mean.to("meta"), DeviceError, "unit 5, keys: query moment on meta, the keys on cpu"),
        (lambda mean: mean.clone().requires_grad_(True), StateError, "unit 5, keys, query moment: .*requires grad"),
    ],
)
@pytest.mark.parametrize("launched", [False, True])
def test_a_moment_that_does_not_fit_is_refused(
    change: Callable[[Tensor], Tensor],
    error: type[QuantWMError],
    message: str,
    launched: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(methods, "check_available", lambda _: None)
    moment = moments()[0]
    moment = moment._replace(mean=change(moment.mean))
    method = core_methods.get("quantwm")
    asked = [Asked(method, "keys", VALUES, "unit 5, keys")]
    with pytest.raises(error, match=message):
        methods._begin(asked, moment) if launched else methods.seal(method, "keys", VALUES, moment, label="unit 5")


@pytest.mark.parametrize("name", ["quantwm", "klt", "bf16"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_a_moment_of_no_queries_is_refused_as_by_the_reference(number: float, name: str) -> None:
    wrong = moments()[0]
    wrong.mean[1, 2, 3, 3] = number
    chosen = core_method.scheme(name)
    with pytest.raises(DomainError, match="unit 5, query moment: "):
        chosen.seal(to_numpy(VALUES), to_numpy(VALUES), CoreMoment(to_numpy(wrong.mean), 100), label="unit 5")
    with pytest.raises(DomainError, match="unit 5, keys, query moment: "):
        methods.seal_chunk(chosen, VALUES, VALUES, wrong, label="unit 5")
    assert methods.seal(chosen.values, "values", VALUES, wrong).shape == VALUES.shape


def test_what_does_not_fit_together_is_refused() -> None:
    quantwm = core_method.scheme("quantwm")
    with pytest.raises(ShapeError, match=r"unit 5: keys .* and values"):
        methods.seal_chunk(quantwm, VALUES, VALUES[:, :, :7], label="unit 5")
    with pytest.raises(ShapeError, match="unit 5: query moment"):
        methods.seal_chunk(quantwm, VALUES, VALUES, statistics.second_moment(QUERIES, 2), label="unit 5")
    with pytest.raises(ParameterError, match="rank 17"):
        methods.seal(core_methods.get("quantwm", rank=17), "keys", VALUES, moments()[0])
    with pytest.raises(DeviceError):
        methods.seal(core_methods.get("bf16"), "keys", VALUES).to("meta").to_core()


@pytest.mark.parametrize("name", ["klt", "kvtc", "oscar"])
def test_what_units_share_is_one_tensor(name: str) -> None:
    moment, exact = statistics.second_moment(QUERIES, 3), core_methods.get(name)
    chunks: list[SealedTensor] = []
    for seed in range(3):
        values = VALUES * 2.0**-seed
        chunks.append(methods.seal(exact, "keys", values, moment, chunks[-1] if chunks else None))
    first, *others = (chunk.shared for chunk in chunks)
    assert first.keys() >= {"shared_basis", "shared_basis_scales", "shared_basis_blocks"}
    assert all(other[part].data_ptr() == tensor.data_ptr() for other in others for part, tensor in first.items())
    want = exact.seal("keys", to_numpy(VALUES * 0.5), CoreMoment(to_numpy(moment.mean), 1), chunks[0].to_core())
    assert equal(chunks[1], want)
