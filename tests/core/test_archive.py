from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import archive, methods, second_moment
from quantwm_core.archive import Dump
from quantwm_core.chunk import KINDS, SealedChunk
from quantwm_core.domain import BF16
from quantwm_core.errors import DomainError, DtypeError, FormatError, ParameterError, ShapeError
from quantwm_core.method import Scheme, decode, scheme
from quantwm_core.statistics import QueryStatistics
from tests.core import strategies
from tests.core.compare import assert_arrays, assert_bits

SCHEMES = {
    "quantwm": scheme("quantwm"),
    "paper": scheme("quantwm", chunks_per_seal=2, centroids=8),
    "warm": scheme("quantwm", warm_start=True, decay=0.5),
    "full": scheme("quantwm", metric="full", rank=3),
    "sparse": scheme("quantwm", threshold=0.3),
    "kivi": scheme("kivi", residual_length=13),
    "mixed": scheme("quantwm", values="kivi", residual_length=5),
    "qvg": scheme("qvg", stages=2),
    "rtn": scheme("rtn", granularity="channel"),
    "bf16": scheme("bf16", chunks_per_seal=3),
}
EVERY = pytest.mark.parametrize("name", SCHEMES)


def _dump(tokens: int = 70, query_heads: int = 4, seed: int = 0) -> Dump:
    keys, values = (strategies.unit(("channels", "normal"), seed + i, tokens, 32) for i in range(2))
    queries = strategies.unit(("channels",) * query_heads, seed + 2, tokens, 32)
    return Dump(keys, values, queries)


def _assert_same(got: SealedChunk, want: SealedChunk) -> None:
    assert (got.start, got.stop) == (want.start, want.stop)
    for kind in KINDS:
        assert_arrays(f"tokens {got.start}, {kind}", dict(getattr(got, kind).arrays), dict(getattr(want, kind).arrays))


@EVERY
@pytest.mark.parametrize(("tokens", "chunk"), [(70, 16), (64, 16), (5, 16), (1, 1), (7, 1), (33, 32)])
def test_every_token_is_in_one_chunk_and_comes_back(name: str, tokens: int, chunk: int) -> None:
    dump = _dump(tokens)
    chunks = archive.compress(dump, SCHEMES[name], chunk)
    assert [sealed.start for sealed in chunks] == [0, *(sealed.stop for sealed in chunks[:-1])]
    assert chunks[-1].stop == tokens
    restored = archive.restore(chunks)
    assert restored.queries is None
    for got, want in ((restored.keys, dump.keys), (restored.values, dump.values)):
        assert got.shape == want.shape
        assert got.dtype == BF16
    for sealed in chunks:
        part = np.s_[:, :, sealed.start : sealed.stop]
        keys, values = decode(sealed)
        assert_bits("keys", restored.keys[part], keys)
        assert_bits("values", restored.values[part], values)
        if sealed.keys.method == "bf16":
            assert_bits("exact", keys, dump.keys[part])


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - {"mixed"}))  # whose units begin inside chunks, see below
def test_units_are_sealed_with_the_queries_from_before_they_began(name: str) -> None:
    chosen, dump = SCHEMES[name], _dump(64)
    chunks = archive.compress(dump, chosen, 16)
    assert dump.queries is not None
    statistics, number = QueryStatistics(), 0
    recent, last = chosen.recent_tokens, 0
    previous = None
    for index in range(4):
        statistics = statistics.observe(second_moment(dump.queries[:, :, 16 * index : 16 * index + 16], 2))
        stop = 16 * (index + 1) - recent
        if (index + 1) % chosen.chunks_per_seal or stop <= last:
            continue
        part = np.s_[:, :, last:stop]
        want = chosen.seal(dump.keys[part], dump.values[part], statistics.past, previous, last)
        _assert_same(chunks[number], want)
        statistics, previous, last, number = statistics.sealed(chosen.decay), want, stop, number + 1
    assert number == len(chunks) - (last < 64)


def test_a_unit_that_begins_inside_a_chunk_does_not_know_the_queries_of_that_chunk() -> None:
    late = scheme("quantwm", values="kivi", rank=4, residual_length=8)  # seals keys eight tokens late as well
    dump = _dump(48)
    chunks = archive.compress(dump, late, 16)
    assert [(sealed.start, sealed.stop) for sealed in chunks] == [(0, 8), (8, 24), (24, 40), (40, 48)]
    assert "basis" not in chunks[1].keys.arrays  # it began in the first chunk, before which there were no queries
    assert "basis" in chunks[2].keys.arrays


