"""What a cache gives back, holds and reports."""

from collections.abc import Callable, Sequence
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantwm_core import methods
from quantwm_core.errors import (
    DeviceError,
    DomainError,
    DtypeError,
    ParameterError,
    ShapeError,
    StateError,
    UnknownNameError,
)
from quantwm_core.method import decode, scheme
from quantwm_core.stream import Span
from quantwm_kernels.bridge import to_numpy
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.statistics import QueryMoment, second_moment
from quantwm_models import CacheObserver, LayerCache, Offload, Workspace
from quantwm_models import cache as cache_module
from quantwm_models.attending import AttentionPath
from quantwm_models.geometry import exact_chunk
from tests.models.chunks import bits, chunk, fill, normal, snapshot

METHODS = methods.names()


def history(count: int, tokens: int = 16, **shape: int) -> tuple[Tensor, Tensor]:
    """All keys and all values of the first chunks."""
    parts = [chunk(number, tokens, **shape) for number in range(count)]
    return torch.cat([part[0] for part in parts], 2), torch.cat([part[1] for part in parts], 2)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    per_seal=st.integers(1, 3),
    sink=st.integers(0, 6),
    room=st.none() | st.integers(9, 25),
    overwrites=st.integers(0, 2),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_bf16_reads_equal_a_plain_tensor_that_slides(
    lengths: list[int],
    per_seal: int,
    sink: int,
    room: int | None,
    overwrites: int,
    bounds: tuple[float, float],
) -> None:
    window = None if room is None else sink + room
    cache = LayerCache("bf16", chunks_per_seal=per_seal, sink=sink, window=window)
    keys, values = (torch.zeros(1, 2, 0, 16, dtype=torch.bfloat16) for _ in range(2))
    for number, length in enumerate(lengths):
        if window is not None and keys.shape[2] + length > window:
            gone = slice(sink, sink + keys.shape[2] + length - window)
            keys, values = (
                torch.cat([each[:, :, : gone.start], each[:, :, gone.stop :]], 2) for each in (keys, values)
            )
        cache.append(*chunk(100 + number, length))
        for step in range(overwrites):
            cache.overwrite(*chunk(1000 * step + number, length))
        last = chunk(number if not overwrites else 1000 * (overwrites - 1) + number, length)
        last = last if overwrites else chunk(100 + number, length)
        keys, values = torch.cat([keys, last[0]], 2), torch.cat([values, last[1]], 2)
        start, stop = sorted(round(bound * cache.tokens) for bound in bounds)
        for begin, end in ((0, cache.tokens), (start, stop)):
            read = cache.read(begin, end)
            assert bits(read[0]) == bits(keys[:, :, begin:end])
            assert bits(read[1]) == bits(values[:, :, begin:end])


@pytest.mark.parametrize("name", METHODS)
def test_a_read_is_what_core_decodes(name: str) -> None:
    cache = LayerCache(name)
    fill(cache, 12)
    read = cache.read()
    offset = 0
    for unit in cache.chunks:
        for ours, theirs in zip(read, decode(unit.to_core()), strict=True):
            assert to_numpy(ours[:, :, offset : offset + unit.tokens]).tobytes() == theirs.tobytes()
        offset += unit.tokens
    assert offset == cache.tokens - max(16, cache.scheme.recent_tokens + 16)
    exact = history(12)
    for half, original in zip(read, exact, strict=True):
        assert torch.equal(half[:, :, offset:], original[:, :, offset:])


