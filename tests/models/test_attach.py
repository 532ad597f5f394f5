"""A cache under a live host: nothing of the host changes but its memory, and nothing stays behind."""

import copy
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core import plugin
from quantwm_core.errors import DomainError, ParameterError, StateError, UnknownNameError
from quantwm_core.method import scheme
from quantwm_models import Attachment, CacheObserver, LayerCache, adapters, attach, attached
from quantwm_models.adapters import causal_forcing
from quantwm_models.errors import HostError, UnknownHostError
from quantwm_models.patching import module_of
from quantwm_models.rolling_dict import MakeCache, RollingDict, hook
from quantwm_models.store import Store
from tests.models import causal_forcing_host, rolling_host
from tests.models.chunks import bits, normal
from tests.models.longcat_host import LongCatVideoPipeline
from tests.models.rolling_host import Pipeline, Settings


class RollingAdapter:
    """Adapter of the small host."""

    def matches(self, pipeline: object) -> bool:
        return isinstance(pipeline, Pipeline)

    def attach(self, pipeline: Any, make_cache: MakeCache) -> Callable[[], None]:
        lists = ("kv_cache1",) if pipeline.settings.reuse else ()
        module = module_of(pipeline.layers[0])
        return hook(RollingDict(pipeline, [module], lists=lists, sink=lambda _: pipeline.settings.sink), make_cache)


ADAPTER = RollingAdapter()
ORIGINAL = rolling_host.attention

# Window and sink in chunks of 24 tokens and parts of them, as the hosts of the lineage have them in frames.
HOSTS = {
    "global": Settings(window=240),
    "window": Settings(window=96),
    "sink": Settings(window=96, sink=24),
    "window no multiple of the chunk": Settings(window=88),
    "sink no multiple of the chunk": Settings(window=96, sink=36),
    "half-sink chunk": Settings(window=108, sink=36, chunk=24),
    "one chunk": Settings(window=24),
    "one past chunk": Settings(window=48),
    "framewise": Settings(window=32, sink=8, chunk=8, steps=1),
    "reused dicts": Settings(window=96, reuse=True),
    "tensor bounds": Settings(window=96, sink=24, tensor_bounds=True),
    "limited reads": Settings(window=96, read_limit=50),
    "limited reads through the sink": Settings(window=96, sink=36, read_limit=70),
    "values first": Settings(window=96, values_first=True),
    "batch": Settings(window=96, batch=2),
    "grouped heads": Settings(window=96, query_heads=6),
    "many steps": Settings(window=72, steps=5),
}


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    yield
    assert rolling_host.attention is ORIGINAL


def videos(settings: Settings, method: str | None, **parameters: Any) -> list[Tensor]:
    """Three videos in a row, the middle one shorter, under a method, or None for the untouched host."""
    pipeline, lengths = Pipeline(replace(settings)), ((1, 7), (2, 2), (3, 6))
    if method is None:
        return [pipeline.inference(seed, count) for seed, count in lengths]
    with attach(pipeline, method, adapter=ADAPTER, **parameters):
        return [pipeline.inference(seed, count) for seed, count in lengths]


@pytest.mark.parametrize("name", HOSTS)
def test_bf16_is_bit_identical_to_the_untouched_host(name: str) -> None:
    plain = [bits(video) for video in videos(HOSTS[name], None)]
    for per_seal in (1, 2):
        assert [bits(video) for video in videos(HOSTS[name], "bf16", chunks_per_seal=per_seal)] == plain


