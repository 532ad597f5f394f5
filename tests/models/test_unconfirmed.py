"""A GPU seals a unit while it is read already; whether it could be sealed is asked when a layer changes next.

Here sealings that are late by decree stand in for a GPU's, and a GPU's own are held against those of a CPU's kind at the end.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import DomainError
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.methods import begin_chunk
from quantwm_models import LayerCache, Workspace, snapshot
from quantwm_models.errors import CacheMemoryError
from quantwm_models.observer import CacheObserver
from tests.models.chunks import bits, chunk, fill

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Late:
    """A unit that can be read before it is waited for."""

    def __init__(self, chunk: SealedChunk, waited: list[int], error: Exception | None) -> None:
        self.chunk, self.waited, self.error = chunk, waited, error

    def readable(self) -> SealedChunk:
        return self.chunk

    def wait(self) -> SealedChunk:
        self.waited.append(self.chunk.start)
        if self.error is not None:
            raise self.error
        return self.chunk


Decree = Callable[[Exception | None], list[int]]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Decree:
    """Makes sealings late from now on; returns the begins of units that were waited for."""

    def decree(error: Exception | None = None) -> list[int]:
        waited: list[int] = []
        monkeypatch.setattr(
            "quantwm_models.contents.begin_chunk",
            lambda *args: Late(begin_chunk(*args).wait(), waited, error),
        )
        return waited

    return decree


def layers(count: int = 2, **settings: Any) -> list[LayerCache]:
    workspace = Workspace()
    return [LayerCache("quantwm", layer=layer, workspace=workspace, iterations=1, **settings) for layer in range(count)]


def read(cache: LayerCache) -> list[bytes]:
    return [bits(half) for half in cache.read()]


def test_a_unit_is_read_at_once_and_waited_for_when_the_next_layer_changes(late: Decree) -> None:
    expected = layers(1)[0]
    fill(expected, 2)
    waited = late(None)
    first, second = layers()
    fill(first, 2)
    assert read(first) == read(expected)
    assert waited == []
    fill(second, 1)
    assert waited == [0]
    assert read(first) == read(expected)
    fill(second, 1)
    assert waited == [0]
    second.overwrite(*chunk(5))
    assert waited == [0, 0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda cache: cache.report(),
        lambda cache: cache.chunks,
        lambda cache: cache.contents,
        lambda cache: cache.seal(),
        lambda cache: cache.evict(0, 1),
        lambda cache: cache.store_in(None) or cache.report(),
        lambda cache: cache.rebuild(*chunk(1), None, [16]),
        lambda cache: cache.restart(*chunk(1)),
    ],
)
def test_whoever_needs_to_know_waits(late: Decree, ask: Callable[[LayerCache], object]) -> None:
    waited = late(None)
    (cache,) = layers(1)
    fill(cache, 2)
    assert waited == []
    ask(cache)
    assert 0 in waited


def test_a_cleared_cache_waits_for_nothing(late: Decree) -> None:
    waited = late(DomainError("keys hold NaN"))
    (cache,) = layers(1)
    fill(cache, 2)
    cache.clear()
    cache.append(*chunk(0))
    assert waited == []
    assert cache.tokens == 16


def test_observers_hear_of_what_is_certain(late: Decree) -> None:
    waited = late(None)
    told: list[int] = []

    class Listener(CacheObserver):
        def sealed(self, cache: LayerCache, chunk: SealedChunk, keys: Tensor, values: Tensor) -> None:
            told.append(chunk.start)

    (cache,) = layers(1, observers=[Listener()])
    fill(cache, 3)
    assert told == waited == [0, 16], "each was waited for before anybody was told"


@pytest.mark.parametrize(
    ("error", "seen"),
    [(DomainError("keys hold NaN"), DomainError), (torch.OutOfMemoryError("CUDA is full"), CacheMemoryError)],
)
def test_a_unit_that_could_not_be_sealed_leaves_the_cache_as_it_was(
    late: Decree, error: Exception, seen: type[Exception]
) -> None:
    first, second = layers()
    fill(first, 1)
    before = read(first)
    late(error)
    first.append(*chunk(1))
    first.observe(torch.ones(1, 2, 4, 16))
    assert first.tokens == 32
    with pytest.raises(seen, match="layer 0") as caught:
        second.append(*chunk(0))
    assert "layer 1" not in str(caught.value)
    assert second.tokens == 0
    assert first.tokens == 16
    assert read(first) == before
    late(None)
    second.append(*chunk(0))
    first.overwrite(*chunk(3))
    first.append(*chunk(4))
    assert first.report().chunks_sealed == 1


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("method", ["quantwm", "qvg", "kivi", "rtn", "klt"])
@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_a_gpu_seals_the_same_bytes_early_and_late(method: str, threshold: float, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"threshold": threshold} if method == "quantwm" else {}
    workspace, reads = Workspace(), []
    early = LayerCache(method, workspace=workspace, **settings)
    late = LayerCache(method, observers=[CacheObserver()], **settings)
    for number in range(4):
        pair = [each.repeat(1, 1, 40, 1).cuda() for each in chunk(number)]
        for cache in (early, late):
            cache.append(*pair)
            cache.observe(pair[0][:, :, :64])
            reads.append([bits(half.cpu()) for half in cache.read()])
    assert reads[0::2] == reads[1::2]
    one, other = early.report(), late.report()
    assert one.sealed_nbytes == other.sealed_nbytes
    assert read_cpu(early) == read_cpu(late)
    for cache, name in ((early, "early"), (late, "late")):
        snapshot.save(cache, tmp_path / name)
    assert early.report().chunks_sealed == 3


@gpu
@pytest.mark.gpu
def test_a_gpu_tells_late_of_a_nan_and_the_cache_is_as_it_was() -> None:
    first, second = layers()
    bad = [each.cuda() for each in chunk(0)]
    bad[0][0, 1, 3, 2] = torch.nan
    first.append(*bad)
    first.append(*(each.cuda() for each in chunk(1)))
    with pytest.raises(DomainError, match="layer 0: chunk 0: keys"):
        second.append(*(each.cuda() for each in chunk(0)))
    assert first.tokens == 16
    first.overwrite(*(each.cuda() for each in chunk(0)))
    first.append(*(each.cuda() for each in chunk(1)))
    assert first.report().chunks_sealed == 1


def read_cpu(cache: LayerCache) -> list[bytes]:
    return [bits(half.cpu()) for half in cache.read()]