@pytest.mark.parametrize("name", METHODS)
def test_each_chunk_is_sealed_as_core_would_with_the_queries_before_it(name: str) -> None:
    from quantwm_core import statistics

    cache = LayerCache(name, chunks_per_seal=2)
    fill(cache, 9, tokens=70)
    plan, past, begin, before = cache.scheme, statistics.QueryStatistics(), 0, None
    for unit in cache.chunks:
        keys, values = (to_numpy(each[:, :, unit.start : unit.stop].contiguous()) for each in history(9, 70))
        while begin + 140 <= unit.start:
            for number in (begin // 70, begin // 70 + 1):
                past = past.observe(statistics.second_moment(to_numpy(normal(1, 4, 8, 16, seed=1000 + number)), 2))
            past, begin = past.sealed(), begin + 140
        before = expected = plan.seal(keys, values, past.past, before, unit.start)
        for kind in ("keys", "values"):
            ours, theirs = getattr(unit, kind).arrays, getattr(expected, kind).arrays
            assert list(ours) == list(theirs)
            assert all(to_numpy(ours[part]).tobytes() == theirs[part].tobytes() for part in theirs)
    assert len(cache.chunks) >= 3


def test_the_newest_tokens_of_kivi_stay_exact_across_units() -> None:
    cache = LayerCache("kivi", residual_length=20)
    fill(cache, 5)
    assert cache.stream.units == (Span(0, 12), Span(12, 28), Span(28, 44))
    for ours, theirs in zip(cache.read(44), history(5), strict=True):
        assert torch.equal(ours, theirs[:, :, 44:])
    assert cache.report().active_nbytes == 2 * 2 * 2 * 16 * 36


def test_a_sink_cuts_units_so_that_the_rest_can_be_freed() -> None:
    cache = LayerCache("rtn", sink=6, window=54)
    fill(cache, 6)
    assert cache.stream.live == (Span(0, 6), Span(48, 96))
    assert [(unit.start, unit.stop) for unit in cache.chunks] == [(0, 6), (48, 64), (64, 80)]


def test_partial_eviction_keeps_a_unit_until_its_last_token_is_gone() -> None:
    cache = LayerCache("bf16")
    fill(cache, 4)
    cache.evict(3, 20)
    assert cache.stream.live == (Span(0, 3), Span(20, 64))
    assert cache.report().chunks_evicted == 0
    keys, values = history(4)
    left = torch.cat([keys[:, :, :3], keys[:, :, 20:]], 2)
    assert torch.equal(cache.read()[0], left)
    cache.evict(0, 3)
    assert cache.report().chunks_evicted == 1
    assert torch.equal(cache.read(1, 30)[1], values[:, :, 21:50])


def test_evicting_from_the_active_chunk_completes_it() -> None:
    cache = LayerCache("bf16")
    fill(cache, 2)
    cache.evict(10, 20)
    assert cache.stream.active_span is None
    assert [(unit.start, unit.stop) for unit in cache.chunks] == [(0, 16), (20, 32)]
    cache.append(*chunk(2))
    assert torch.equal(cache.read()[0], torch.cat([history(3)[0][:, :, :10], history(3)[0][:, :, 20:]], 2))


def test_everything_can_be_evicted_and_the_stream_goes_on() -> None:
    cache = LayerCache("quantwm")
    fill(cache, 2)
    cache.evict(0, 32)
    assert cache.tokens == 0
    assert cache.report().sealed_nbytes == cache.report().active_nbytes == 0
    cache.append(*chunk(2))
    assert torch.equal(cache.read()[0], chunk(2)[0])
    assert cache.stream.active_span == Span(32, 48)


def test_sealing_eagerly_or_lazily_gives_the_same_bytes() -> None:
    eager, lazy = LayerCache("quantwm"), LayerCache("quantwm")
    for number in range(4):
        fill(eager, 1, first=number)
        eager.seal()
        fill(lazy, 1, first=number)
    lazy.seal()
    assert eager.stream.active_span is None
    assert [bits(tensor) for unit in eager.chunks for tensor in unit.keys.arrays.values()] == [
        bits(tensor) for unit in lazy.chunks for tensor in unit.keys.arrays.values()
    ]


def test_one_token_chunks_work() -> None:
    for name in METHODS:
        cache = LayerCache(name, chunks_per_seal=3)
        fill(cache, 7, tokens=1)
        keys, values = cache.read()
        assert keys.shape == values.shape == (1, 2, 7, 16)
        assert keys.isfinite().all()


def test_batches_and_unlike_head_sizes() -> None:
    cache = LayerCache("bf16")
    keys, values = normal(3, 2, 10, 16), normal(3, 2, 10, 8, seed=1)
    cache.append(keys, values)
    cache.append(keys + 1, values + 1)
    assert torch.equal(cache.read()[1], torch.cat([values, values + 1], 2))
    assert cache.read(4, 12)[0].shape == (3, 2, 8, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_number_formats_are_rounded_to_bf16(dtype: torch.dtype) -> None:
    precise = normal(2, 1, 2, 10, 16, dtype=torch.float32).to(dtype)
    cache = LayerCache("bf16")
    cache.append(*precise)
    assert torch.equal(cache.read()[0], precise[0].bfloat16())
    cache.overwrite(*(precise + 1))
    assert torch.equal(cache.read()[1], (precise[1] + 1).bfloat16())


def test_what_was_appended_may_be_changed_afterwards() -> None:
    keys, values = chunk(0)
    cache = LayerCache("bf16")
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)
    cache.append(strided, values)
    strided.zero_()
    values.zero_()
    for read, exact in zip(cache.read(), chunk(0), strict=True):
        assert torch.equal(read, exact)


@pytest.mark.parametrize("attention", ["auto", "packed", "decoded"])
@pytest.mark.parametrize("query_heads", [2, 6])
def test_attend_is_attention_to_what_is_read(query_heads: int, attention: AttentionPath) -> None:
    cache = LayerCache("quantwm", attention=attention)
    fill(cache, 3)
    queries = normal(1, query_heads, 9, 16, seed=5)
    keys, values = (tensor.clone() for tensor in cache.read(4, 40))
    keys, values = (tensor.repeat_interleave(query_heads // 2, 1) for tensor in (keys, values))
    expected = scaled_dot_product_attention(queries, keys, values)
    before = cache.queries.groups[-1].moment
    output = cache.attend(queries, 4, 40)
    assert torch.allclose(output.float(), expected.float(), atol=2e-2)
    after = cache.queries.groups[-1].moment
    assert before is not None
    assert after is not None
    assert after.queries == before.queries + 9 * query_heads // 2
    assert cache.attend(queries.float(), 4, 40).dtype == torch.float32


@pytest.mark.parametrize("path", ["packed", "rotated"])
@pytest.mark.parametrize("name", METHODS)
def test_attention_from_the_packed_cache_agrees_and_needs_no_workspace(name: str, path: AttentionPath) -> None:
    paths: tuple[AttentionPath, ...] = (path, "decoded")
    caches = {each: LayerCache(name, attention=each, chunks_per_seal=2, window=70) for each in paths}
    for cache in caches.values():
        fill(cache, 6)
    queries = normal(1, 6, 5, 16, seed=5)
    for bounds in ((None, None), (0, 3), (7, 60), (66, 70), (4, 4)):
        packed, decoded = (cache.attend(queries, *bounds) for cache in caches.values())
        assert packed.dtype == decoded.dtype == torch.bfloat16
        assert torch.allclose(packed.float(), decoded.float(), atol=2e-2), bounds
    assert caches[path].report().workspace_nbytes == 0
    assert caches["decoded"].report().workspace_nbytes > 0
    one, other = (cache.queries.groups[-1].moment for cache in caches.values())
    assert (one is None) == (other is None) == (not caches[path].scheme.uses_queries)
    assert one is None or other is None or one.queries == other.queries


def test_attention_from_the_packed_cache_sees_what_is_overwritten() -> None:
    cache = LayerCache("rtn", attention="packed")
    fill(cache, 3)
    queries, first = normal(1, 2, 5, 16, seed=5), cache.attend(normal(1, 2, 5, 16, seed=5))
    cache.overwrite(*chunk(77))
    expected = LayerCache("rtn", attention="decoded")
    fill(expected, 3)
    expected.overwrite(*chunk(77))
    output = cache.attend(queries)
    assert torch.allclose(output.float(), expected.attend(queries).float(), atol=2e-2)
    assert not torch.allclose(output.float(), first.float(), atol=2e-2)


def test_another_path_of_attention_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown attention 'pack'; did you mean 'packed'\?"):
        LayerCache(attention="pack")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("observers", [None, 3, [3], "x", [CacheObserver], [CacheObserver(), None], {"x": 1}])
def test_what_cannot_look_on_is_refused(observers: Any) -> None:
    with pytest.raises(ParameterError, match=r"layer 4: observers? .*: need a (sequence|quantwm_models)"):
        LayerCache(layer=4, observers=observers)


@pytest.mark.parametrize("ahead", [0, 3])
def test_what_is_no_turning_is_refused(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # where the tests of core run in the same process
    with pytest.raises(ParameterError, match=r"layer 4: turning 'x': need a quantwm_core\.rotary\.Turning, or None"):
        LayerCache("klt", layer=4, frames_ahead=ahead, turning="x")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("wrong", ["x", -1, 0, 2.0, True, None])
def test_ranks_are_counted(wrong: Any) -> None:
    cache = LayerCache("bf16", layer=4)
    cache.ranks = 3
    with pytest.raises(ParameterError, match=rf"^layer 4: ranks {wrong!r}: need a whole number above 0"):
        cache.ranks = wrong
    assert cache.ranks == 3


def test_a_key_frame_is_called() -> None:
    cache = LayerCache("quantwm", layer=4)
    with pytest.raises(ParameterError, match=r"^layer 4: key_frame 3: need a function"):
        cache.key_frame = 3  # type: ignore[assignment]  # the point of the test
    assert cache.key_frame is None


class Witness(CacheObserver):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.units: list[tuple[int, int, Tensor, Tensor]] = []
        self.calls: list[tuple[Tensor, Tensor, list[Span]]] = []
        self.gone: list[Span] = []

    def sealed(self, cache: LayerCache, chunk: SealedChunk, keys: Tensor, values: Tensor) -> None:
        self.units.append((chunk.start, chunk.stop, keys.clone(), values.clone()))

    def attended(self, cache: LayerCache, queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> None:
        self.calls.append((queries, keys.clone(), list(spans)))

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        self.gone.append(Span(start, stop))


@pytest.mark.parametrize("attention", ["packed", "decoded"])
def test_observers_are_told_exactly_what_happens(attention: AttentionPath) -> None:
    witness = Witness()
    cache = LayerCache("rtn", sink=4, window=36, observers=[witness], attention=attention)
    fill(cache, 4, queries=False)
    cache.attend(normal(1, 2, 3, 16), 2, 30)
    keys, values = history(4)
    assert [unit[:2] for unit in witness.units] == [(0, 4), (4, 16), (16, 32), (32, 48)]
    for start, stop, exact_keys, exact_values in witness.units:
        assert torch.equal(exact_keys, keys[:, :, start:stop])
        assert torch.equal(exact_values, values[:, :, start:stop])
    assert witness.gone == [Span(4, 16), Span(16, 32)]
    assert witness.calls[0][2] == [Span(2, 4), Span(32, 48), Span(48, 58)]
    assert torch.equal(witness.calls[0][1], cache.read(2, 30)[0])
    cache.clear()
    assert witness.gone[2:] == [Span(0, 4), Span(32, 64)]


def test_the_report_counts_storage() -> None:
    cache = LayerCache("quantwm", chunks_per_seal=2)
    fill(cache, 5)
    report = cache.report()
    assert report.tokens == 80
    assert report.sealed_tokens == 64
    assert report.sealed_nbytes == sum(unit.nbytes for unit in cache.chunks) > 0
    shape = (1, 2, 32, 16)
    plan = cache.scheme
    expected = sum(
        plan.keys.nbytes("keys", shape, first) + plan.values.nbytes("values", shape, first) for first in (True, False)
    )
    assert report.sealed_nbytes == expected
    assert report.active_nbytes == 2 * 2 * 2 * 16 * 16
    assert report.state_nbytes == 2 * 4 * 2 * 16 * 16
    assert report.sealed_bf16_nbytes == 2 * 2 * 2 * 64 * 16
    assert report.ratio == report.sealed_bf16_nbytes / report.sealed_nbytes
    assert (report.chunks_sealed, report.chunks_evicted) == (2, 0)
    assert report.workspace_nbytes == 0
    cache.read()
    assert cache.report().workspace_nbytes == 2 * 2 * 2 * 80 * 16
    assert cache.report().decode_seconds > 0
    assert cache.report().seal_seconds == report.seal_seconds > 0
    cache.clear()
    assert cache.report() == type(report)(workspace_nbytes=2 * 2 * 2 * 80 * 16)


@pytest.mark.parametrize("offload", [None, Offload()])
def test_what_units_share_is_counted_once_and_outlives_the_unit_that_it_came_with(offload: Offload | None) -> None:
    cache = LayerCache("klt", lifetime=0.0, window=64, offload=offload)
    fill(cache, 3)
    first, second = cache.chunks
    report = cache.report()
    assert report.shared_nbytes == first.shared_nbytes == second.shared_nbytes > 0
    assert report.sealed_nbytes == first.nbytes + second.nbytes - report.shared_nbytes
    assert report.host_nbytes == (0 if offload is None else report.sealed_nbytes - report.shared_nbytes)
    basis = first.keys.arrays["shared_basis"].data_ptr()
    fill(cache, 6)
    assert all(unit.start > 0 and unit.keys.arrays["shared_basis"].data_ptr() == basis for unit in cache.chunks)
    assert cache.report().shared_nbytes == report.shared_nbytes
    cache.clear()
    assert cache.report().shared_nbytes == 0


def test_bf16_storage_of_sealed_chunks_is_released() -> None:
    cache = LayerCache("rtn")
    fill(cache, 30)
    assert cache.report().active_nbytes == 2 * 2 * 2 * 16 * 16
    assert cache.report().sealed_nbytes < cache.report().sealed_bf16_nbytes / 3


def test_a_method_that_uses_no_queries_is_spared_their_statistics() -> None:
    cache = LayerCache("rtn")
    fill(cache, 3)
    assert cache.report().state_nbytes == 0
    mixed = LayerCache(scheme("quantwm", values="rtn"))
    fill(mixed, 3)
    assert mixed.report().state_nbytes > 0


def test_restart_is_a_fresh_cache() -> None:
    used, fresh = LayerCache("quantwm"), LayerCache("quantwm")
    fill(used, 3)
    used.restart(*chunk(7, 20, channels=32))
    used.observe(normal(1, 2, 8, 32))
    fresh.append(*chunk(7, 20, channels=32))
    fresh.observe(normal(1, 2, 8, 32))
    for cache in (used, fresh):
        cache.append(*chunk(8, 20, channels=32))
        cache.append(*chunk(9, 20, channels=32))
    assert bits(used.read()[0]) == bits(fresh.read()[0])
    assert used.report().chunks_sealed == 2


def test_inference_mode_and_no_grad_may_alternate() -> None:
    cache = LayerCache("quantwm", workspace=Workspace(64))
    with torch.inference_mode():
        fill(cache, 2)
        first = cache.read()[0].clone()
    with torch.no_grad():
        assert torch.equal(cache.read()[0], first)
        fill(cache, 2, first=2)
        cache.read()
    with torch.inference_mode():
        fill(cache, 1, first=4)
        assert cache.read()[0].shape[2] == 80


@pytest.mark.parametrize("scheme_name", ["quantwm", "bf16"])
def test_queries_from_nowhere_are_refused_and_the_cache_goes_on(scheme_name: str) -> None:
    cache = LayerCache(scheme_name)
    keys = normal(1, 2, 16, 32, seed=1)
    cache.append(keys, keys)
    wrongs: list[tuple[Any, type[Exception]]] = [
        (keys.to("meta"), DeviceError),
        (keys.int(), DtypeError),
        ([1.0], DtypeError),
    ]
    for wrong, error in wrongs:
        with pytest.raises(error, match="queries"):
            cache.observe(wrong)
    cache.append(keys, keys)
    assert cache.tokens == 32


def test_queries_before_the_first_chunk_count_for_all_that_come() -> None:
    cache = LayerCache("quantwm", iterations=2)
    cache.foresee(normal(1, 2, 8, 16, seed=1))
    cache.foresee(normal(1, 2, 8, 16, seed=2))
    cache.append(*chunk(0))
    cache.seal()
    assert cache.queries.past is not None
    assert cache.queries.past.queries == 16
    assert "basis" in cache.chunks[0].keys.arrays
    with pytest.raises(StateError, match=r"layer 0: queries before the first chunk came after it; observe\(\) them"):
        cache.foresee(normal(1, 2, 8, 16))


@pytest.mark.parametrize(
    ("queries", "error"),
    [
        (normal(1, 2, 8, 16).int(), DtypeError),
        (normal(1, 2, 8, 16).float().requires_grad_(True), StateError),
        (normal(1, 2, 8, 16) * float("nan"), DomainError),
        (torch.ones(5), ShapeError),
        (torch.ones(1, 2, 0, 16), ShapeError),
    ],
)
def test_foreseen_queries_are_checked(queries: Tensor, error: type[Exception]) -> None:
    cache = LayerCache("quantwm")
    with pytest.raises(error, match="layer 0: "):
        cache.foresee(queries)
    assert cache.queries.groups == ()


def test_rewinding_forgets_tokens_but_not_queries() -> None:
    cache, gone = LayerCache("quantwm", iterations=2), Evictions()
    cache.observers.append(gone)
    fill(cache, 3)
    asked = cache.queries.folded().past
    cache.rewind()
    assert cache.tokens == 0
    assert cache.report().sealed_nbytes == 0
    assert gone.spans == [(0, 48)]
    assert asked is not None
    assert cache.queries.past is not None
    assert cache.queries.past.queries == asked.queries
    assert bits(cache.queries.past.mean) == bits(asked.mean)
    cache.append(*chunk(0))
    cache.seal()
    assert "basis" in cache.chunks[0].keys.arrays
    cache.clear()
    assert cache.queries.past is None


class Evictions(CacheObserver):
    """Keeps what is gone."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        self.spans.append((start, stop))


def test_a_unit_is_sealed_in_the_frame_of_its_keys() -> None:
    asked: list[tuple[int, int]] = []

    def frame(moment: QueryMoment, span: Span) -> QueryMoment:
        asked.append((span.start, span.stop))
        return QueryMoment(moment.mean.flip(-1).flip(-2), moment.queries)

    plain, turned = LayerCache("quantwm", iterations=2), LayerCache("quantwm", iterations=2)
    turned.key_frame = frame
    for cache in (plain, turned):
        fill(cache, 3)
    # The first unit has no queries to turn.
    assert asked == [(16, 32)]
    bases = [cache.chunks[1].keys.arrays["basis"] for cache in (plain, turned)]
    assert not torch.equal(bases[0], bases[1])
    # Only what a unit is sealed by is turned.
    pasts = [cache.queries.past for cache in (plain, turned)]
    assert pasts[0] is not None
    assert pasts[1] is not None
    assert bits(pasts[0].mean) == bits(pasts[1].mean)


@pytest.mark.parametrize("begin", [LayerCache.append, LayerCache.restart])
def test_a_first_chunk_of_heads_that_the_scheme_cannot_store_is_refused(begin: Callable[..., None]) -> None:
    cache = LayerCache("quantwm", layer=3, rank=17)
    before = snapshot(cache)
    with pytest.raises(ParameterError, match="layer 3: quantwm rank 17: need at most 16, the head dimension"):
        begin(cache, *chunk(0))
    assert snapshot(cache) == before
    begin(cache, *chunk(0, channels=20))
    assert cache.tokens == 16


@pytest.mark.parametrize("shape", [(1, 3, 8, 16), (2, 2, 8, 16), (1, 2, 8, 32)])
def test_a_first_chunk_that_does_not_fit_what_was_foreseen_is_refused(shape: tuple[int, ...]) -> None:
    cache = LayerCache("quantwm", iterations=1)
    cache.foresee(normal(*shape))
    before = snapshot(cache)
    refused = r"layer 0: keys of .*\[1, 2, 16\] after queries of .*clear\(\)"
    with pytest.raises(ShapeError, match=refused):
        cache.append(*chunk(0))
    with pytest.raises(ShapeError, match=refused):
        cache.rebuild(*chunk(0), None, [16])
    assert snapshot(cache) == before
    cache.restart(*chunk(0))
    cache.seal()
    assert cache.chunks[0].tokens == 16


def test_the_sizes_of_a_rebuilt_history_are_checked() -> None:
    cache, (keys, values) = LayerCache("quantwm", iterations=1), chunk(0, 64)
    cache.append(*chunk(1))
    before = snapshot(cache)
    lists: list[Any] = [
        None,
        5,
        "32",
        [],
        [32.0, 32.0],
        [64, 0],
        np.array(64),
        np.full(2, 32.0),
        torch.tensor([64]),
    ]
    for wrong in lists:
        with pytest.raises(ShapeError, match=r"layer 0: chunks of .*need whole numbers above 0"):
            cache.rebuild(keys, values, None, wrong)
    with pytest.raises(ShapeError, match=r"layer 0: keys: got \(1, 2, 64, 16\), need .* of 65 tokens, \[32, 33\]"):
        cache.rebuild(keys, values, None, [32, 33])
    with pytest.raises(DtypeError, match="layer 0: values: got NoneType"):
        cache.rebuild(keys, None, None, [64])  # type: ignore[arg-type]
    assert snapshot(cache) == before
    cache.rebuild(keys, values, None, np.array([32, 32]))  # type: ignore[arg-type]
    assert [each.tokens for each in cache.chunks] == [32, 32]


def test_a_moment_counts_as_the_queries_that_it_is_of() -> None:
    by_queries, by_moment = (LayerCache("quantwm", iterations=1) for _ in range(2))
    for step in range(3):
        queries = normal(1, 4, 8, 16, seed=step)
        (by_queries.foresee if step == 0 else by_queries.observe)(queries[:, :2] if step == 0 else queries)
        by_moment.observe_moment(second_moment(queries[:, :2] if step == 0 else queries, 2))
        for cache in (by_queries, by_moment):
            cache.append(*chunk(step, 24))
    held = [snapshot(cache) for cache in (by_moment, by_queries)]
    assert all(held[0][part] == held[1][part] for part in ("sealed", "moments", "starts"))
    assert held[0]["moments"][0] is not None


def test_a_moment_that_does_not_fit_the_keys_is_refused() -> None:
    cache = LayerCache("quantwm")
    cache.append(*chunk(0))
    before = snapshot(cache)
    for shape in ((1, 3, 16, 16), (2, 2, 16, 16), (1, 2, 8, 8)):
        with pytest.raises(ShapeError, match=r"moment: got .*need \(1, 2, 16, 16\)"):
            cache.observe_moment(QueryMoment(torch.zeros(shape), 1))
    assert snapshot(cache) == before


ELSEWHERE = torch.device("cuda", 1)


def test_queries_that_live_apart_from_the_keys_are_refused_when_they_come() -> None:
    cache = LayerCache("quantwm", layer=3)
    cache.append(*chunk(0))
    assert cache.geometry is not None
    cache._geometry = cache.geometry._replace(device=ELSEWHERE)
    before, queries = snapshot(cache), normal(1, 2, 8, 16)
    with pytest.raises(DeviceError, match="layer 3: queries on cpu, the keys on cuda:1; move one to the other"):
        cache.observe(queries)
    with pytest.raises(
        DeviceError, match="layer 3: moment of queries on cpu, the keys on cuda:1; move one to the other"
    ):
        cache.observe_moment(second_moment(queries, 2))
    assert snapshot(cache) == before


def test_keys_that_live_apart_from_the_queries_before_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LayerCache("quantwm", layer=3)
    cache.foresee(normal(1, 2, 8, 16))
    before = snapshot(cache)

    def moved(*arguments: Any, **settings: Any) -> tuple[Any, ...]:
        keys, values, geometry = exact_chunk(*arguments, **settings)
        return keys, values, geometry._replace(device=ELSEWHERE)

    monkeypatch.setattr(cache_module, "exact_chunk", moved)
    with pytest.raises(DeviceError, match="layer 3: queries that came before on cpu, the keys on cuda:1"):
        cache.append(*chunk(0))
    assert snapshot(cache) == before


ZERO = torch.zeros(1, 2, 16, 16)


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize(
    ("moment", "error", "said"),
    [
        *((wrong, DtypeError, "moment: got .*need a QueryMoment") for wrong in (None, 5, ZERO, (ZERO, 8))),
        *((QueryMoment(ZERO + wrong, 8), DomainError, "NaN or infinite") for wrong in (torch.inf, torch.nan)),
        (QueryMoment(ZERO - torch.eye(16), 8), DomainError, "-1.0 on the diagonal"),
        *(
            (QueryMoment(ZERO, wrong), ParameterError, "queries; need a whole number above 0")  # type: ignore[arg-type]
            for wrong in (0, -1, None, "a", 1.5, torch.nan, True)
        ),
        *(
            (QueryMoment(wrong, 8), DtypeError, "moment: got")  # type: ignore[arg-type]
            for wrong in (None, [1.0], ZERO.numpy(), ZERO.int(), ZERO.double(), ZERO.bfloat16())
        ),
        *((QueryMoment(wrong, 8), ShapeError, "moment: got") for wrong in (ZERO[0], ZERO[..., :8], ZERO[:0])),
        (QueryMoment(ZERO.to("meta"), 8), DeviceError, "moment: .*meta"),
        (QueryMoment(ZERO.clone().requires_grad_(), 8), StateError, "moment: .*requires grad"),
    ],
)
def test_what_is_no_moment_is_refused_when_it_comes(
    appended: bool, moment: QueryMoment, error: type[Exception], said: str
) -> None:
    cache = LayerCache("quantwm", layer=3)
    if appended:
        cache.append(*chunk(0))
    before = snapshot(cache)
    with pytest.raises(error, match=f"layer 3: .*{said}"):
        cache.observe_moment(moment)
    assert snapshot(cache) == before
