"""A host may do with its cache tensors what hosts do; anything else is refused with what is supported."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantwm_core.errors import DomainError, QuantWMError, RangeError, ShapeError, StateError
from quantwm_core.stream import Span
from quantwm_models import LayerCache
from quantwm_models.errors import HostAttributeError, HostError
from quantwm_models.handle import Handle, read_pair
from quantwm_models.observer import CacheObserver
from quantwm_models.store import Store, pair
from tests.models.chunks import normal, snapshot

SIZE, CHUNK = 64, 16


def stores(scheme: str = "bf16") -> tuple[Store, Store, LayerCache]:
    cache = LayerCache(scheme, layer=5)
    return *pair(cache, (1, SIZE, 2, 16)), cache


def tokens(seed: int, count: int = CHUNK) -> Tensor:
    """A chunk as a host holds it, ``[B, n, heads, head_dim]``."""
    return normal(1, count, 2, 16, seed=seed)


def write(keys: Store, values: Store, start: int, seed: int, count: int = CHUNK) -> None:
    keys[:, start : start + count] = tokens(seed, count)
    values[:, start : start + count] = tokens(seed + 100, count)


def roll(keys: Store, values: Store, place: int, source: int, stop: int) -> None:
    for store in (keys, values):
        store[:, place : place + stop - source] = store[:, source:stop].clone()


def full(scheme: str = "bf16", chunks: int = 3) -> tuple[Store, Store, LayerCache]:
    keys, values, cache = stores(scheme)
    for number in range(chunks):
        write(keys, values, CHUNK * number, number)
    return keys, values, cache


def test_a_store_looks_like_its_tensor() -> None:
    keys, values, _ = stores()
    for store in (keys, values):
        assert store.shape == torch.Size((1, SIZE, 2, 16))
        assert store.shape[1] == store.size(1) == SIZE
        assert (store.ndim, store.dim(), len(store)) == (4, 4, 1)
        assert (store.dtype, store.device, store.requires_grad) == (torch.bfloat16, torch.device("cpu"), False)
    handle = keys[:, 3:9]
    assert (handle.shape, handle.size(1), len(handle), handle.dtype) == (
        torch.Size((1, 6, 2, 16)),
        6,
        1,
        torch.bfloat16,
    )
    assert "keys of layer 5" in repr(keys)
    assert "values of layer 5, slots 3 to 9" in repr(values[:, 3:9])


def test_chunks_are_appended_when_both_halves_have_come() -> None:
    keys, values, cache = stores()
    keys[:, 0:16] = tokens(0)
    assert cache.tokens == 0
    with pytest.raises(StateError, match="layer 5: keys of slots 0 to 16 were written, their values not yet"):
        keys[:, 0:16].tensor()
    values[:, 0:16] = tokens(100)
    assert cache.tokens == 16
    assert torch.equal(keys[:, 0:16].tensor(), tokens(0))
    assert torch.equal(values[:, 4:9].tensor(), tokens(100)[:, 4:9])


def test_the_first_half_may_be_reused_by_the_host_before_the_second_comes() -> None:
    keys, values, _ = stores()
    buffer = tokens(0)
    keys[:, 0:16] = buffer
    buffer.zero_()
    values[:, 0:16] = tokens(100)
    assert torch.equal(keys[:, 0:16].tensor(), tokens(0))


def test_halves_of_any_strides_lie_alike_in_the_cache() -> None:
    cache = LayerCache("bf16")
    keys, values = pair(cache, (1, 64, 2, 16))
    turned, whole = torch.randn(1, 2, CHUNK, 16).bfloat16(), torch.randn(1, CHUNK, 2, 48).bfloat16()
    keys[:, :CHUNK], values[:, :CHUNK] = turned.transpose(1, 2), whole[..., 16:32]
    (held,) = cache.contents.exact
    assert held.keys.stride() == held.values.stride()
    assert held.keys.transpose(1, 2).is_contiguous()
    assert torch.equal(held.keys, turned)
    assert torch.equal(held.values, whole[..., 16:32].transpose(1, 2))


def test_denoising_steps_overwrite_and_the_next_chunk_seals() -> None:
    keys, values, cache = stores("rtn")
    for seed in (1, 2, 3):
        write(keys, values, 0, seed)
        assert cache.stream.active_span == Span(0, 16)
    assert torch.equal(keys[:, 0:16].tensor(), tokens(3))
    write(keys, values, 16, 4)
    assert cache.report().chunks_sealed == 1
    assert cache.stream.active_span == Span(16, 32)


def test_a_handle_follows_the_store_as_a_slice_does_and_a_clone_does_not() -> None:
    keys, values, _ = full()
    view, copy = keys[:, 32:48], keys[:, 32:48].clone()
    assert torch.equal(copy.tensor(), tokens(2))
    write(keys, values, 32, 9)
    assert torch.equal(view.tensor(), tokens(9))
    with pytest.raises(StateError, match="changed after this was cloned"):
        copy.tensor()
    with pytest.raises(StateError, match="changed after this was cloned"):
        keys[:, 0:16] = copy
    assert view.detach() is view


def test_a_clone_that_is_written_is_a_tensor_of_its_own() -> None:
    keys, values, cache = full()
    before = snapshot(cache)
    clone, other = keys[:, 16:48].clone(), keys[:, 16:48].clone()
    clone[:, :CHUNK] = 2 * clone[:, :CHUNK]
    expected = torch.cat([2 * tokens(1), tokens(2)], dim=1)
    assert torch.equal(clone.tensor(), expected)
    assert snapshot(cache) == before
    assert (clone.changed, other.changed) == (True, False)
    copy = clone.clone()
    copy[:] = 0
    assert torch.equal(clone.tensor(), expected)
    # It is no range of the cache any more: setting it is a write, which the sealed slots refuse, not a roll.
    keys[:, 16:48] = clone
    with pytest.raises(RangeError, match="a write to slots 16 to 48"):
        values[:, 16:48] = torch.zeros(1, 32, 2, 16)
    write(keys, values, 48, 9)
    assert torch.equal(clone.tensor(), expected)


def test_an_empty_range_is_an_empty_tensor() -> None:
    keys, _, _ = full()
    assert torch.cat([keys[:, 16:16].tensor(), tokens(0)], dim=1).shape == (1, CHUNK, 2, 16)
    assert stores()[0][:, 0:0].tensor().shape == (1, 0, 2, 16)


def test_tensors_that_are_handed_out_are_the_hosts_own() -> None:
    keys, values, _ = full()
    kept = keys[:, 0:16].tensor()
    write(keys, values, 32, 9)
    values[:, 0:48].tensor().zero_()
    assert torch.equal(kept, tokens(0))
    assert torch.equal(values[:, 0:16].tensor(), tokens(100))


@pytest.mark.parametrize(
    "bounds", [(torch.tensor(16), torch.tensor(32)), (np.int64(16), np.int32(32)), (torch.tensor([16]), 32)]
)
def test_bounds_may_be_any_integers(bounds: tuple[int, int]) -> None:
    keys, values, cache = stores()
    write(keys, values, 0, 0)
    keys[:, bounds[0] : bounds[1]] = tokens(1)
    values[:, bounds[0] : bounds[1]] = tokens(101)
    assert cache.tokens == 32
    assert torch.equal(keys[:, bounds[0] : bounds[1]].tensor(), tokens(1))


def test_open_negative_and_excessive_bounds_mean_what_they_mean_for_a_tensor() -> None:
    keys, _, _ = full(chunks=4)
    whole = keys[:, :].tensor()
    for part in (slice(None, 20), slice(50, None), slice(-10, None), slice(60, 999), slice(0, -60)):
        assert torch.equal(keys[:, part].tensor(), whole[:, part])
        assert torch.equal(keys[:, part, :, :].tensor(), whole[:, part])
        assert torch.equal(keys[:, part, ...].tensor(), whole[:, part])
    assert keys[:, 20:10].shape == (1, 0, 2, 16)


PARTS = st.sampled_from([slice(None), slice(0, 1), slice(0, 2), slice(3, 40), Ellipsis])


@given(st.lists(PARTS, max_size=6).map(tuple))
def test_an_index_means_what_it_means_for_a_tensor_or_is_refused(key: Any) -> None:
    keys, _, _ = full(chunks=4)
    whole = keys[:, :].tensor()
    try:
        handle = keys[key]
    except HostError:
        return
    assert torch.equal(handle.tensor(), whole[key])


@pytest.mark.parametrize(
    "key", [(..., slice(3, 9), slice(None), slice(None)), (slice(None), slice(3, 9), ..., slice(None))]
)
def test_an_ellipsis_may_stand_for_what_is_taken_whole(key: Any) -> None:
    keys, _, _ = full(chunks=4)
    assert torch.equal(keys[key].tensor(), keys[:, :].tensor()[key])


def test_a_roll_evicts_without_moving_or_sealing_again() -> None:
    keys, values, cache = full("rtn", chunks=4)
    before = [unit.keys.arrays["codes"].data_ptr() for unit in cache.chunks]
    roll(keys, values, 4, 20, 64)
    assert cache.stream.live == (Span(0, 4), Span(20, 64))
    assert [unit.keys.arrays["codes"].data_ptr() for unit in cache.chunks][:3] == before
    write(keys, values, 48, 7)
    assert cache.stream.live == (Span(0, 4), Span(20, 80))
    assert torch.equal(keys[:, 48:64].tensor(), tokens(7))
    assert cache.report().chunks_sealed == 4


def test_a_roll_of_nothing_evicts_all_that_lies_behind_the_sink() -> None:
    keys, values, cache = full()
    roll(keys, values, 4, 48, 48)
    assert cache.stream.live == (Span(0, 4),)
    write(keys, values, 4, 8)
    assert cache.tokens == 20


def test_halves_may_come_in_any_order() -> None:
    keys, values, cache = full("bf16", chunks=4)
    for store, seed in ((values, 108), (keys, 8)):
        store[:, 0:48] = store[:, 16:64].clone()
        store[:, 48:64] = tokens(seed)
    assert cache.stream.live == (Span(16, 80),)
    assert torch.equal(keys[:, 48:64].tensor(), tokens(8))
    assert torch.equal(values[:, 48:64].tensor(), tokens(108))


def test_slot_zero_is_a_new_video() -> None:
    keys, values, cache = full("quantwm")
    write(keys, values, 0, 5, count=20)
    assert cache.stream.ends == (20,)
    assert cache.report().chunks_sealed == 0
    assert cache.queries.past is None
    assert torch.equal(keys[:, 0:20].tensor(), tokens(5, 20))


def test_a_copy_from_another_cache_is_a_write() -> None:
    keys, _, _ = full()
    others = stores()
    others[0][:, 0:16] = keys[:, 16:32]
    others[1][:, 0:16] = others[0].halves.cache.tokens + tokens(3)
    assert torch.equal(others[0][:, 0:16].tensor(), tokens(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_host_gets_its_own_number_format(dtype: torch.dtype) -> None:
    keys, values = pair(LayerCache("bf16"), (1, SIZE, 2, 16), dtype)
    for store in (keys, values):
        store[:, 0:16] = tokens(0).to(dtype)
    assert keys[:, 0:16].tensor().dtype == dtype
    assert read_pair(keys[:, 0:16], values[:, 0:16])[1].dtype == dtype
    assert torch.equal(keys[:, 0:16].tensor(), tokens(0).to(dtype))


def test_a_part_of_a_range_is_a_range() -> None:
    keys, _, _ = full()
    handle, tensor = keys[:, 4:40], keys[:, 4:40].tensor()
    for part in (slice(0, 16), slice(-30, None), slice(30, 99), slice(7, 3)):
        smaller = handle[:, part]
        assert isinstance(smaller, Handle)
        assert torch.equal(smaller.tensor(), tensor[:, part])
        assert smaller.shape == tensor[:, part].shape
    for other in (
        (0,),
        (slice(None), 3),
        (slice(None), slice(0, 8, 2)),
        (0, slice(0, 8)),
        (..., slice(0, 3)),
        (np.array([0, 0]), slice(0, 3)),
        ([0, 0], slice(0, 3)),
    ):
        assert torch.equal(handle[other], tensor[other])
    clone = handle.clone()
    stale = clone[:, :4]
    write(*keys_and_values(keys), 48, 9)
    with pytest.raises(StateError, match="the cache changed after this was cloned"):
        stale.tensor()
    with pytest.raises(StateError, match="the cache changed after this was cloned"):
        clone[:, :4].tensor()


def keys_and_values(keys: Store) -> tuple[Store, Store]:
    return keys, Store(keys.halves, "values", keys.shape, keys.dtype, keys.device)


def test_a_turned_range_is_a_transposed_tensor() -> None:
    keys, _, _ = full()
    handle, tensor = keys[:, 8:40], keys[:, 8:40].tensor()
    with pytest.raises(IndexError, match="range"):
        handle.transpose(1, 6)
    for turned in (handle.transpose(1, 2), handle.transpose(-2, 1), handle.transpose(dim0=2, dim1=-3)):
        assert isinstance(turned, Handle)
        assert turned.shape == tensor.transpose(1, 2).shape
        assert torch.equal(turned.tensor(), tensor.transpose(1, 2))
        assert torch.equal(turned.clone().tensor(), tensor.transpose(1, 2))
        assert torch.equal(turned[:, :, 3:5], tensor.transpose(1, 2)[:, :, 3:5])
        back = turned.transpose(1, 2)
        assert isinstance(back, Handle)
        assert torch.equal(back.tensor(), tensor)
    assert torch.equal(handle.transpose(2, 3), tensor.transpose(2, 3))
    clone = handle.clone()
    clone[:, :2] = 0
    assert torch.equal(clone.transpose(1, 2), clone.tensor().transpose(1, 2))
    with pytest.raises(ShapeError, match="slots 0 to 32 were set to a tensor of shape"):
        keys[:, 0:32] = handle.transpose(1, 2)


def heads_first(count: int, seed: int) -> Tensor:
    """Queries ``[B, heads, n, head_dim]``."""
    return normal(1, 2, count, 16, seed=seed)


def test_what_waits_stays_where_an_observer_failed_after_the_window_had_rolled() -> None:
    class Failing(CacheObserver):
        def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
            raise LookupError

    cache = LayerCache("bf16")
    keys, values = pair(cache, (1, 64, 2, 16))
    for number in range(4):
        write(keys, values, CHUNK * number, number)
    cache.observers.append(Failing())
    keys[:, 0 : 64 - CHUNK] = keys[:, CHUNK:64].clone()
    keys[:, 64 - CHUNK : 64] = torch.ones(1, CHUNK, 2, 16)
    with pytest.raises(LookupError):
        values[:, 0 : 64 - CHUNK] = values[:, CHUNK:64].clone()
    assert cache.tokens == 64 - CHUNK
    values[:, 64 - CHUNK : 64] = torch.ones(1, CHUNK, 2, 16)
    assert cache.tokens == 64
    assert not cache.half_written


class Told(CacheObserver):
    """Keeps what attention was told of."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def attended(self, cache: LayerCache, queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> None:
        assert queries.shape == (1, 2, CHUNK, 16)
        assert keys.shape == values.shape == (1, 2, sum(span.tokens for span in spans), 16)
        self.spans.extend(spans)