@EVERY
@settings(max_examples=8)  # of each scheme
@given(cut=st.integers(1, 39), seed=st.integers(1, 1000), what=st.sampled_from(["keys", "values", "queries", "all"]))
def test_the_future_changes_no_past_byte(name: str, cut: int, seed: int, what: str) -> None:
    dump, other = _dump(40), _dump(40, seed=seed)
    assert dump.queries is not None
    assert other.queries is not None

    def changed(part: str, past: np.ndarray, future: np.ndarray) -> np.ndarray:
        return np.concatenate([past[:, :, :cut], future[:, :, cut:]], axis=2) if what in (part, "all") else past

    later = Dump(
        changed("keys", dump.keys, other.keys),
        changed("values", dump.values, other.values),
        changed("queries", dump.queries, other.queries),
    )
    chunks, again = (archive.compress(each, SCHEMES[name], 10) for each in (dump, later))
    for got, want in zip(again, chunks, strict=True):
        if want.stop <= cut:
            _assert_same(got, want)


@EVERY
def test_a_units_own_queries_change_none_of_its_bytes(name: str) -> None:
    dump = _dump(64)
    assert dump.queries is not None
    chunks = archive.compress(dump, SCHEMES[name], 16)
    group = 16 * SCHEMES[name].chunks_per_seal
    for sealed in chunks:
        queries = dump.queries.copy()
        # The queries of a chunk come all at once, so a unit that begins inside a chunk does not know them either.
        queries[:, :, sealed.start // group * group :] *= np.array(-3, BF16)
        again = archive.compress(Dump(dump.keys, dump.values, queries), SCHEMES[name], 16)
        _assert_same(next(other for other in again if other.start == sealed.start), sealed)


def test_past_queries_do_change_bytes() -> None:
    dump, other = _dump(64), _dump(64, seed=9)
    chunks = archive.compress(dump, SCHEMES["quantwm"], 16)
    again = archive.compress(Dump(dump.keys, dump.values, other.queries), SCHEMES["quantwm"], 16)
    _assert_same(again[0], chunks[0])
    assert again[1].keys.arrays["basis"].tobytes() != chunks[1].keys.arrays["basis"].tobytes()


@EVERY
def test_the_same_recording_gives_the_same_bytes(name: str) -> None:
    for got, want in zip(*(archive.compress(_dump(), SCHEMES[name], 16) for _ in range(2)), strict=True):
        _assert_same(got, want)


def test_without_queries_nothing_is_compensated() -> None:
    dump = _dump()
    chunks = archive.compress(Dump(dump.keys, dump.values), SCHEMES["quantwm"], 16)
    assert all("basis" not in sealed.keys.arrays for sealed in chunks)
    later = archive.compress(dump, SCHEMES["quantwm"], 16)
    assert ["basis" in sealed.keys.arrays for sealed in later] == [False, True, True, True, True]


def test_an_incomplete_unit_and_the_newest_tokens_follow_as_bf16() -> None:
    methods_of = [sealed.keys.method for sealed in archive.compress(_dump(70), SCHEMES["paper"], 16)]
    assert methods_of == ["quantwm", "quantwm", "bf16"]
    spans = [(sealed.start, sealed.stop) for sealed in archive.compress(_dump(70), SCHEMES["kivi"], 16)]
    assert spans == [(0, 3), (3, 19), (19, 35), (35, 51), (51, 57), (57, 70)]


def test_half_precision_and_strides_do_not_matter() -> None:
    dump = _dump()
    assert dump.queries is not None
    wide = Dump(dump.keys.astype(np.float32), dump.values.astype(np.float32), dump.queries.astype(np.float32))
    flipped = Dump(
        *(
            np.swapaxes(np.ascontiguousarray(np.swapaxes(each, 1, 2)), 1, 2)
            for each in (dump.keys, dump.values, dump.queries)
        )
    )
    want = archive.compress(dump, SCHEMES["quantwm"], 16)
    for other in (wide, flipped):
        for got, each in zip(archive.compress(other, SCHEMES["quantwm"], 16), want, strict=True):
            _assert_same(got, each)


@EVERY
@pytest.mark.parametrize("part", ["keys", "values", "queries"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**61])
def test_what_cannot_be_sealed_is_named_with_layer_chunk_and_tensor(name: str, part: str, bad: float) -> None:
    dump = _dump()
    assert dump.queries is not None
    parts = {"keys": dump.keys, "values": dump.values, "queries": dump.queries}
    parts[part] = parts[part].copy()
    parts[part][0, 1, 37, 5] = bad
    with pytest.raises(DomainError, match=f"^layer 4, chunk 2, {part}: 1 of"):
        archive.compress(Dump(**parts), SCHEMES[name], 16, layer=4)


def test_all_that_is_too_large_is_counted() -> None:
    dump = _dump()
    keys = dump.keys.astype(np.float32) * np.float32(1e30)
    count = 2 * 16 * 32
    with pytest.raises(DomainError, match=f"^layer 4, chunk 0, keys: {count} of {count} values"):
        archive.compress(replace(dump, keys=keys), SCHEMES["quantwm"], 16, layer=4)


def test_shapes_that_do_not_fit_are_named() -> None:
    dump = _dump()
    assert dump.queries is not None
    cases = [
        (Dump(dump.keys, dump.values[:, :, :5]), "layer 2: keys .* and values .* hold different tokens"),
        (Dump(dump.keys, dump.values[:, :1]), "hold different tokens"),
        (Dump(dump.keys[0], dump.values), r"layer 2, keys: got shape \(2, 70, 32\), need 4 dimensions"),
        (Dump(dump.keys[:, :, :0], dump.values[:, :, :0]), "layer 2, keys: got shape .* holds no element"),
        (Dump(dump.keys, dump.values, dump.queries[:, :3]), "layer 2: queries .* do not fit keys"),
        (Dump(dump.keys, dump.values, dump.queries[:, :, :9]), "queries .* do not fit keys"),
        (Dump(dump.keys, dump.values, dump.queries[..., :8]), "queries .* do not fit keys"),
        (Dump(dump.keys, dump.values, dump.queries[0]), "layer 2, queries: got shape"),
    ]
    for bad, message in cases:
        with pytest.raises(ShapeError, match=message):
            archive.compress(bad, SCHEMES["quantwm"], 16, layer=2)
    with pytest.raises(DtypeError, match="layer 2, values: got float64"):
        archive.compress(Dump(dump.keys, dump.values.astype(float)), SCHEMES["quantwm"], 16, layer=2)


@pytest.mark.parametrize("tokens", [0, -1])
def test_an_impossible_chunk_is_refused(tokens: int) -> None:
    with pytest.raises(ParameterError, match=f"chunk of {tokens} tokens: need at least 1"):
        archive.compress(_dump(), SCHEMES["bf16"], tokens)


def test_layers_are_collected_in_order() -> None:
    one = np.ones((1, 1, 4, 8), np.float32)
    arrays = {"layer.10.keys": one, "layer.10.values": one, "layer.2.keys": one, "layer.2.values": one, "keys": one}
    layers = archive.collect({**arrays, "values": one, "queries": 2 * one})
    assert list(layers) == [0, 2, 10]
    assert layers[0].queries is not None
    assert layers[2].queries is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "the file holds no arrays"),
        (["keys"], "layer 0 lacks values"),
        (["layer.3.queries"], "layer 3 lacks keys and values"),
        (["keys", "values", "weight"], "array 'weight': need 'keys', 'values' or 'queries'"),
        (["keys", "values", "layer.x.keys"], r"array 'layer\.x\.keys'"),
        (["keys", "values", "layer.0.keys"], r"array 'layer\.0\.keys': layer 0 has keys twice"),
    ],
)
def test_foreign_names_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        archive.collect(dict.fromkeys(names, np.ones((1, 1, 4, 8), np.float32)))


