"""A history in place of two tensors."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import DomainError, ShapeError, StateError
from quantwm_core.method import scheme
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.methods import seal_chunk
from quantwm_models import LayerCache, Offload, snapshot
from quantwm_models.errors import HostAttributeError
from quantwm_models.observer import CacheObserver
from quantwm_models.rebuilt import rebuild
from tests.models.chunks import bits, normal


class Witness(CacheObserver):
    """Notes the tokens of what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def sealed(self, cache: LayerCache, chunk: SealedChunk, keys: Tensor, values: Tensor) -> None:
        self.told.append(("sealed", chunk.start, chunk.start + chunk.tokens))

    def evicted(self, cache: LayerCache, start: int, stop: int) -> None:
        self.told.append(("evicted", start, stop))


def history(seed: int, tokens: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    keys, values, queries = normal(3, 1, 2, tokens, 16, seed=seed)
    return keys, values, queries


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moving_it_gives_the_tensors(dtype: torch.dtype) -> None:
    keys, values, queries = history(0)
    sealed = rebuild(LayerCache("bf16"), keys.to(dtype), values.to(dtype), queries, [16, 32])
    kept = [each.contiguous().cpu() for each in sealed]
    got = [each.to("cpu") for each in kept]
    assert [each.dtype for each in got] == [dtype] * 2
    assert torch.equal(got[0], keys.to(dtype))
    assert torch.equal(got[1], values.to(dtype))


def test_a_unit_knows_the_queries_before_it_and_the_next_history_all() -> None:
    cache, (keys, values, queries) = LayerCache("quantwm", iterations=2), history(0)
    rebuild(cache, keys, values, queries, [16, 16, 16])
    assert ["basis" in chunk.keys.arrays for chunk in cache.chunks] == [False, True, True]
    first = [chunk.keys.arrays["codes"].clone() for chunk in cache.chunks]
    # What is asked later changes nothing that is sealed.
    cache.observe(5 * queries)
    assert all(
        torch.equal(chunk.keys.arrays["codes"], before) for chunk, before in zip(cache.chunks, first, strict=True)
    )
    rebuild(cache, keys, values, None, [48])
    assert cache.queries.past is not None
    assert cache.queries.past.queries == 2 * 48
    assert [("basis" in chunk.keys.arrays, chunk.start) for chunk in cache.chunks] == [(True, 0)]
    assert cache.report().chunks_sealed == 1


def spoiled(tensor: Tensor, value: float) -> Tensor:
    """The same with a bad number in the second of three units."""
    bad = tensor.clone()
    bad[0, 1, 20, 3] = value
    return bad


@pytest.mark.parametrize("half", range(3))
def test_a_history_that_cannot_be_sealed_leaves_the_one_before(half: int) -> None:
    witness = Witness()
    cache = LayerCache("quantwm", layer=3, iterations=2, observers=[witness])
    old, _ = rebuild(cache, *history(0), [16, 32])
    before = (cache.chunks, cache.version, cache.queries, cache.stream, cache.report(), list(witness.told))
    exact = old.to("cpu").clone()
    bad = [spoiled(each, float("nan")) if number == half else each for number, each in enumerate(history(1))]
    with pytest.raises(DomainError, match="layer 3"):
        rebuild(cache, bad[0], bad[1], bad[2], [16, 16, 16])
    after = (cache.chunks, cache.version, cache.queries, cache.stream, cache.report(), list(witness.told))
    assert all(one is other for one, other in zip(before[0], after[0], strict=True))
    assert after[1] == before[1]
    assert after[2] is before[2]
    assert after[3] is before[3]
    assert after[4].chunks_sealed == before[4].chunks_sealed
    assert after[5] == before[5]
    assert torch.equal(old.to("cpu"), exact)


def test_observers_are_told_of_a_rebuild_as_of_its_steps() -> None:
    witness, other = Witness(), Witness()
    cache, slow = (LayerCache("bf16", observers=[each], window=32) for each in (witness, other))
    for seed in range(2):
        keys, values, queries = history(seed)
        rebuild(cache, keys, values, queries, [16] * 3)
        slow.rewind()
        for part_keys, part_values in zip(keys.split(16, dim=2), values.split(16, dim=2), strict=True):
            slow.append(part_keys, part_values)
            slow.seal()
    assert witness.told == other.told
    assert witness.told[:4] == [("sealed", 0, 16), ("sealed", 16, 32), ("evicted", 0, 16), ("sealed", 32, 48)]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"chunks of \[\] tokens; need whole numbers above 0"),
        ([48, 1], r"keys: got \(1, 2, 48, 16\), need .* of 49 tokens, \[48, 1\]"),
        ([16, 16], r"keys: got \(1, 2, 48, 16\), need .* of 32 tokens, \[16, 16\]"),
    ],
)
def test_other_tokens_than_the_history_has_are_refused(tokens: list[int], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        rebuild(LayerCache("bf16"), *history(0), tokens)


def test_one_that_was_built_anew_since_is_refused() -> None:
    cache = LayerCache("bf16")
    old, _ = rebuild(cache, *history(0), [48])
    rebuild(cache, *history(1), [48])
    with pytest.raises(StateError, match=r"keys of layer 0.*built anew since"):
        old.to("cpu")


def test_what_a_host_may_ask_of_it() -> None:
    sealed, _ = rebuild(LayerCache("bf16", layer=3), *history(0), [48])
    assert repr(sealed) == "Sealed(keys of layer 3, 48 tokens)"
    with pytest.raises(HostAttributeError, match=r"asked Sealed for 'repeat'; supported: contiguous\(\), cpu\(\)"):
        sealed.repeat(2)


WARM = scheme("quantwm", centroids=16, iterations=1, warm_start=True)
LONG = 512  # tokens of a history whose centroids a cold start and a warm one place differently


def sealed_bits(unit: SealedChunk) -> dict[tuple[str, str], bytes]:
    """All arrays of a unit."""
    halves = {"keys": unit.keys, "values": unit.values}
    return {(kind, name): bits(array) for kind, half in halves.items() for name, array in half.arrays.items()}


@pytest.mark.parametrize("offload", [False, True])
def test_a_history_begins_with_the_codebooks_of_the_one_whose_place_it_takes(offload: bool) -> None:
    cache = LayerCache(WARM, offload=Offload() if offload else None)
    (keys, values, _), (later_keys, later_values, _) = history(1, LONG), history(2, LONG)
    rebuild(cache, keys, values, None, [LONG])
    before = cache.chunks[0]
    rebuild(cache, later_keys, later_values, None, [LONG // 2, LONG // 2])
    first, second = ((each[0], each[1]) for each in zip(later_keys.chunk(2, 2), later_values.chunk(2, 2), strict=True))
    warm = seal_chunk(WARM, *first, None, before)
    assert sealed_bits(cache.chunks[0]) == sealed_bits(warm) != sealed_bits(seal_chunk(WARM, *first))
    assert sealed_bits(cache.chunks[1]) == sealed_bits(seal_chunk(WARM, *second, None, warm))
    cache.clear()  # another video
    rebuild(cache, keys, values, None, [LONG])
    assert sealed_bits(cache.chunks[0]) == sealed_bits(seal_chunk(WARM, keys, values)) == sealed_bits(before)


def test_a_history_in_host_memory_is_asked_for_its_newest_unit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method = scheme("quantwm", centroids=16, iterations=1, warm_start=True, chunks_per_seal=2)
    cache = LayerCache(method, offload=Offload())
    rebuild(cache, *history(1, LONG), [LONG // 4] * 4)
    copied, to = [], SealedChunk.to

    def counted(unit: SealedChunk, device: torch.device) -> SealedChunk:
        copied.append(unit.start)
        return to(unit, device)

    monkeypatch.setattr(SealedChunk, "to", counted)
    rebuild(cache, *history(2, LONG), [LONG // 4] * 4)
    assert copied == [LONG // 2], "once for four chunks, when the first two are sealed"


def test_a_history_of_other_sizes_says_nothing_to_the_next() -> None:
    cache = LayerCache(WARM)
    for heads, channels in ((2, 16), (1, 16), (1, 8)):
        keys, values = normal(2, 1, heads, LONG, channels, seed=heads)
        rebuild(cache, keys, values, None, [LONG])
        assert sealed_bits(cache.chunks[0]) == sealed_bits(seal_chunk(WARM, keys, values))


def test_the_history_after_one_that_could_not_be_sealed_begins_with_the_one_before_it() -> None:
    cache, (keys, values, _), (later_keys, later_values, _) = LayerCache(WARM), history(1, LONG), history(2, LONG)
    rebuild(cache, keys, values, None, [LONG])
    before = cache.chunks[0]
    with pytest.raises(DomainError):
        rebuild(cache, later_keys, spoiled(later_values, float("inf")), None, [LONG // 2, LONG // 2])
    rebuild(cache, later_keys, later_values, None, [LONG])
    assert sealed_bits(cache.chunks[0]) == sealed_bits(seal_chunk(WARM, later_keys, later_values, None, before))


@pytest.mark.parametrize("offload", [False, True])
def test_the_history_after_a_snapshot_begins_with_the_one_in_the_file(offload: bool, tmp_path: Path) -> None:
    straight, resumed = (LayerCache(WARM, offload=Offload() if offload else None) for _ in range(2))
    rebuild(straight, *history(1, LONG), [LONG])
    snapshot.save([straight], tmp_path / "world")
    snapshot.load([resumed], tmp_path / "world")
    for cache in (straight, resumed):
        rebuild(cache, *history(2, LONG), [LONG])
    assert sealed_bits(resumed.chunks[0]) == sealed_bits(straight.chunks[0])


def test_each_rank_begins_with_the_codebooks_of_its_own_heads() -> None:
    whole, *ranks = (LayerCache(WARM) for _ in range(3))
    for seed in (1, 2):
        keys, values, _ = history(seed, LONG)
        rebuild(whole, keys, values, None, [LONG])
        for cache, own_keys, own_values in zip(ranks, keys.split(1, 1), values.split(1, 1), strict=True):
            rebuild(cache, own_keys, own_values, None, [LONG])
    expected = [each.split(1, 1) for each in whole.read()]
    for rank, cache in enumerate(ranks):
        assert [bits(each) for each in cache.read()] == [bits(each[rank]) for each in expected]


def test_a_basis_goes_with_the_history_it_was_fitted_to() -> None:
    # One that is kept takes its bytes all the same, and was fitted to other tokens.
    for method in (scheme("klt"), scheme(keys="quantwm", values="klt", warm_start=True, iterations=1)):
        cache, (keys, values, _) = LayerCache(method), history(2, LONG)
        rebuild(cache, *history(1, LONG)[:2], None, [LONG])
        rebuild(cache, keys, values, None, [LONG])
        alone = seal_chunk(method, keys, values)
        assert {name: bits(array) for name, array in cache.chunks[0].values.arrays.items()} == {
            name: bits(array) for name, array in alone.values.arrays.items()
        }
