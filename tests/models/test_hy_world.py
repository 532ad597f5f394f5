"""The adapter of HY-World 1.5 under miniatures of its two pipelines."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantwm_core.errors import StateError
from quantwm_kernels.statistics import second_moment
from quantwm_models import CacheObserver, LayerCache, adapters, attach
from quantwm_models.adapters import hy_world
from quantwm_models.adapters.hy_world import HyWorld
from quantwm_models.attention_hook import Replacement
from quantwm_models.errors import HostError
from tests.models import hy_world_host
from tests.models.asked import Asked
from tests.models.chunks import bits, normal
from tests.models.hy_world_host import CHANNELS, CHUNK, FRAME, HEADS, HunyuanVideo_1_5_Pipeline, WanPipeline

FUNCTIONS = ("sageattn", "sequence_parallel_attention_vision", "prope_qkv", "apply_rotary_emb")
ORIGINALS = [vars(hy_world_host)[name] for name in FUNCTIONS]

HOSTS: dict[str, Callable[[], Any]] = {
    "5B": WanPipeline,
    "8B": HunyuanVideo_1_5_Pipeline,
    "8B, guided": lambda: HunyuanVideo_1_5_Pipeline(guided=True),
}


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    yield
    assert [
        getattr(hy_world_host, name, original) for name, original in zip(FUNCTIONS, ORIGINALS, strict=True)
    ] == ORIGINALS


def blocks(host: Any) -> list[Any]:
    transformer = host.transformer
    return list(transformer.blocks if hasattr(transformer, "blocks") else transformer.double_blocks)


def state(host: Any) -> dict[str, Any]:
    hooks = [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in blocks(host)]
    return {"hooks": hooks, **{name: id(value) for name, value in vars(host).items()}}


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", HOSTS)
def test_bf16_is_bit_identical_and_leaves_no_trace(name: str, once: bool) -> None:
    expected = [bits(HOSTS[name]().video(seed, count)) for seed, count in ((0, 5), (1, 2))]
    fresh, ran = HOSTS[name](), HOSTS[name]()
    ran.video(7, 2)
    for host in (fresh, ran):
        before = state(host)
        with attach(host, "bf16", adapter=HyWorld(once)) as attachment:
            assert [bits(host.video(seed, count)) for seed, count in ((0, 5), (1, 2))] == expected
        report = attachment.report()
        assert report.sealed_nbytes == 2 * 2 * HEADS * CHANNELS * (2 - once) * report.tokens > 0
        assert state(host) == before
        assert bits(host.video(0, 5)) == expected[0]


@pytest.mark.parametrize("name", ["5B", "8B"])
def test_one_that_is_detached_while_a_layer_runs_leaves_nothing_with_another(name: str) -> None:
    host, other = HOSTS[name](), HOSTS[name]()
    expected = bits(other.video(0, 5))
    host.init_kv_cache()
    with attach(other, "bf16", adapter=HyWorld(once=True)) as attachment:
        functions = [each for each in map(vars(hy_world_host).get, FUNCTIONS) if isinstance(each, Replacement)]
        assert len(functions) == (2 if name == "5B" else 3)
        left = attach(host, "bf16", adapter=HyWorld(once=True))
        detaching = blocks(host)[0].register_forward_pre_hook(lambda *_: left.detach())
        host.video(0, 1)
        detaching.remove()
        assert [each.watching.innermost for each in functions] == [None] * len(functions)
        for function in functions:
            function.watching.note("a call outside of any layer")
        assert [each.watching.innermost for each in functions] == [None] * len(functions)
        assert bits(other.video(0, 5)) == expected
    assert attachment.report().sealed_tokens > 0


@pytest.mark.parametrize("name", ["5B", "8B"])
def test_a_layer_that_fails_before_it_begins_takes_nothing_of_anothers(name: str) -> None:
    outer, inner = HOSTS[name](), HOSTS[name]()
    with attach(outer, "bf16"), attach(inner, "bf16"):
        function = next(each for each in map(vars(hy_world_host).get, FUNCTIONS) if isinstance(each, Replacement))
        function.watching.enter(outer, "outer")
        failing = blocks(inner)[0].register_forward_pre_hook(_fail, prepend=True)
        with pytest.raises(LookupError):
            inner.video(0, 1)
        failing.remove()
        assert function.watching.innermost == "outer"
        function.watching.forget(outer)


def _fail(*_: object) -> None:
    raise LookupError


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", HOSTS)
def test_quantwm_seals_the_whole_cache_by_the_queries_before(name: str, once: bool) -> None:
    host = HOSTS[name]()
    expected = host.video(0, 5)
    with attach(host, "quantwm", iterations=2, chunks_per_seal=2, adapter=HyWorld(once)) as attachment:
        quantized = host.video(0, 5)
    assert quantized.isfinite().all()
    assert not torch.equal(quantized, expected)
    report, branches = attachment.report(), 1 + getattr(host, "guided", False)
    assert len(attachment.caches) == 2 * branches
    assert report.tokens == report.sealed_tokens == 2 * branches * host.memory * FRAME
    assert report.active_nbytes == 0
    for cache in attachment.caches:
        (chunk,) = cache.chunks
        assert "basis" in chunk.keys.arrays
        assert chunk.keys.shape == (1, HEADS, host.memory * FRAME, (2 - once) * CHANNELS)


@pytest.mark.parametrize("name", HOSTS)
def test_each_kind_of_query_weighs_its_own_channels(name: str) -> None:
    host = HOSTS[name]()
    with attach(host, "quantwm", iterations=2) as attachment:
        host.video(0, 3)
    past = attachment.caches[0].queries.folded().past
    assert past is not None
    assert not past.mean[..., :CHANNELS, CHANNELS:].any()
    assert past.mean[..., :CHANNELS, :CHANNELS].any()
    assert past.mean[..., CHANNELS:, CHANNELS:].any()
    # Three chunks of two steps, two caches of one chunk and of two, each query of two kinds.
    assert past.queries == 2 * FRAME * (3 * 2 * CHUNK + CHUNK + 2 * CHUNK)


def test_what_cannot_be_derived_bit_for_bit_is_stored_in_both_kinds() -> None:
    def make() -> WanPipeline:
        host = WanPipeline()
        host.transformer.blocks[1].attn1.processor.otherwise = True
        return host

    expected = bits(make().video(0, 3))
    host = make()
    with attach(host, "bf16", adapter=HyWorld(once=True)) as attachment:
        assert bits(host.video(0, 3)) == expected
    channels = [chunk.keys.shape[3] for cache in attachment.caches for chunk in cache.chunks]
    assert channels == [CHANNELS, 2 * CHANNELS]


def test_a_rank_that_was_given_its_own_rotation_alone_stores_both_kinds() -> None:
    def make() -> WanPipeline:
        host = WanPipeline()
        host.ranks = 2
        return host

    expected = bits(make().video(0, 3))
    host = make()
    with attach(host, "bf16", adapter=HyWorld(once=True)) as attachment:
        assert bits(host.video(0, 3)) == expected
    assert {chunk.keys.shape[3] for cache in attachment.caches for chunk in cache.chunks} == {2 * CHANNELS}


def test_an_option_that_the_host_has_no_function_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hy_world_host, "prope_qkv")
    host = WanPipeline()
    with pytest.raises(HostError, match="need a function 'prope_qkv'"):
        attach(host, adapter=HyWorld(once=True))
    attach(host).detach()


@pytest.mark.parametrize("made", [lambda made: made[:3], lambda made: made[0]], ids=["3 values", "a Tensor"])
def test_a_projection_that_returns_something_else_is_refused(
    made: Callable[[Any], Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = hy_world_host.prope_qkv

    def prope_qkv(*args: Any, **kwargs: Any) -> Any:
        called_by_host = len(args) == 3 and args[0] is not args[1]
        return project(*args, **kwargs) if called_by_host else made(project(*args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(hy_world_host, "prope_qkv", prope_qkv)
        host, came = WanPipeline(), request.node.callspec.id
        with (
            attach(host, "bf16", adapter=HyWorld(once=True)),
            pytest.raises(HostError, match=f"prope_qkv returned {came}; need 4"),
        ):
            host.video(0, 2)


class Firsts(CacheObserver):
    """Whether units were sealed with a basis."""

    def __init__(self) -> None:
        self.basis: list[bool] = []

    def sealed(self, cache: LayerCache, chunk: Any, keys: Tensor, values: Tensor) -> None:
        if cache.layer == 0:
            self.basis.append("basis" in chunk.keys.arrays)


@pytest.mark.parametrize("name", HOSTS)
def test_the_first_cache_of_each_video_knows_the_first_chunk(name: str) -> None:
    host, firsts = HOSTS[name](), Firsts()
    with attach(host, "quantwm", iterations=2, observers=[firsts]) as attachment:
        host.video(0, 2)
        host.video(1, 2)
        again = attachment.caches[0].queries.folded().past
        host.video(1, 2)
        afresh = attachment.caches[0].queries.folded().past
    assert all(firsts.basis)
    # A video's statistics are its own.
    assert again is not None
    assert afresh is not None
    assert (again.queries, bits(again.mean)) == (afresh.queries, bits(afresh.mean))


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", HOSTS)
def test_observers_see_what_queries_of_both_kinds_ask_of_a_history(name: str, once: bool) -> None:
    host, exact, rough = HOSTS[name](), Asked(), Asked()
    for method, asked in (("bf16", exact), ("rtn", rough)):
        with attach(host, method, adapter=HyWorld(once=once), observers=[asked]):
            host.video(0, 3)
    prompts = 2 if "guided" in name else 1
    assert len(exact.same) == prompts * 2 * 2 * 2 * 2  # chunks with a history, steps, layers, kinds
    assert all(exact.same)
    assert not any(rough.same)


def test_logits_that_observers_find_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    host, asked, computed = WanPipeline(layers=1), Asked(), []

    def attending(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[2] > q.shape[2]:
            computed.append(q.float() @ k.float()[:, :, : -q.shape[2]].mT * q.shape[-1] ** -0.5)
        return scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(hy_world_host, "scaled_dot_product_attention", attending)
    with attach(host, "bf16", observers=[asked]):
        host.video(0, 2)
    found = [torch.cat(pair) for pair in zip(asked.logits[::2], asked.logits[1::2], strict=True)]
    assert len(found) == len(computed) == 2
    torch.testing.assert_close(found, computed, rtol=0.02, atol=0.02)


def test_prompts_have_caches_of_their_own() -> None:
    host = HunyuanVideo_1_5_Pipeline(guided=True, layers=1)
    with attach(host, "rtn") as attachment:
        host.video(0, 2)
        host.video(1, 2)
    assert list(attachment._caches) == [("cond", 0), ("uncond", 0)]


def test_an_unattached_pipeline_of_the_same_module_is_left_alone() -> None:
    for make in HOSTS.values():
        host, other = make(), make()
        expected = bits(other.video(0, 3))
        with attach(host, "quantwm", iterations=2) as attachment:
            host.video(0, 3)
            known = attachment.caches[0].queries
            assert bits(other.video(0, 3)) == expected
            assert attachment.caches[0].queries is known


def test_a_failing_host_is_usable_afterwards() -> None:
    host = WanPipeline()
    expected = bits(host.video(0, 3))
    with attach(host, "bf16"):
        host.fails = True
        with pytest.raises(LookupError):
            host.video(0, 3)
        host.fails = False
        assert bits(host.video(0, 3)) == expected


def test_what_is_no_host_is_refused_before_anything_changes() -> None:
    adapter = adapters.get("hy_world")
    assert not adapter.matches(object())
    assert not adapter.matches(type("WanPipeline", (), {})())
    for nothing in (None, object()):
        with pytest.raises(HostError, match=r"need \.transformer with .*: there is no \.transformer$"):
            attach(nothing, adapter="hy_world")
    for make in HOSTS.values():
        host = make()
        assert adapters.find(host) is adapter
        with attach(host), pytest.raises(StateError, match="attached already"):
            attach(host)
        before = state(host)
        name = next(iter(host.transformer._modules))
        setattr(host.transformer, name, torch.nn.ModuleList())
        with pytest.raises(HostError, match=r"need \.transformer with \.blocks of.*: its \w+ has none$"):
            attach(host)
        assert "hooks" in before
        assert not any(each._forward_pre_hooks for each in blocks(host))


def test_the_moment_of_both_kinds_is_that_of_queries_that_are_zero_in_the_others_channels() -> None:
    roped, projected = normal(1, 3, 10, 8, seed=1), normal(1, 3, 10, 8, seed=2)
    found = hy_world._moment(roped, projected)
    padded = second_moment(torch.cat(hy_world._kinds(roped, projected), dim=2), 3)
    assert found.queries == padded.queries == 20
    torch.testing.assert_close(found.mean, padded.mean, rtol=1e-6, atol=1e-7)
    assert not found.mean[:, :, :8, 8:].any()


def test_both_kinds_are_stacked_kind_by_kind_and_of_one_video_without_a_copy() -> None:
    for batch in (1, 2):
        stacked = normal(2 * batch, HEADS, 3, CHANNELS)
        stream = hy_world._side_by_side(stacked)
        again = hy_world._stacked(stream)
        assert torch.equal(again, stacked)
        assert (again.data_ptr() == stream.data_ptr()) == (batch == 1)