@pytest.mark.parametrize("scheme", ["bf16", "quantwm"])
def test_pytorchs_attention_reads_turned_ranges_and_the_cache_learns_from_its_queries(scheme: str) -> None:
    told = Told()
    cache = LayerCache(scheme, observers=[told])
    keys, values = pair(cache, (1, SIZE, 2, 16))
    for number in range(3):
        write(keys, values, CHUNK * number, number)
    q = heads_first(CHUNK, seed=7)
    k, v = (store[:, 3:48].transpose(1, 2) for store in (keys, values))
    exact = scaled_dot_product_attention(q, k.tensor(), v.tensor(), scale=0.5)
    assert torch.equal(scaled_dot_product_attention(q, k, v, scale=0.5), exact)
    assert torch.equal(scaled_dot_product_attention(query=q, value=v, key=k, scale=0.5), exact)
    assert told.spans == [(3, 16), (16, 32), (32, 48)] * 2
    moment = cache.queries.folded().past
    assert (moment is not None) == (scheme == "quantwm")
    assert moment is None or moment.queries == 2 * CHUNK


def test_pytorchs_attention_on_anything_else_sees_tensors() -> None:
    keys, values, cache = full("quantwm")
    q = heads_first(CHUNK, seed=7)
    k, v = (store[:, 0:48].transpose(1, 2) for store in (keys, values))
    exact = scaled_dot_product_attention(q, k.tensor(), v.tensor())
    changed: Any = keys[:, 0:48].clone()
    changed[:, :1] = 0
    assert torch.equal(scaled_dot_product_attention(q, k, v.tensor()), exact)
    assert not torch.equal(scaled_dot_product_attention(q, changed.transpose(1, 2), v), exact)
    assert cache.queries.folded().past is None
    # Tokens in the place of heads, as they lie: no queries of this cache.
    rows: Any = [store[:, 0:16] for store in (keys, values)]
    scaled_dot_product_attention(q.transpose(1, 2), *rows)
    assert cache.queries.folded().past is None


