"""The adapter of Causal-Forcing under miniatures of its three pipelines."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import ParameterError
from quantwm_models import CacheObserver, LayerCache, adapters, attach
from quantwm_models.adapters.causal_forcing import CausalForcing
from quantwm_models.errors import HostError
from tests.models import causal_forcing_host, wan_host
from tests.models.causal_forcing_host import (
    CausalDiffusionInferencePipeline,
    CausalInferencePipeline,
    RollingInferencePipeline,
)
from tests.models.chunks import bits
from tests.models.graphs import compiled
from tests.models.wan_host import CHANNELS, FRAME, HEADS, noise

ORIGINALS = (wan_host.attention, vars(causal_forcing_host)["attention"])
FRAME_NBYTES = 2 * 2 * FRAME * HEADS * CHANNELS  # keys and values of one layer

Video = Callable[[Any, int, int], Tensor]


def rolled(pipeline: Any, seed: int, frames: int) -> Tensor:
    video: Tensor = pipeline.inference_rolling_forcing(noise(seed, frames))
    return video


def plain(pipeline: Any, seed: int, frames: int) -> Tensor:
    video: Tensor = pipeline.inference(noise(seed, frames))
    return video


# How a host is made, how it is asked, the frames that its cache ends with, and its active frames.
HOSTS: dict[str, tuple[Callable[[], Any], Video, int, int]] = {
    "chunkwise, global": (CausalInferencePipeline, plain, 6, 3),
    "chunkwise, window and sink": (lambda: CausalInferencePipeline(9, 3), plain, 9, 3),
    "half-sink chunk": (lambda: CausalInferencePipeline(8, 2), plain, 8, 3),
    "framewise": (lambda: CausalInferencePipeline(4, 1, chunk=1), plain, 4, 1),
    "guided": (lambda: CausalDiffusionInferencePipeline(window=6), plain, 2 * 6, 2 * 3),
    "rolling": (RollingInferencePipeline, rolled, 10, 2),
}
LENGTHS = {"chunkwise, global": (6, 3, 6)}


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    yield
    assert (wan_host.attention, vars(causal_forcing_host)["attention"]) == ORIGINALS


def videos(host: Any, video: Video, lengths: tuple[int, ...]) -> list[Tensor]:
    return [video(host, seed, frames) for seed, frames in enumerate(lengths)]


def state(pipeline: Any) -> dict[Any, Any]:
    modules = list(pipeline.generator.model.modules())
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules]
    attributes = {(number, name): value for number, each in enumerate(modules) for name, value in vars(each).items()}
    return {**attributes, **vars(pipeline), "hooks": hooks}


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    hooks = one.pop("hooks") == other.pop("hooks")
    return hooks and one.keys() == other.keys() and all(one[name] is other[name] for name in one)


@pytest.mark.parametrize("name", HOSTS)
def test_bf16_is_bit_identical_and_leaves_no_trace(name: str) -> None:
    make, video, frames, active = HOSTS[name]
    lengths = LENGTHS.get(name, (18, 6, 15) if name != "rolling" else (18, 8, 14))
    host = make()
    untouched = state(host)
    expected = [bits(each) for each in videos(make(), video, lengths)]
    with attach(host, "bf16") as attachment:
        assert [bits(each) for each in videos(host, video, lengths)] == expected
    assert same(untouched, state(host))
    report = attachment.report()
    assert report.tokens == 2 * frames * FRAME
    assert report.active_nbytes == 2 * active * FRAME_NBYTES
    assert [bits(each) for each in videos(host, video, lengths)] == expected


@pytest.mark.parametrize("name", HOSTS)
def test_quantwm_seals_what_is_complete(name: str) -> None:
    make, video, frames, active = HOSTS[name]
    lengths = LENGTHS.get(name, (18, 15) if name != "rolling" else (18, 14))
    host = make()
    expected = videos(host, video, lengths)
    with attach(host, "quantwm", iterations=2) as attachment:
        quantized = videos(host, video, lengths)
    assert all(each.isfinite().all() for each in quantized)
    assert not torch.equal(quantized[-1], expected[-1])
    report = attachment.report()
    assert report.sealed_tokens == 2 * (frames - active) * FRAME
    assert report.active_nbytes == 2 * active * FRAME_NBYTES
    assert all(cache.queries.past is not None for cache in attachment.caches)


def test_a_cache_for_each_prompt_has_statistics_of_its_own() -> None:
    host = CausalDiffusionInferencePipeline(window=6)
    with attach(host, "quantwm", iterations=2) as attachment:
        plain(host, 0, 15)
    first, second = (cache.queries.past for cache in attachment.caches[::2])
    assert first is not None
    assert second is not None
    assert first.queries == second.queries
    assert not torch.equal(first.mean, second.mean)


def test_room_for_more_frames_than_stock_code_allows() -> None:
    expected = bits(plain(CausalInferencePipeline(window=24), 0, 24))
    host = CausalInferencePipeline()
    with pytest.raises(RuntimeError, match="expanded size"):
        plain(host, 0, 24)
    untouched = state(host)
    with attach(host, "bf16", adapter=CausalForcing(frames=24)) as attachment:
        assert bits(plain(host, 0, 24)) == expected
    assert attachment.report().tokens == 2 * 24 * FRAME
    assert same(untouched, state(host))


@pytest.mark.parametrize(
    ("make", "frames", "message"),
    [
        (lambda: CausalInferencePipeline(window=6), 24, "frames=24 for a host with a window"),
        (RollingInferencePipeline, 24, "frames=24 for a host with a window"),
        (CausalInferencePipeline, 65, "frames=65: need 1 to 64, the host's temporal positions"),
    ],
)
def test_room_that_cannot_be_made(make: Callable[[], Any], frames: int, message: str) -> None:
    host = make()
    untouched = state(host)
    with pytest.raises(ParameterError, match=message):
        attach(host, adapter=CausalForcing(frames=frames))
    assert same(untouched, state(host))


class Sealed(CacheObserver):
    """Keeps the exact keys of the first unit."""

    def __init__(self) -> None:
        self.first: Tensor | None = None

    def sealed(self, cache: LayerCache, chunk: Any, keys: Tensor, values: Tensor) -> None:
        if cache.layer == 0 and chunk.start == 0:
            self.first = keys.clone()


def test_the_first_block_of_a_long_video_is_sealed_as_it_was_before_rotation() -> None:
    host, sealed = RollingInferencePipeline(), Sealed()
    with attach(host, "quantwm", observers=[sealed], chunks_per_seal=2, iterations=2) as attachment:
        made = rolled(host, 0, 18)
    size = causal_forcing_host.AnchoredSelfAttention.block_length
    layer = host.generator.model.blocks[0].self_attn
    _, _, _, before = layer.project(made[:, :size], 0)
    assert sealed.first is not None
    assert bits(sealed.first.transpose(1, 2)) == bits(before)
    first, *others = attachment.caches[0].chunks
    # Neither does it share a unit with rotated keys, nor does a query weight it.
    assert (first.start, first.stop) == (0, size)
    assert "basis" not in first.keys.arrays
    assert "basis" in others[-1].keys.arrays


def test_every_query_of_a_long_video_counts() -> None:
    host, blocks = RollingInferencePipeline(), 5
    with attach(host, "quantwm", iterations=2) as attachment:
        rolled(host, 0, 2 * blocks)
    past = attachment.caches[0].queries.past
    size = causal_forcing_host.AnchoredSelfAttention.block_length
    assert past is not None
    # The last block is active; each one before it had a call on itself and the next, and a clean one.
    assert past.queries == (blocks - 1) * 3 * size


def test_queries_of_an_unattached_pipeline_do_not_reach_the_statistics() -> None:
    host, other = RollingInferencePipeline(), RollingInferencePipeline()
    with attach(host, "quantwm", iterations=2) as attachment:
        rolled(host, 0, 14)
        known = attachment.caches[0].queries
        rolled(other, 1, 14)
        assert attachment.caches[0].queries is known


def test_queries_do_not_reach_the_statistics_of_one_that_was_detached_while_a_layer_ran() -> None:
    host, other, free = (RollingInferencePipeline() for _ in range(3))
    with attach(other, "bf16"):  # so that the attention function stays
        attachment = attach(host, "quantwm", iterations=2)
        layer = host.generator.model.blocks[-1].self_attn
        detaching = layer.register_forward_pre_hook(lambda *_: attachment.detach())
        with pytest.raises(TypeError, match="NoneType"):  # its dicts are taken away, too
            rolled(host, 0, 14)
        detaching.remove()
        known = attachment.caches[-1].queries
        rolled(free, 1, 14)
        assert attachment.caches[-1].queries is known


def test_a_failing_long_video_leaves_the_host_usable() -> None:
    host = RollingInferencePipeline()
    expected = bits(rolled(RollingInferencePipeline(), 0, 14))
    with attach(host, "bf16"):
        with pytest.raises(RuntimeError):
            host.inference_rolling_forcing(noise(0, 14)[..., :-1])
        assert bits(rolled(host, 0, 14)) == expected


def test_what_is_no_host_is_told_apart() -> None:
    adapter = adapters.get("causal_forcing")
    assert adapter.matches(CausalInferencePipeline())
    assert not adapter.matches(object())
    namesake = type("CausalInferencePipeline", (), {})()
    assert not adapter.matches(namesake)
    relative = CausalInferencePipeline()
    vars(relative)["kv_cache_mouse"] = None
    assert not adapter.matches(relative)


def test_a_host_of_another_shape_is_refused_before_anything_changes() -> None:
    host = CausalInferencePipeline()
    del host.generator.model.freqs
    untouched = state(host)
    with pytest.raises(HostError, match=r"need \.frame_seq_length and .*no attribute 'freqs'"):
        attach(host)
    assert same(untouched, state(host))


def test_a_compiled_host_does_not_trace_the_cache() -> None:
    host = CausalInferencePipeline(9, 3)
    expected = [bits(plain(host, seed, 18)) for seed in (0, 1)]
    with compiled([host.generator.model]) as graphs:
        with attach(host, "bf16"):
            assert [bits(plain(host, seed, 18)) for seed in (0, 1)] == expected
        assert [bits(plain(host, seed, 18)) for seed in (0, 1)] == expected
    assert any("wan_host.py" in graph for graph in graphs)
    assert not any("quantwm_models" in graph for graph in graphs)
