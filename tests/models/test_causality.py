"""Sealing uses the past only: the future changes no past byte, and a unit's own queries do not touch it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantwm_core import methods
from quantwm_core.errors import StateError
from quantwm_kernels.statistics import QueryMoment, merge, second_moment
from quantwm_models import LayerCache
from quantwm_models.causality import CausalQueries
from tests.models.chunks import bits, chunk, normal

CHUNKS = 6
OTHERS = [name for name in methods.names() if name not in ("bf16", "kivi", "quantwm")]


def sealed_bytes(
    spoil_queries: int | None = None,
    spoil_keys: int | None = None,
    *,
    per_seal: int = 1,
    values: str = "quantwm",
    keys: str = "quantwm",
) -> dict[int, list[bytes]]:
    """Bytes of every sealed unit by start, with the queries or the keys of one chunk replaced by others."""
    more: dict[str, Any] = {"residual_length": 10} if values == "kivi" else {}
    cache = LayerCache(keys, chunks_per_seal=per_seal, values=values, **more)
    for number in range(CHUNKS):
        cache.append(*chunk(500 if number == spoil_keys else number, 20))
        for call in range(2):
            seed = 600 if number == spoil_queries else 10 * number
            cache.observe(normal(1, 2, 12, 16, seed=seed + call))
    cache.seal()
    return {
        unit.start: [bits(each) for each in (*unit.keys.arrays.values(), *unit.values.arrays.values())]
        for unit in cache.chunks
    }


@pytest.mark.parametrize("per_seal", [1, 2])
@pytest.mark.parametrize("values", ["quantwm", "kivi"])
@pytest.mark.parametrize("number", range(CHUNKS))
def test_queries_of_a_chunk_reach_only_units_that_begin_after_it(number: int, values: str, per_seal: int) -> None:
    plain, other = (sealed_bytes(spoil, per_seal=per_seal, values=values) for spoil in (None, number))
    assert plain.keys() == other.keys()
    assert len(plain) == CHUNKS // per_seal
    changed = {start for start in plain if plain[start] != other[start]}
    after = {start for start in plain if start >= 20 * (number + 1)}
    assert changed <= after
    # The very next unit after the chunk's group does learn from them, unless units end early.
    if values == "quantwm":
        group_end = 20 * per_seal * (number // per_seal + 1)
        assert changed == {start for start in plain if start >= group_end}


@pytest.mark.parametrize("number", range(CHUNKS))
@pytest.mark.parametrize("name", OTHERS)
def test_neither_queries_nor_keys_reach_back_whatever_the_method(name: str, number: int) -> None:
    plain = sealed_bytes(keys=name, values=name)
    assert plain == sealed_bytes(keys=name, values=name)  # the same stream gives the same bytes twice
    asked, written = (sealed_bytes(*spoiled, keys=name, values=name) for spoiled in ((number, None), (None, number)))
    assert plain.keys() == asked.keys() == written.keys()
    changed = {start for start in plain if plain[start] != asked[start]}
    assert changed <= {start for start in plain if start >= 20 * (number + 1)}
    if name == "klt":
        assert changed == {start for start in plain if start >= 20 * (number + 1)}
    if not methods.get(name).uses_queries("keys"):
        assert not changed
    changed = {start for start in plain if plain[start] != written[start]}
    assert min(changed, default=20 * number) == 20 * number
    assert changed or 20 * number not in plain  # the newest tokens of some methods stay as they are


@pytest.mark.parametrize("number", range(CHUNKS))
def test_keys_of_a_chunk_change_no_earlier_unit(number: int) -> None:
    plain, other = sealed_bytes(), sealed_bytes(spoil_keys=number)
    assert {start for start in plain if plain[start] != other[start]} == {20 * number}


def test_the_first_unit_has_no_statistics_and_the_second_has() -> None:
    cache = LayerCache("quantwm")
    for number in range(3):
        cache.append(*chunk(number, 20))
        cache.observe(normal(1, 2, 12, 16, seed=number))
    first, second = cache.chunks
    assert "basis" not in first.keys.arrays
    assert second.keys.arrays["basis"].any()


def test_all_calls_of_a_chunk_count_and_every_query_equally() -> None:
    cache = LayerCache("quantwm")
    queries = [normal(1, 4, count, 16, seed=count) for count in (3, 8)]
    cache.append(*chunk(0))
    for call in queries:
        cache.observe(call)
    cache.append(*chunk(1))
    past = cache.queries.past
    assert past is not None
    expected = second_moment(torch.cat(queries, 2), 2)
    assert past.queries == expected.queries == 22
    assert torch.allclose(past.mean, expected.mean, rtol=1e-5, atol=1e-6)


def test_a_decay_forgets_at_each_seal() -> None:
    cache = LayerCache("quantwm", decay=0.25)
    moments = [second_moment(normal(1, 2, 5, 16, seed=number), 2) for number in range(3)]
    for number in range(3):
        cache.append(*chunk(number))
        cache.observe(normal(1, 2, 5, 16, seed=number))
    cache.append(*chunk(3))
    expected = merge(merge(moments[0], moments[1], 0.25), moments[2], 0.25)
    past = cache.queries.past
    assert past is not None
    assert torch.equal(past.mean, expected.mean)


def moment(value: float) -> QueryMoment:
    return QueryMoment(torch.full((1, 1, 1, 1), value), 1)


@pytest.mark.parametrize(
    ("token", "past", "left"), [(0, None, 3), (9, None, 3), (10, 1.0, 2), (19, 1.0, 2), (20, 2.0, 1)]
)
def test_what_came_before_a_token(token: int, past: float | None, left: int) -> None:
    queries = CausalQueries()
    for start, value in ((0, 1.0), (10, 3.0), (20, 100.0)):
        queries = queries.begin(start).observe(moment(value))
    before = queries.before(token)
    assert (None if before.past is None else before.past.mean.item()) == past
    assert len(before.groups) == left
    assert len(queries.groups) == 3


def test_groups_without_queries_leave_the_past_alone() -> None:
    queries = CausalQueries().begin(0).begin(5).observe(moment(2.0)).begin(9)
    assert queries.before(5).past is None
    assert queries.before(9).past == moment(2.0)
    assert queries.nbytes == 4


def test_queries_before_any_chunk_have_no_place() -> None:
    with pytest.raises(StateError, match="append keys and values first"):
        CausalQueries().observe(moment(1.0))


def test_the_same_stream_gives_the_same_bytes_twice() -> None:
    run: Callable[[], dict[int, list[bytes]]] = sealed_bytes
    assert run() == run()