def test_torch_functions_see_tensors() -> None:
    keys, values, _ = full()
    handle: Any = keys[:, 8:24]
    exact = torch.cat([tokens(0), tokens(1)], 1)[:, 8:24]
    assert torch.equal(torch.cat([handle, tokens(9)], 1), torch.cat([exact, tokens(9)], 1))
    assert torch.equal(torch.stack((handle, handle)), torch.stack((exact, exact)))
    assert torch.equal(handle.transpose(1, 2), exact.transpose(1, 2))
    assert torch.equal(handle.float().contiguous(), exact.float())
    assert torch.equal(handle[:, 2:5, 1], exact[:, 2:5, 1])
    assert torch.equal(tokens(9) * handle, tokens(9) * exact)
    assert torch.equal(handle * 2, exact * 2)
    assert torch.equal(2 - handle, 2 - exact)
    assert torch.equal(handle < tokens(9), exact < tokens(9))
    assert torch.equal(handle == 0, exact == 0)
    assert not (handle != exact).any()
    assert len({handle, keys[:, 8:24]}) == 2
    query = normal(1, 2, 3, 16)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, handle.transpose(1, 2), values[:, 8:24].transpose(1, 2)
    )
    assert attended.shape == query.shape
    target = torch.zeros(1, 20, 2, 16, dtype=torch.bfloat16)
    target[:, 2:18] = handle
    assert torch.equal(target[:, 2:18], exact)
    assert torch.equal(torch.clone(handle), exact)


