"""A call that fails says what and where, and leaves the cache exactly as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core import methods
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
from quantwm_core.method import scheme
from quantwm_models import CacheObserver, LayerCache
from quantwm_models.attention_hook import Replacement
from quantwm_models.rebuilt import Sealed
from quantwm_models.rebuilt_layer import RebuiltLayer, Seen
from tests.models.chunks import bits, chunk, fill, normal, snapshot
from tests.models.hy_world_host import CHANNELS, FRAME, apply_rotary_emb, prope_qkv, scene


def spoiled(kind: str, value: float, tokens: int = 16) -> tuple[Tensor, Tensor]:
    keys, values = chunk(50, tokens)
    (keys if kind == "keys" else values)[0, 1, 2, 3] = value
    return keys, values


def unchanged(cache: LayerCache, call: Callable[[], object], error: type[QuantWMError], message: str) -> None:
    """The call raises the error and the cache is what it was, to the byte and the object."""
    before, read = snapshot(cache), [tensor.clone() for tensor in cache.read()]
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error
    assert snapshot(cache) == before
    assert all(torch.equal(one, two) for one, two in zip(cache.read(), read, strict=True))


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**61])
def test_a_chunk_that_cannot_be_sealed(method: str, kind: str, value: float) -> None:
    more: dict[str, Any] = {"residual_length": 0} if method == "kivi" else {}
    cache = LayerCache(method, layer=3, **more)
    fill(cache, 4)
    cache.append(*spoiled(kind, value))
    cache.observe(normal(1, 2, 8, 16))
    before = snapshot(cache)
    calls: list[Callable[[], None]] = [lambda: cache.append(*chunk(5)), cache.seal, lambda: cache.evict(70, 75)]
    for call in calls:
        with pytest.raises(DomainError, match=rf"^layer 3: chunk 4: {kind}: 1 of"):
            call()
        assert snapshot(cache) == before
    cache.overwrite(*chunk(4))
    cache.append(*chunk(5))
    assert cache.report().chunks_sealed == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sink": 1.5}, "sink 1.5: need a whole number"),
        ({"sink": -1}, "^sink -1: need a whole number of at least 0$"),
        ({"window": True}, "window True: need a whole number or None"),
        ({"window": "x"}, "window 'x': need a whole number or None"),
        ({"workspace": 3}, r"workspace 3: need Workspace\(\) or None"),
        ({"offload": True}, r"offload True: need Offload\(\) or None"),
    ],
)
def test_settings_of_a_wrong_type(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LayerCache("bf16", **settings)


def test_arguments_of_a_wrong_type() -> None:
    cache = LayerCache("bf16", layer=1)
    fill(cache, 2)
    keys, values = chunk(2)
    wrong: Any = keys.numpy(force=True) if keys.dtype is not torch.bfloat16 else keys.float().numpy(force=True)
    calls: list[tuple[Callable[[], object], type[QuantWMError], str]] = [
        (lambda: cache.attend(wrong), DtypeError, "layer 1: queries: got ndarray"),
        (lambda: cache.append(keys.to_sparse(), values), StateError, "layout torch.sparse_coo"),
        (lambda: cache.read(1.5, 3), RangeError, "1.5 to 3: need .* in whole numbers"),  # type: ignore[arg-type]  # the point of it
        (lambda: cache.evict("a", 1), RangeError, "'a' to 1: need .* in whole numbers"),  # type: ignore[arg-type]  # the point of it
        (lambda: cache.store_in(True), ParameterError, "offload True"),  # type: ignore[arg-type]  # the point of it
        (lambda: cache.rebuild(keys, values, None, [-1, 17]), ShapeError, r"chunks of \[-1, 17\] tokens"),
        (lambda: cache.rebuild(wrong, values, None, [16]), DtypeError, "keys: got ndarray"),
    ]
    for call, error, message in calls:
        unchanged(cache, call, error, message)


def test_a_unit_of_several_chunks_is_sealed_whole_or_not_at_all() -> None:
    cache = LayerCache("quantwm", layer=2, chunks_per_seal=3, sink=4, window=200)
    fill(cache, 5)
    cache.append(*spoiled("values", float("nan")))
    unchanged_parts = snapshot(cache)
    with pytest.raises(DomainError, match="layer 2: chunks 3 to 5: values"):
        cache.append(*chunk(6))
    assert snapshot(cache) == unchanged_parts


def test_the_sinks_unit_is_not_kept_when_the_rest_of_the_chunk_fails() -> None:
    cache = LayerCache("rtn", sink=2)
    keys, values = spoiled("keys", float("nan"))
    keys[0, 1, 2, 3], keys[0, 0, 9, 0] = 0.0, float("nan")
    cache.append(keys, values)
    before = snapshot(cache)
    with pytest.raises(DomainError):
        cache.append(*chunk(1))
    assert snapshot(cache) == before


def test_a_chunk_that_is_evicted_before_it_is_due_may_hold_anything() -> None:
    cache = LayerCache("quantwm")
    cache.append(*spoiled("keys", float("nan")))
    cache.evict(0, 16)
    cache.append(*chunk(1))
    cache.seal()
    assert cache.report().chunks_sealed == 1


BAD_CHUNKS: list[tuple[Callable[[], tuple[Tensor, Tensor]], type[QuantWMError], str]] = [
    (lambda: chunk(1, 0), ShapeError, "an empty chunk"),
    (lambda: (normal(1, 2, 16, 16)[0], normal(1, 2, 16, 16)[0]), ShapeError, r"need \[B, H, N, D\]"),
    (lambda: (chunk(1, 16)[0], chunk(1, 15)[1]), ShapeError, "same B, H and N"),
    (lambda: chunk(1, heads=3), ShapeError, "after chunks of"),
    (lambda: chunk(1, batch=2), ShapeError, "after chunks of"),
    (lambda: chunk(1, channels=32), ShapeError, "after chunks of"),
    (lambda: (chunk(1)[0].double(), chunk(1)[1]), DtypeError, "keys: got torch.float64"),
    (lambda: (chunk(1)[0], chunk(1)[1].int()), DtypeError, "values: got torch.int32"),
    (lambda: (chunk(1)[0].requires_grad_(True), chunk(1)[1]), StateError, r"keys: .*requires grad.*no_grad"),
    (lambda: (chunk(1)[0], chunk(1)[1].requires_grad_(True)), StateError, "values: .*requires grad"),
    (lambda: (chunk(1)[0].to("meta"), chunk(1)[1]), DeviceError, "keys: .*on meta"),
    (lambda: (chunk(1)[0], chunk(1)[1].to("meta")), DeviceError, "values: .*on meta"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_CHUNKS)
def test_bad_chunks(make: Callable[[], tuple[Tensor, Tensor]], error: type[QuantWMError], message: str) -> None:
    cache = LayerCache("quantwm", layer=7)
    fill(cache, 3)
    for method in (cache.append, cache.overwrite):
        unchanged(cache, lambda method=method: method(*make()), error, rf"^layer 7: .*{message}")  # type: ignore[misc]  # a default binds the loop's value


@pytest.mark.parametrize(
    ("queries", "error", "message"),
    [
        (normal(1, 3, 8, 16), ShapeError, "multiple of 2"),
        (normal(2, 2, 8, 16), ShapeError, r"need \[1, "),
        (normal(1, 2, 8, 32), ShapeError, "16"),
        (normal(2, 8, 16), ShapeError, "got"),
        (normal(1, 2, 8, 16).double(), DtypeError, "float64"),
        (normal(1, 2, 0, 16), ShapeError, "no element"),
        (torch.full((1, 2, 8, 16), float("nan")), DomainError, "NaN"),
        (normal(1, 2, 8, 16).requires_grad_(True), StateError, "requires grad"),
    ],
)
def test_bad_queries(queries: Tensor, error: type[QuantWMError], message: str) -> None:
    cache = LayerCache("quantwm", layer=1)
    fill(cache, 3)
    unchanged(cache, lambda: cache.observe(queries), error, rf"^layer 1: queries: .*{message}")


@pytest.mark.parametrize(("start", "stop"), [(0, 49), (-1, 5), (7, 3), (49, 49), (50, 60)])
def test_ranges_outside_the_window(start: int, stop: int) -> None:
    cache = LayerCache("rtn", layer=4)
    fill(cache, 3)
    unchanged(cache, lambda: cache.read(start, stop), RangeError, r"^layer 4: window tokens .* need 0 <= start")
    unchanged(cache, lambda: cache.evict(start, stop), RangeError, "^layer 4: window tokens")
    unchanged(cache, lambda: cache.attend(normal(1, 2, 3, 16), start, stop), RangeError, "^layer 4")


def test_calls_in_the_wrong_order() -> None:
    cache = LayerCache("rtn", layer=4)
    for call in (cache.read, lambda: cache.observe(normal(1, 2, 3, 16))):
        with pytest.raises(StateError, match=r"^layer 4.*append keys and values first"):
            call()
    with pytest.raises(StateError, match="no chunk is active"):
        cache.overwrite(*chunk(0))
    cache.seal()
    cache.append(*chunk(0))
    cache.seal()
    unchanged(cache, lambda: cache.overwrite(*chunk(1)), StateError, "no chunk is active")
    cache.append(*chunk(1))
    unchanged(cache, lambda: cache.overwrite(*chunk(1, 12)), ShapeError, "16 tokens, 12 came")


def test_a_chunk_that_the_window_cannot_hold() -> None:
    cache = LayerCache("rtn", sink=4, window=24)
    fill(cache, 2, tokens=10)
    unchanged(cache, lambda: cache.append(*chunk(3, 21)), RangeError, "window 24 less sink 4")
    cache.append(*chunk(3, 20))
    assert cache.tokens == 24


def test_head_sizes_that_groups_do_not_divide() -> None:
    cache = LayerCache("quantwm", layer=5)
    with pytest.raises(ShapeError, match="layer 5: head dimension 18"):
        cache.append(*chunk(0, channels=18))
    assert cache.tokens == 0


def test_a_history_of_heads_that_no_setting_fits() -> None:
    cache = LayerCache("quantwm", layer=5, rank=100, chunks_per_seal=2)
    with pytest.raises(ParameterError, match="layer 5: quantwm rank 100: need at most 32"):
        cache.rebuild(*chunk(0, channels=32), None, [16])
    assert cache.tokens == 0


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown method 'qgv'; did you mean 'qvg'\?"):
        LayerCache("qgv")
    with pytest.raises(ParameterError, match="has no parameter 'rnk'"):
        LayerCache("quantwm", rnk=4)
    with pytest.raises(ParameterError, match="beside a ready scheme"):
        LayerCache(scheme("rtn"), rank=4)
    with pytest.raises(ParameterError, match="window 4"):
        LayerCache("rtn", sink=4, window=4)


class TwoKinds:
    """A layer that stores one stream, as its block builds a history of two frames."""

    def __init__(self) -> None:
        self.seen = [Seen(prope_qkv), Seen(apply_rotary_emb)]
        self.cache = LayerCache("quantwm", layer=6, iterations=1)
        self.layer = RebuiltLayer(lambda _: self.cache, Replacement(prope_qkv), self.seen)

    def build(self, first_frame: int, *, spoiled: float | None = None) -> tuple[Sealed, Sealed]:
        """The history that begins with a frame, by whose place both kinds are derived."""
        place = scene(torch.arange(2) + first_frame)
        keys, values = normal(2, 1, 2, 2 * FRAME, CHANNELS, seed=first_frame)
        if spoiled is not None:
            keys[0, 1, 3, 2] = spoiled
        self.layer.enter(None, (), {})
        try:
            _, *projected, _ = self.seen[0](keys, keys, values, viewmats=place.views)
            by_token = keys.transpose(1, 2)
            roped = self.seen[1](by_token, by_token, place.rotation)[1].transpose(1, 2)
            both = (torch.cat(pair, dim=-1) for pair in zip((roped, values), projected, strict=True))
            return self.layer.build(self.cache, *both)
        finally:
            self.layer.leave(None, (), {}, None)


# Of NaN neither kind is derived; the other can be, and is what no unit holds.
@pytest.mark.parametrize("spoiled", [float("nan"), 2.0**61])
def test_a_history_of_one_stream_is_read_as_before_when_the_next_is_refused(spoiled: float) -> None:
    host = TwoKinds()
    history = host.build(0)
    assert host.cache.chunks[0].keys.shape[3] == CHANNELS, "one stream is stored"
    before = [bits(each) for each in host.layer.read(*history)]
    frame, held = host.cache.key_frame, snapshot(host.cache)
    with pytest.raises(DomainError, match=r"^layer 6: chunk 0: keys"):
        host.build(5, spoiled=spoiled)
    assert snapshot(host.cache) == held
    assert host.cache.key_frame is frame
    assert [bits(each) for each in host.layer.read(*history)] == before


class ObserverError(Exception):
    """Something goes wrong in one who looks on."""


class Failing(CacheObserver):
    """Fails when tokens are gone."""

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        raise ObserverError


@pytest.mark.parametrize("method", ["quantwm", "bf16"])
@pytest.mark.parametrize("anew", ["restart", "rebuild"])
def test_what_begins_anew_is_held_though_an_observer_failed(method: str, anew: str) -> None:
    cache, expected = (
        LayerCache(method, iterations=1) if method == "quantwm" else LayerCache(method) for _ in range(2)
    )
    for each in (cache, expected):
        fill(each, 3)
    cache.observers.append(Failing())
    keys, values = chunk(7, 32)
    calls: dict[str, Callable[[LayerCache], None]] = {
        "restart": lambda each: each.restart(keys, values),
        "rebuild": lambda each: each.rebuild(keys, values, None, [16, 16]),
    }
    with pytest.raises(ObserverError):
        calls[anew](cache)
    calls[anew](expected)
    assert cache.stream == expected.stream
    assert [bits(each) for each in cache.read()] == [bits(each) for each in expected.read()]
    cache.observers.clear()
    for each in (cache, expected):
        fill(each, 2)
    assert [bits(each) for each in cache.read()] == [bits(each) for each in expected.read()]


def test_a_history_that_took_the_place_is_derived_as_it_was_made_though_an_observer_failed() -> None:
    host, kinds = TwoKinds(), TwoKinds()
    host.build(0)
    host.cache.observers.append(Failing())
    with pytest.raises(ObserverError):
        host.build(5)
    expected = kinds.layer.read(*kinds.build(5))
    stored = host.cache.read()
    assert [bits(each) for each in host.layer.both(host.cache, *stored)] == [bits(each) for each in expected]
