"""A history in place of two tensors."""

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_models import LayerCache
from quantwm_models.errors import HostAttributeError
from quantwm_models.rebuilt import rebuild
from tests.models.chunks import normal


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