SUPPORTED = r"supported: \.shape, .*store\[:, a:b\] = tensor"


def refused(call: Callable[[Store, Store], object], error: type[Exception], message: str) -> None:
    """The call raises the error, and neither cache nor stores remember it."""
    keys, values, cache = full()
    before = snapshot(cache)
    with pytest.raises(error, match=message):
        call(keys, values)
    assert snapshot(cache) == before


def set_index(index: object, value: object) -> Callable[[Store, Store], object]:
    return lambda keys, _: keys.__setitem__(index, value)


@pytest.mark.parametrize(
    "index",
    [0, slice(0, 1), (slice(None), 3), (0, slice(0, 4)), (slice(None), slice(0, 8, 2)), (slice(None), slice(0, 4), 1),
     (slice(None), torch.arange(4)), (slice(None), slice(0.0, 4.0)), (slice(None), None), Ellipsis,
     (slice(None), slice(torch.arange(2), 4)), "k", (), (...,), (..., slice(0, 4)), (..., slice(0, 1), slice(None)),
     (slice(0, 1), ..., slice(None)), (..., slice(0, 4), ...), (slice(None), slice(0, 4), ..., ...), (slice(None),) * 5,
     (np.zeros(2, int), slice(0, 4)), (slice(None), slice(0, 4), np.arange(2)), (slice(None), np.arange(4)),
     (slice(np.arange(2), None), slice(0, 4)), (slice(None), slice(0, 4, np.ones(2, int))), (slice(None), slice(0, 4, 0)),
     ([0, 0], slice(0, 4)), (slice(None), [0, 1]), (True, slice(0, 4)), (slice(None), slice(0, 4), False), [0], True],
)  # fmt: skip
def test_other_indices_are_refused(index: object) -> None:
    refused(lambda keys, _: keys[index], HostError, SUPPORTED)
    refused(set_index(index, tokens(0)), HostError, SUPPORTED)