@pytest.mark.parametrize("name", ["window", "sink no multiple of the chunk", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hosts_of_another_number_format_get_it(name: str, dtype: torch.dtype) -> None:
    settings = replace(HOSTS[name], dtype=dtype, layers=1, steps=1)
    for plain, cached in zip(videos(settings, None), videos(settings, "bf16"), strict=True):
        assert cached.dtype == dtype
        assert torch.allclose(plain, cached, atol=0.1)


@pytest.mark.parametrize("name", HOSTS)
def test_quantwm_stays_finite_and_each_video_starts_over(name: str) -> None:
    in_a_row = videos(HOSTS[name], "quantwm", iterations=2)
    assert all(video.isfinite().all() for video in in_a_row)
    pipeline = Pipeline(replace(HOSTS[name]))
    with attach(pipeline, adapter=ADAPTER, iterations=2) as attachment:
        assert attachment.scheme.name == "quantwm"
        assert bits(pipeline.inference(3, 6)) == bits(in_a_row[2])


class Seals(CacheObserver):
    """Counts how often each token of each layer was sealed."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []

    def sealed(self, cache: LayerCache, chunk: Any, keys: Tensor, values: Tensor) -> None:
        self.tokens += [(cache.layer, token) for token in range(chunk.start, chunk.stop)]


@pytest.mark.parametrize("name", HOSTS)
def test_each_token_is_sealed_once_and_only_when_its_chunk_is_complete(name: str) -> None:
    settings, seals = HOSTS[name], Seals()
    pipeline = Pipeline(replace(settings))
    with attach(pipeline, "rtn", adapter=ADAPTER, observers=[seals]) as attachment:
        pipeline.inference(0, 6)
        report = attachment.report()
    assert len(seals.tokens) == len(set(seals.tokens))
    assert max((token for _, token in seals.tokens), default=0) < 5 * settings.chunk
    width = 2 * 2 * settings.batch * settings.heads * settings.head_dim * settings.layers
    assert report.active_nbytes == width * settings.chunk
    assert report.tokens == settings.layers * min(6 * settings.chunk, settings.window)
    assert report.sealed_nbytes == sum(chunk.nbytes for cache in attachment.caches for chunk in cache.chunks)


def test_sealed_bytes_are_those_of_the_storage_formula() -> None:
    settings = Settings(window=240, head_dim=64)
    pipeline, plan = Pipeline(settings), scheme("quantwm", centroids=4)
    with attach(pipeline, plan, adapter=ADAPTER) as attachment:
        pipeline.inference(0, 4)
    shape = (1, settings.heads, settings.chunk, settings.head_dim)
    per_unit = [
        plan.keys.nbytes("keys", shape, first) + plan.values.nbytes("values", shape, first) for first in (True, False)
    ]
    assert attachment.report().sealed_nbytes == settings.layers * (per_unit[0] + 2 * per_unit[1])


def test_the_host_allocates_no_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    pipeline = Pipeline(settings)
    made: list[Tensor] = []
    zeros = torch.zeros

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(zeros(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "zeros", counted)
    with attach(pipeline, "bf16", adapter=ADAPTER):
        pipeline.inference(0, 2)
    assert len(made) == 2 * settings.layers
    assert all(tensor.is_meta for tensor in made)


def test_the_workspace_has_the_hosts_window_once() -> None:
    settings = Settings(window=96, layers=3)
    pipeline = Pipeline(settings)
    with attach(pipeline, "quantwm", adapter=ADAPTER) as attachment:
        pipeline.inference(0, 6)
        pipeline.inference(1, 6)
    assert attachment.report().workspace_nbytes == 2 * 2 * 96 * settings.heads * settings.head_dim
    assert len({id(cache.workspace) for cache in attachment.caches}) == 1


def state(pipeline: Pipeline) -> dict[str, Any]:
    return {**vars(pipeline), "attention": rolling_host.attention}


@pytest.mark.parametrize("reuse", [False, True])
def test_leaving_restores_the_host_exactly(reuse: bool) -> None:
    pipeline = Pipeline(Settings(reuse=reuse))
    expected = bits(pipeline.inference(1, 6))
    before = state(pipeline)
    with attach(pipeline, "quantwm", adapter=ADAPTER):
        assert rolling_host.attention is not ORIGINAL
        assert bits(pipeline.inference(1, 6)) != expected
    after = state(pipeline)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert bits(pipeline.inference(1, 6)) == expected


def test_a_host_that_ran_before_gets_new_dicts() -> None:
    pipeline = Pipeline(Settings(reuse=True))
    pipeline.inference(1, 2)
    with attach(pipeline, "rtn", adapter=ADAPTER) as attachment:
        pipeline.inference(1, 2)
        assert pipeline.kv_cache1 is not None
        assert isinstance(pipeline.kv_cache1[0]["k"], Store)
        assert attachment.report().tokens == 2 * 48


class HostFailureError(Exception):
    """Something goes wrong inside the host."""


@pytest.mark.parametrize("reuse", [False, True])
def test_an_exception_in_the_host_leaves_no_patch(reuse: bool) -> None:
    pipeline = Pipeline(Settings(reuse=reuse))

    def fail(chunk: int) -> None:
        if chunk == 2:
            raise HostFailureError

    before = vars(pipeline).copy()
    pipeline.after_chunk = fail
    attachment = attach(pipeline, "quantwm", adapter=ADAPTER)
    with pytest.raises(HostFailureError), attachment:
        pipeline.inference(1, 6)
    pipeline.after_chunk = before["after_chunk"]
    assert vars(pipeline) == before
    assert attachment.report().tokens == 2 * 72
    assert pipeline.inference(1, 6).isfinite().all()


@pytest.mark.parametrize(
    "leave", [Attachment.detach, lambda each: each.__exit__(None, None, None)], ids=["detach", "block"]
)
def test_a_gpu_that_fails_leaves_no_patch(leave: Callable[[Attachment], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise HostFailureError("an illegal memory access was encountered")

    monkeypatch.setattr(sys.modules[Attachment.__module__], "forget_recordings", failing)
    pipeline = Pipeline(Settings())
    before = vars(pipeline).copy()
    attachment = attach(pipeline, "quantwm", adapter=ADAPTER)
    with pytest.raises(HostFailureError, match="illegal memory access") as caught:
        leave(attachment)
    assert caught.value.__traceback__ is not None  # what it refers to is still alive, and undid nothing by going
    assert vars(pipeline) == before
    assert rolling_host.attention is ORIGINAL
    assert attachment.detached


def test_a_video_after_a_failed_one_is_unharmed() -> None:
    pipeline = Pipeline(Settings(reuse=True))
    with attach(pipeline, "quantwm", adapter=ADAPTER):
        expected = bits(pipeline.inference(1, 6))
        pipeline.after_chunk = lambda chunk: (_ for _ in ()).throw(HostFailureError) if chunk == 3 else None
        with pytest.raises(HostFailureError):
            pipeline.inference(2, 6)
        pipeline.after_chunk = lambda _: None
        assert bits(pipeline.inference(1, 6)) == expected


def test_without_a_block_the_host_stays_attached_until_told() -> None:
    pipeline = Pipeline(Settings())
    attachment = attach(pipeline, "bf16", adapter=ADAPTER)
    assert isinstance(attachment, Attachment)
    pipeline.inference(0, 2)
    attachment.detach()
    attachment.detach()
    assert "_initialize_kv_cache" not in vars(pipeline)
    assert attachment.report().tokens == 2 * 48


@pytest.mark.parametrize("failed", [False, True])
def test_what_was_detached_is_asked_but_not_used_again(failed: bool) -> None:
    pipeline = Pipeline(Settings())
    attachment = attach(pipeline, "rtn", adapter=ADAPTER)
    with pytest.raises(HostFailureError) if failed else nullcontext(), attachment:
        pipeline.inference(0, 2)
        if failed:
            raise HostFailureError
    assert attachment.detached
    with pytest.raises(StateError, match=r"would run without its caches; attach\(\) again"), attachment:
        pipeline.inference(0, 2)
    with pytest.raises(StateError, match=r"Pipeline: this attachment had a host before; attach\(\) makes one for each"):
        attachment.connect(ADAPTER, Pipeline(Settings()))
    attachment.detach()
    assert attachment.report().tokens == sum(cache.tokens for cache in attachment.layers.values()) == 2 * 48


def test_an_attachment_has_one_host() -> None:
    pipeline, other = Pipeline(Settings()), Pipeline(Settings())
    before = vars(other).copy()
    with attach(pipeline, "rtn", adapter=ADAPTER) as attachment:
        with pytest.raises(StateError, match="this attachment had a host before"):
            attachment.connect(ADAPTER, other)
        assert vars(other) == before
        assert not attachment.detached
    assert "_initialize_kv_cache" not in vars(pipeline)


def test_two_pipelines_of_one_module_do_not_disturb_each_other() -> None:
    one, two, free = (Pipeline(Settings()) for _ in range(3))
    expected = bits(free.inference(1, 6))
    first, second = attach(one, "bf16", adapter=ADAPTER), attach(two, "rtn", adapter=ADAPTER)
    assert bits(free.inference(1, 6)) == expected
    assert bits(one.inference(1, 6)) == expected
    first.detach()
    assert rolling_host.attention is not ORIGINAL
    assert bits(two.inference(1, 6)) != expected
    assert bits(one.inference(1, 6)) == expected
    second.detach()
    assert rolling_host.attention is ORIGINAL


def test_attaching_twice_is_refused() -> None:
    pipeline = Pipeline(Settings())
    with attach(pipeline, "rtn", adapter=ADAPTER) as attachment:
        with pytest.raises(StateError, match=r"Pipeline: a cache is attached already; .* quantwm_models\.attached\(\)"):
            attach(pipeline, "bf16", adapter=ADAPTER)
        pipeline.inference(1, 2)
    assert attachment.report().tokens == 2 * 48
    with attach(pipeline, "bf16", adapter=ADAPTER):
        pipeline.inference(1, 2)


def test_a_host_whose_attachment_nobody_kept_is_detached() -> None:
    pipeline = Pipeline(Settings())
    before, expected = {*vars(pipeline)}, bits(pipeline.inference(1, 5))
    assert attached(pipeline) is None
    attach(pipeline, "rtn", adapter=ADAPTER)
    gc.collect()
    found = attached(pipeline)
    assert found is not None
    assert attached(pipeline) is found
    assert bits(pipeline.inference(1, 5)) != expected
    assert found.report().chunks_sealed == 2 * 4
    found.detach()
    found.detach()
    assert attached(pipeline) is None
    assert ({*vars(pipeline)}, bits(pipeline.inference(1, 5))) == (before, expected)
    with attach(pipeline, "bf16", adapter=ADAPTER) as second:
        found.detach()
        assert attached(pipeline) is second


def test_a_host_that_is_dropped_is_not_kept_by_its_attachment() -> None:
    pipeline = LongCatVideoPipeline()
    attach(pipeline, "rtn")
    gone = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert gone() is None


def test_the_copy_of_a_host_is_not_what_its_attachment_restores() -> None:
    pipeline = LongCatVideoPipeline()
    with attach(pipeline, "rtn") as attachment:
        assert attached(copy.deepcopy(pipeline)) is None
        shallow = copy.copy(pipeline)
        assert attached(pipeline) is attachment
    assert attached(shallow) is None


class Slots:
    __slots__ = ()


@pytest.mark.parametrize("pipeline", [Slots(), Slots], ids=["an instance without attributes", "a class"])
def test_a_host_without_attributes_is_attached_to(pipeline: object) -> None:
    undone: list[object] = []
    adapter = SimpleNamespace(matches=lambda _: True, attach=lambda host, _: lambda: undone.append(host))
    with attach(pipeline, "rtn", adapter=adapter):
        assert attached(pipeline) is None
    assert undone == [pipeline]


def test_a_function_that_others_put_in_place_since_is_left_there() -> None:
    pipeline = Pipeline(Settings())
    attachment = attach(pipeline, "bf16", adapter=ADAPTER)
    ours = rolling_host.attention

    def theirs(*args: Any) -> Tensor:
        return ours(*args)

    vars(rolling_host)["attention"] = theirs
    attachment.detach()
    assert rolling_host.attention is theirs
    plain = normal(1, 4, 2, 16)
    assert torch.equal(ours(plain, plain, plain), ORIGINAL(plain, plain, plain))
    vars(rolling_host)["attention"] = ORIGINAL


def test_queries_reach_the_statistics_in_the_frame_of_the_keys() -> None:
    settings = Settings(window=240, steps=2, layers=1, query_heads=4)
    pipeline = Pipeline(settings)
    with attach(pipeline, "quantwm", adapter=ADAPTER) as attachment:
        pipeline.inference(0, 4)
    past = attachment.caches[0].queries.past
    assert past is not None
    # Three chunks, two denoising calls and a clean pass each, two query heads to a KV head.
    assert past.queries == 3 * 3 * settings.chunk * 2
    assert past.mean.shape == (1, settings.heads, 16, 16)


def test_future_queries_change_no_past_byte() -> None:
    runs = []
    for spoil in (False, True):
        pipeline = Pipeline(Settings(window=240, layers=1))

        def strengthen(chunk: int, pipeline: Pipeline = pipeline) -> None:
            if chunk == 3:
                pipeline.layers[0].weights[0] = pipeline.layers[0].weights[0] * 2

        if spoil:
            pipeline.after_chunk = strengthen
        with attach(pipeline, "quantwm", adapter=ADAPTER) as attachment:
            pipeline.inference(0, 6)
        runs.append([[bits(each) for each in chunk.keys.arrays.values()] for chunk in attachment.caches[0].chunks])
    assert runs[0][:4] == runs[1][:4]
    assert runs[0][4] != runs[1][4]


class Calls(CacheObserver):
    """Keeps what attention calls look like."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, torch.Size, torch.Size, list[tuple[int, int]]]] = []

    def attended(self, cache: LayerCache, queries: Tensor, keys: Tensor, values: Tensor, spans: Any) -> None:
        assert keys.shape == values.shape
        self.shapes.append((cache.layer, queries.shape, keys.shape, [tuple(span) for span in spans]))


def test_observers_see_every_call_with_absolute_spans() -> None:
    calls = Calls()
    pipeline = Pipeline(Settings(window=72, sink=24, layers=2, steps=1))
    with attach(pipeline, "rtn", adapter=ADAPTER, observers=[calls]):
        pipeline.inference(0, 4)
    assert len(calls.shapes) == 2 * 2 * 4
    assert calls.shapes[-1] == (
        1,
        torch.Size((1, 2, 24, 16)),
        torch.Size((1, 2, 72, 16)),
        [(0, 24), (48, 72), (72, 96)],
    )


def test_gradients_are_refused_with_what_to_do() -> None:
    pipeline = Pipeline(Settings())
    pipeline.layers[0].weights[1].requires_grad_(True)
    with attach(pipeline, "bf16", adapter=ADAPTER), pytest.raises(StateError, match=r"layer 0, keys: .*torch\.no_grad"):
        pipeline.inference(0, 1)
    with attach(pipeline, "bf16", adapter=ADAPTER), torch.no_grad():
        pipeline.inference(0, 1)


def test_nan_in_the_host_is_named_and_leaves_it_usable() -> None:
    # Without denoising steps nothing of a chunk flows into the next but through the cache.
    pipeline = Pipeline(Settings(steps=0))
    weights = pipeline.layers[1].weights
    pipeline.layers[1].weights = [weights[0], weights[1], weights[2] * float("nan")]
    with attach(pipeline, "rtn", adapter=ADAPTER):
        with pytest.raises(DomainError, match=r"layer 1: chunk 0: values: .* NaN"):
            pipeline.inference(0, 3)
        pipeline.layers[1].weights = weights
        assert pipeline.inference(0, 3).isfinite().all()


def test_an_unknown_host_gets_a_list() -> None:
    with pytest.raises(
        UnknownHostError, match=r"recognises a tests\.models\.rolling_host\.Pipeline; known: .*demo.*adapter="
    ):
        attach(Pipeline(Settings()))
    with pytest.raises(UnknownNameError, match="unknown adapter 'dmeo'; did you mean 'demo'"):
        attach(Pipeline(Settings()), adapter="dmeo")


def test_wrong_settings_change_nothing() -> None:
    pipeline = Pipeline(Settings())
    before = vars(pipeline).copy()
    with pytest.raises(UnknownNameError, match="did you mean 'quantwm'"):
        attach(pipeline, "quantmw", adapter=ADAPTER)
    with pytest.raises(ParameterError, match="has no parameter"):
        attach(pipeline, "rtn", adapter=ADAPTER, rank=3)
    with pytest.raises(ParameterError, match="ready scheme"):
        attach(pipeline, scheme("rtn"), adapter=ADAPTER, rank=3)
    for adapter in (3, object(), [], RollingAdapter, rolling_host):
        with pytest.raises(ParameterError, match=r"adapter .*: need the name of one, or a module or object"):
            attach(pipeline, adapter=adapter)  # type: ignore[arg-type]  # on purpose
    for observers in (None, 3, [3], "x", [CacheObserver], [CacheObserver(), None]):
        with pytest.raises(ParameterError, match=r"observers? .*: need a "):
            attach(pipeline, adapter=ADAPTER, observers=observers)  # type: ignore[arg-type]  # on purpose
    assert vars(pipeline) == before


@pytest.mark.parametrize("settings", [{"rank": 10**9}, {"group_size": 12}])
def test_settings_that_no_head_of_the_host_fits_are_refused_before_its_first_chunk(settings: dict[str, Any]) -> None:
    pipeline = Pipeline(Settings())
    expected, seen = bits(pipeline.inference(1, 2)), list[int]()
    pipeline.after_chunk = seen.append
    before = vars(pipeline).copy()
    with attach(pipeline, "quantwm", adapter=ADAPTER, **settings) as attachment:
        with pytest.raises(
            ParameterError, match=r"layer 0: (quantwm rank 10+: need at most 16|group size 12 does not fit)"
        ):
            pipeline.inference(1, 2)
        assert [cache.tokens for cache in attachment.caches] == [0]
    assert not seen
    assert vars(pipeline) == before
    assert bits(pipeline.inference(1, 2)) == expected


def careless(undo: object = None) -> Any:
    """An adapter as an object, whose ``attach`` returns ``undo`` or, if that is an error, raises it."""

    def attach(pipeline: object, make_cache: MakeCache) -> object:
        if isinstance(undo, Exception):
            raise undo
        return undo

    return SimpleNamespace(matches=lambda _: True, attach=attach)


@pytest.mark.parametrize("undo", [None, 3, ()])
def test_an_adapter_that_does_not_say_how_a_host_is_restored_is_refused(undo: object) -> None:
    with pytest.raises(ParameterError, match=rf"adapter in {__name__}: its attach\(\) returned .*, need a function"):
        attach(Pipeline(Settings()), "bf16", adapter=careless(undo))


@pytest.mark.parametrize(
    "error", [KeyError("blocks"), AttributeError("blocks"), IndexError(), TypeError("x"), ValueError("x")]
)
def test_an_adapter_that_stumbles_over_a_host_is_named(error: Exception) -> None:
    message = re.escape(f"Pipeline: attach() of the adapter in {__name__} failed with {error!r}")
    with pytest.raises(HostError, match=message) as raised:
        attach(Pipeline(Settings()), "bf16", adapter=careless(error))
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [HostError("no blocks"), StateError("attached"), RuntimeError("no memory")])
def test_other_errors_of_an_adapter_come_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        attach(Pipeline(Settings()), "bf16", adapter=careless(error))
    assert raised.value is error


def test_an_adapter_as_an_object_is_the_one_whose_module_it_becomes() -> None:
    bare = SimpleNamespace(matches=causal_forcing.matches, attach=causal_forcing.attach)
    settled = SimpleNamespace(matches=causal_forcing.matches, attach=partial(causal_forcing.attach))
    for adapter in (causal_forcing, causal_forcing.CausalForcing(), bare, settled):
        with attach(causal_forcing_host.CausalInferencePipeline(9, 3), "bf16", adapter=adapter) as attachment:
            assert attachment.adapter == "quantwm_models.adapters.causal_forcing"


@pytest.mark.parametrize("offload", ["yes", 1, None])
def test_offload_is_true_or_false(offload: Any) -> None:
    with pytest.raises(ParameterError, match=r"offload=.*: need True or False"):
        attach(Pipeline(Settings()), "bf16", adapter=ADAPTER, offload=offload)


class Unlike(Pipeline):
    """A host of an unexpected version: its allocator is called otherwise."""

    _initialize_kv_cache = None  # type: ignore[assignment]  # the point of the class


def test_a_host_of_another_shape_is_refused_before_anything_is_patched() -> None:
    unlike = Unlike(Settings())
    with pytest.raises(HostError, match=r"Unlike: need a method _initialize_kv_cache\(\.\.\., device\), found None"):
        attach(unlike, "bf16", adapter=ADAPTER)
    pipeline = Pipeline(Settings())
    with pytest.raises(HostError, match="need a function 'attend'"):
        hook(RollingDict(pipeline, [rolling_host], attention="attend"), lambda *_, **__: LayerCache())
    assert "_initialize_kv_cache" not in vars(pipeline)


def test_dicts_of_another_shape_are_refused() -> None:
    class Flat(Pipeline):
        def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
            return [{"key": torch.zeros(batch_size, 4, 4, 4, dtype=dtype, device=device)}]

    pipeline = Flat(Settings())
    with (
        attach(pipeline, "bf16", adapter=ADAPTER),
        pytest.raises(HostError, match=r"layer 0: need a tensor .* under 'k', found NoneType among \['key'\]"),
    ):
        pipeline.inference(0, 1)
    assert "_initialize_kv_cache" not in vars(pipeline)


def test_a_registered_adapter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("small", f"{__name__}:ADAPTER", "quantwm.adapters")

    def entry_points(group: str, **selected: Any) -> EntryPoints:
        return EntryPoints([point]).select(group=group, **selected)

    own = adapters.names()
    monkeypatch.setattr(plugin, "entry_points", entry_points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert adapters.names() == tuple(sorted((*own, "small")))
    pipeline = Pipeline(Settings())
    with attach(pipeline, "rtn") as attachment:
        pipeline.inference(0, 2)
    assert attachment.report().tokens == 2 * 48


@pytest.mark.parametrize("name", adapters.names())
def test_adapters_judge_without_harm(name: str) -> None:
    adapter = adapters.get(name)
    assert not adapter.matches(object())
    assert not adapter.matches(None)
    assert not adapter.matches(Pipeline(Settings()))
