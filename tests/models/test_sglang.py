"""The adapter of SGLang under a miniature of its stage, whose layers ask an object for what they attend to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantwm_core.errors import StateError
from quantwm_models import adapters, attach
from quantwm_models.errors import HostError
from quantwm_models.store import Store
from tests.models.chunks import bits
from tests.models.sglang_host import CausalDMDDenoisingStage
from tests.models.wan_host import CHANNELS, FRAME, HEADS

HOSTS: dict[str, Callable[[], CausalDMDDenoisingStage]] = {
    "window 9": CausalDMDDenoisingStage,
    "window 9, sink 3": lambda: CausalDMDDenoisingStage(sink=3),
    "window 9, sink 1, of which 4 recent frames are seen": lambda: CausalDMDDenoisingStage(sink=1, recent=4),
    "two prompts": lambda: CausalDMDDenoisingStage(window=6, guided=True),
}


def state(host: CausalDMDDenoisingStage) -> list[Any]:
    return [vars(host).copy(), *(vars(module).copy() for module in host.transformer.modules())]


def same(before: list[Any], after: list[Any]) -> bool:
    return all(
        first.keys() == second.keys() and all(first[name] is second[name] for name in first)
        for first, second in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("name", HOSTS)
def test_bf16_is_bit_identical_and_leaves_no_trace(name: str) -> None:
    fresh, ran = HOSTS[name](), HOSTS[name]()
    expected = [bits(ran.video(seed, frames)) for seed, frames in enumerate((18, 9))]
    for host in (fresh, ran):
        before = state(host)
        with attach(host, "bf16"):
            assert [bits(host.video(seed, frames)) for seed, frames in enumerate((18, 9))] == expected
        assert same(before, state(host))
    assert bits(ran.video(0, 18)) == expected[0]


@pytest.mark.parametrize("name", HOSTS)
def test_quantwm_seals_all_but_the_active_chunk_by_the_queries_before(name: str) -> None:
    host = HOSTS[name]()
    expected = host.video(0, 18)
    with attach(host, "quantwm", iterations=2) as attachment:
        quantized = host.video(0, 18)
        assert host.causal_kv_cache is not None
        assert all(isinstance(getattr(cache, half), Store) for cache in host.causal_kv_cache for half in "kv")
    assert quantized.isfinite().all()
    assert not torch.equal(quantized, expected)
    report, branches = attachment.report(), 1 + host.guided
    assert len(attachment.caches) == 2 * branches
    assert report.tokens == 2 * branches * host.window * FRAME
    assert report.active_nbytes == 2 * branches * 3 * FRAME * 2 * 2 * HEADS * CHANNELS
    for cache in attachment.caches:
        assert "basis" in cache.chunks[-1].keys.arrays
        assert cache.stream.sink == host.sink * FRAME
        past = cache.queries.folded().past
        assert past is not None
        assert past.queries == 3 * 18 * FRAME  # every call of every chunk


def test_a_failure_inside_leaves_nothing_behind() -> None:
    host = CausalDMDDenoisingStage(guided=True)
    before = state(host)
    host.transformer.blocks[1].attn1.weights.data[0, 0, 0] = float("nan")
    with pytest.raises(Exception, match="NaN"), attach(host, "quantwm", iterations=2):
        host.video(0, 18)
    assert same(before, state(host))


def test_a_stage_whose_cache_holds_no_tensors_is_refused_when_it_allocates() -> None:
    class Packing(CausalDMDDenoisingStage):
        def _allocate_causal_kv_cache(self, *, kv_cache_size: int, dtype: torch.dtype, device: torch.device) -> Any:
            return [object() for _ in self.transformer.blocks]

    host = Packing()
    with (
        attach(host),
        pytest.raises(HostError, match=r"need a tensor \[B, tokens, heads, head_dim\] under 'k', found NoneType"),
    ):
        host.video(0, 3)


def test_what_is_not_served_is_refused_before_anything_changes() -> None:
    host = CausalDMDDenoisingStage()
    assert adapters.find(host) is adapters.get("sglang")
    assert not adapters.get("sglang").matches(type("CausalDMDDenoisingStage", (), {})())
    with attach(host), pytest.raises(StateError, match="attached already"):
        attach(host)
    before = state(host)
    host._kv_quant_args = type("", (), {"enabled": True})()  # type: ignore[attr-defined]  # as the host's packed cache has
    with pytest.raises(HostError, match="packs its cache itself"):
        attach(host)
    del host._kv_quant_args  # type: ignore[attr-defined]  # the same
    assert same(before, state(host))
    del host.transformer.blocks[1].attn1.attn
    with pytest.raises(HostError, match=r"\.attn1 with \.attn"):
        attach(host)
