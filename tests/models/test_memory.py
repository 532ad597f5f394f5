"""What a cache says, and is, after memory ran out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quantwm_models import LayerCache, Offload, attach, memory
from quantwm_models import cache as cache_module
from quantwm_models.errors import CacheMemoryError
from tests.models.chunks import bits, chunk, fill, snapshot
from tests.models.longcat_host import LongCatVideoPipeline

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def exhausted(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def exhausted_numpy(*_: object, **__: object) -> Any:
    return np.empty(2**60, np.uint8)


def exhausted_pinning(*_: object, **__: object) -> Any:
    raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.")


CALLS: dict[str, Callable[[LayerCache], object]] = {
    "append": lambda cache: cache.append(*chunk(9)),
    "overwrite": lambda cache: cache.overwrite(*chunk(9)),
    "read": lambda cache: cache.read(),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_cache_is_as_it_was_and_says_what_would_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LayerCache("quantwm", layer=3)
    fill(cache, 4)
    before = snapshot(cache)
    monkeypatch.setattr(cache_module, "free_nbytes", lambda _: 128 * 40)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", exhausted)
        with pytest.raises(CacheMemoryError, match=r"^layer 3: out of memory") as caught:
            CALLS[name](cache)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value.__cause__.__cause__ if caught.value.__cause__ else None, torch.OutOfMemoryError)
    assert "for 64 tokens" in str(caught.value)
    # Two heads, keys and values of 16 channels: 128 bytes a token, and nothing to read with is allocated yet.
    assert "a read of 40 tokens would fit" in str(caught.value)
    assert "offload=True" in str(caught.value)
    assert snapshot(cache) == before
    assert cache.read()[0].shape[2] == 64


def test_a_cpu_runs_out_of_memory_too_and_nothing_else_is_taken_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, empty = LayerCache("rtn", layer=3), torch.empty
    fill(cache, 2)
    before = snapshot(cache)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: empty(2**60, dtype=torch.uint8))
        with pytest.raises(CacheMemoryError, match=r"^layer 3: out of memory.*offload=True") as caught:
            cache.append(*chunk(9))
    assert "DefaultCPUAllocator" in str(caught.value.__cause__.__cause__ if caught.value.__cause__ else None)
    assert snapshot(cache) == before
    for said in ("DefaultCPUAllocator is broken", "can't allocate memory"):
        with pytest.raises(RuntimeError, match=said) as other, memory.explained(str):
            raise RuntimeError(said)
        assert type(other.value) is RuntimeError


@pytest.mark.parametrize("ends", [exhausted, exhausted_numpy, exhausted_pinning])
def test_a_unit_that_cannot_be_sealed_stays_as_it_is(
    ends: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LayerCache("quantwm", offload=Offload())
    fill(cache, 3)
    before = snapshot(cache)
    with monkeypatch.context() as patch:
        patch.setattr("quantwm_models.settling.begin_chunk", ends)
        with pytest.raises(CacheMemoryError) as caught:
            cache.seal()
    assert "offload=True" not in str(caught.value)
    assert snapshot(cache) == before
    cache.seal()
    assert cache.report().chunks_sealed == 3


def test_a_host_is_usable_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bits(LongCatVideoPipeline().video(0, 2))
    host = LongCatVideoPipeline()
    with attach(host, "bf16"):
        with monkeypatch.context() as patch:
            patch.setattr("quantwm_models.settling.begin_chunk", exhausted)
            with pytest.raises(CacheMemoryError, match="layer 0"):
                host.video(0, 2)
        assert bits(host.video(0, 2)) == expected
    assert bits(host.video(0, 2)) == expected


def test_free_memory_is_asked_of_a_gpu_only() -> None:
    assert memory.free_nbytes(torch.device("cpu")) is None


@gpu
def test_a_gpu_that_is_full() -> None:
    cache = LayerCache("bf16", layer=1)
    cache.append(*(each.cuda() for each in chunk(0)))
    free = memory.free_nbytes(torch.device("cuda", torch.cuda.current_device()))
    assert free
    before = torch.cuda.memory_allocated()
    taken = torch.empty(free - 2**28, dtype=torch.uint8, device="cuda")
    big = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16, device="cuda").expand(1, 2, 2**23, 16)
    with pytest.raises(CacheMemoryError, match=r"layer 1: out of memory.* tokens would fit"):
        cache.append(big, big)
    del taken, big
    torch.cuda.empty_cache()
    assert cache.read()[0].shape[2] == 16
    assert torch.cuda.memory_allocated() >= before