@pytest.mark.parametrize("value", [0, 1.5, None, [1], np.zeros((1, 16, 2, 16), np.float32)])
def test_other_values_are_refused(value: object) -> None:
    refused(set_index((slice(None), slice(48, 64)), value), HostError, f"set to a .*{SUPPORTED}")


@pytest.mark.parametrize("count", [15, 17, 1])
def test_values_that_do_not_fit_are_refused(count: int) -> None:
    refused(
        set_index((slice(None), slice(48, 64)), tokens(0, count)),
        ShapeError,
        r"slots 48 to 64 .* need \[1, 16, 2, 16\]",
    )


def test_gradients_are_refused() -> None:
    value = tokens(0).requires_grad_(True)
    refused(set_index((slice(None), slice(48, 64)), value), StateError, "layer 5, keys: .*requires grad")


def put(store: Store, start: int, stop: int, value: object) -> object:
    store[:, start:stop] = value
    return store


def both(keys: Store, values: Store, part: slice, key: object, value: object) -> None:
    keys[:, part] = key
    values[:, part] = value


REFUSED: list[tuple[Callable[[Store, Store], object], type[QuantWMError], str]] = [
    (lambda k, v: both(k, v, slice(16, 32), tokens(0), tokens(0)), RangeError, "slots 16 to 32; writable are .*32 to 48"),
    (lambda k, v: both(k, v, slice(40, 56), tokens(0), tokens(0)), RangeError, "the others are sealed"),
    (lambda k, v: both(k, v, slice(50, 60), tokens(0, 10), tokens(0, 10)), RangeError, "slots 50 to 60"),
    (lambda k, v: both(k, v, slice(0, 16), k[:, 16:32].clone(), v[:, 16:32].clone()), RangeError, r"up to the newest \(48\)"),
    (lambda k, v: both(k, v, slice(16, 48), k[:, 0:32].clone(), v[:, 0:32].clone()), RangeError, "the roll of a window"),
    (lambda k, _: put(k, 0, 8, k[:, 0:16]), ShapeError, "does not fit slots 0 to 8"),
    (lambda k, v: (put(k, 48, 64, tokens(0)), put(v, 48, 60, tokens(0, 12))),
     StateError, "a write to slots 48 to 64 with its keys and a write to slots 48 to 60 with its values"),
    (lambda k, v: (put(k, 0, 32, k[:, 16:48].clone()), put(v, 48, 64, tokens(0))),
     StateError, "a move of slots 16 to 48 to 0 to 32 with its keys"),
    (lambda k, v: (put(k, 0, 16, k[:, 16:32].clone()), put(k, 48, 64, tokens(0)), put(v, 0, 16, v[:, 16:32].clone())),
     RangeError, r"up to the newest \(48\)"),
    (lambda k, _: [put(k, 48, 64, tokens(0)) for _each in range(3)], StateError, "without the other half"),
    (lambda k, _: k[:, 40:60].tensor(), RangeError, "window tokens 40 to 60"),
    (lambda k, v: read_pair(k[:, 0:8], v[:, 0:9]), StateError, "not the two halves of one range"),
    (lambda k, _: read_pair(k[:, 0:8], full()[1][:, 0:8]), StateError, "not the two halves of one range"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_no_host_of_the_lineage_does_is_refused(
    call: Callable[[Store, Store], object], error: type[QuantWMError], message: str
) -> None:
    refused(call, error, message)


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_a_refused_call_leaves_no_half_behind(
    call: Callable[[Store, Store], object], error: type[QuantWMError], message: str
) -> None:
    del message
    keys, values, cache = full()
    with pytest.raises(error):
        call(keys, values)
    assert not cache.half_written
    write(keys, values, 48, 3)
    assert cache.tokens == 64
    assert torch.equal(keys[:, 48:64].tensor(), tokens(3))


def test_a_chunk_that_cannot_be_sealed_leaves_store_and_cache_usable() -> None:
    keys, values, cache = full("quantwm")
    keys[:, 32:48] = tokens(2) * float("nan")
    values[:, 32:48] = tokens(102)
    with pytest.raises(DomainError, match="layer 5: chunk 2: keys"):
        write(keys, values, 48, 3)
    assert cache.tokens == 48
    write(keys, values, 32, 2)
    write(keys, values, 48, 3)
    assert cache.report().chunks_sealed == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.zero_(),
        lambda store: store.data_ptr(),
        lambda store: store.transpose(1, 2),
        lambda store: store.clone(),
    ],
)
def test_a_whole_store_has_no_tensor_methods(call: Callable[[Store], object]) -> None:
    with pytest.raises(HostAttributeError, match=SUPPORTED):
        call(full()[0])
    assert not hasattr(full()[0], "zero_")


