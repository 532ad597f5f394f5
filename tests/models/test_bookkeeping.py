"""A snapshot whose state was damaged is refused where no cache can be like that."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantwm_core.errors import FormatError, QuantWMError
from quantwm_models import snapshot
from tests.models.worlds import changed, layers, refused, value, world


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of two layers, three units and an active chunk."""
    return world(tmp_path / "world")


def entries(tree: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all that a JSON tree holds."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, each in pairs:
        yield (*where, key)
        yield from entries(each, (*where, key))


def put(tree: Any, where: tuple[Any, ...], junk: Any) -> None:
    """Put something else where ``where`` leads in a JSON tree."""
    *inner, last = where
    for key in inner:
        tree = tree[key]
    tree[last] = junk


# Four chunks that end at 16, 33, 51 and 67, of which the last is active.
STREAM, UNIT = ("caches", 1, "stream"), ("caches", 1, "units", 0)
JUNK: dict[tuple[Any, ...], tuple[list[Any], str]] = {
    ("adapter",): ([None, 0, [], False], "adapter: got"),
    ("caches", 1, "place", 1): ([1.0, True, "1"], "place: got"),
    ("caches", 1, "device"): ([None, 0, []], "device: got"),
    ("caches", 1, "geometry"): ([[True, 2, 16, 16], [1, 2, 16, 0], [1.0, 2, 16, 16], {}], "geometry: got"),
    (*STREAM, "ends"): (
        [[], [16, 33, 51], [33, 16, 51, 67], [16, 16, 51, 67], [0, 33, 51, 67], {}, [16, 33, 51, 67.0], [True, 33, 51, 67]],
        "ends?: got|live: got|chunks of|active: tokens|sealed_end: got",
    ),
    (*STREAM, "active"): (["x", [], 0, 1, None, float("nan"), False], "active: got|sealed_end: got"),
    (*STREAM, "live"): (
        [[], [[0, 66]], [[0, 68]], [[-1, 67]], [[16, 67]], [[0, 20], [20, 67]], [[0, 30], [29, 67]], [[9, 9], [0, 67]]],
        "live: got|active: tokens|are there, and none of them|are not the live tokens",
    ),
    (*STREAM, "units"): ([[], [[0, 16]], [[0, 16], [16, 33]], [[0, 51]], [[16, 33], [0, 16], [33, 51]], {}], "units"),
    (*STREAM, "sealed_end"): ([0, -1, True, 16, 50, 52, 67, 10**12, 51.0, None], "sealed_end: got"),
    ("caches", 1, "exact", 0, "span"): ([[51, 66], [52, 67], [50, 67], [51, 51], [51, True]], "exact|BF16 tokens"),
    ("caches", 1, "exact"): ([[], {}], "BF16 tokens|exact: got"),
    ("caches", 1, "groups"): ([[], {}], "groups: got"),
    ("caches", 1, "groups", 0, "start"): ([-1, 0, 16, 67, True, 10**12, 10**30], "groups: got"),
    ("caches", 1, "past", "queries"): ([-1, True, 1.5, 10**30, float("nan")], "queries: got"),
    ("caches", 1, "chunks_sealed"): ([-1, 0, 4, 3.0, 10**12], "chunks_sealed"),
    ("caches", 1, "chunks_evicted"): ([-1, 1, False, 10**12], "chunks_evicted"),
    ("caches", 1, "seal_seconds"): ([-1, float("nan"), float("inf"), 10**400, True, None], "seal_seconds: got"),
    (*UNIT, "start"): ([-1, 1, False, 16], "start: got|units .* are there"),
    (*UNIT, "version"): ([-1, 0, 2, 10**12, True, "1"], "version: got"),
    (*UNIT, "keys", "method"): (["rtn", "bf16", 3, []], "keys: "),
    (*UNIT, "keys", "parameters"): ([{}, [], None, {"rank": 8}], "keys: "),
    (*UNIT, "values", "parameters", "rank"): ([4, 10**12, 8.0, None], "values: "),
    (*UNIT, "values", "shape"): ([[True, 2, 16, 16], [1, 2, 0, 16], [1, 2, 16], [1, 2, 16, 16, 1]], "shape|unit's values|damaged"),
    (*UNIT, "values", "names"): ([["x"], [], {}], "values: |damaged|names: got"),
}  # fmt: skip


@pytest.mark.parametrize("where", JUNK, ids=lambda where: ".".join(map(str, where)))
def test_what_cannot_be_so_is_refused(where: tuple[Any, ...], saved: Path) -> None:
    caches, blob = layers(window=96), saved.read_bytes()
    junks, message = JUNK[where]
    for junk in junks:
        saved.write_bytes(blob)
        changed(saved, lambda state, junk=junk: put(state, where, junk))  # type: ignore[misc]  # the loop's own
        refused(caches, saved, FormatError, message)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, 10**6),
    junk=st.sampled_from(
        [None, -1, 0, 1, 7, 0.5, "x", [], {}, [1, 2], 10**12, 10**30, True, False, float("nan"), "fewer", "next"]
    ),
)
def test_a_damaged_state_is_refused_or_its_live_tokens_are_what_they_were(place: int, junk: Any, saved: Path) -> None:
    blob, caches, sound = saved.read_bytes(), layers(window=96), layers(window=96)
    snapshot.load(sound, saved)

    def damage(state: dict[str, Any]) -> None:
        places = list(entries(state))
        where = places[place % len(places)]
        old: Any = state
        for key in where:
            old = old[key]
        if junk == "fewer" and isinstance(old, list):
            old.pop()
        elif junk == "next" and isinstance(old, int):
            put(state, where, old + 1)
        else:
            put(state, where, junk)

    changed(saved, damage)
    try:
        with contextlib.suppress(QuantWMError):
            snapshot.load(caches, saved)
            for cache, whole in zip(caches, sound, strict=True):
                came, want = value(cache), value(whole)
                assert all(came[name] == want[name] for name in ("units", "sealed", "exact", "counters"))
                # Oldest tokens that are not live any more can have been evicted.
                for half, other in zip(cache.read(), whole.read(), strict=True):
                    assert torch.equal(half, other[:, :, whole.tokens - cache.tokens :])
                cache.report()
        assert len({cache.tokens > 0 for cache in caches}) == 1
    finally:
        saved.write_bytes(blob)