def test_chunks_that_do_not_follow_one_another_are_refused() -> None:
    chunks = archive.compress(_dump(), SCHEMES["quantwm"], 16)
    with pytest.raises(FormatError, match="a chunk starts at token 32, the one before ended at 16"):
        archive.restore([chunks[0], chunks[2]])
    with pytest.raises(FormatError, match="starts at token 16, the one before ended at 0"):
        archive.restore(chunks[1:])
    with pytest.raises(FormatError, match="no chunks"):
        archive.restore([])


def test_rows_say_what_a_file_holds() -> None:
    chunks = archive.compress(_dump(), SCHEMES["mixed"], 32)
    rows = list(archive.rows({3: chunks}))
    assert [(row["layer"], row["start"], row["stop"]) for row in rows] == [
        (3, 0, 27),
        (3, 27, 59),
        (3, 59, 65),
        (3, 65, 70),
    ]
    assert rows[0]["keys"] == "quantwm"
    assert rows[0]["values"] == "kivi"
    assert sum(int(row["bytes"]) for row in rows) == sum(sealed.nbytes for sealed in chunks)
    assert rows[-1]["ratio"] == 1.0
    assert all(isinstance(each, Scheme) for each in SCHEMES.values())
    assert methods.get("kivi").recent_tokens == 128