@pytest.mark.parametrize("call", [lambda s: torch.cat([s, s]), torch.zeros_like, torch.clone])
def test_no_torch_function_takes_a_whole_store(call: Callable[[Store], object]) -> None:
    with pytest.raises(HostError, match=rf"to a whole cache store; .*{SUPPORTED}"):
        call(full()[0])


@pytest.mark.parametrize(
    "call", [lambda s: s + 1, lambda s: 2 * s, lambda s: s @ s, lambda s: -s, lambda s: tokens(0) - s, lambda s: s > 0]
)
def test_arithmetic_on_a_whole_store_is_refused(call: Callable[[Any], object]) -> None:
    with pytest.raises(HostError, match=SUPPORTED):
        call(full()[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda handle: handle.zero_(),
        lambda handle: handle.copy_(handle),
        lambda handle: handle.__setitem__(slice(None), 0),
        lambda handle: torch.add(handle, 1, out=torch.zeros(1)),
        torch.nn.functional.relu_,
        lambda handle: handle.no_such_thing,
    ],
)
def test_a_range_cannot_be_written_or_asked_for_anything(call: Callable[[Handle], object]) -> None:
    with pytest.raises(HostError, match=SUPPORTED):
        call(full()[0][:, 0:16])


def test_a_store_of_another_rank_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"need \[B, tokens, heads, head_dim\]"):
        pair(LayerCache("bf16"), (1, 64, 32))


def test_a_write_that_is_repeated_after_its_twin_was_refused_counts_and_the_first_does_not() -> None:
    keys, values, cache = stores()
    write(keys, values, 0, 1)
    keys[:, CHUNK : 2 * CHUNK] = tokens(7)
    with pytest.raises(QuantWMError):
        values[:, CHUNK : 2 * CHUNK] = torch.randn(1, CHUNK, 2, 14)
    write(keys, values, CHUNK, 9)
    got, _ = cache.read(CHUNK, 2 * CHUNK)
    assert torch.equal(got, tokens(9).to(torch.bfloat16).transpose(1, 2))
