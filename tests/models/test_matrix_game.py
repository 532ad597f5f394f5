"""The adapter of Matrix-Game 2 under miniatures of its pipelines."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quantwm_core.errors import ParameterError, StateError
from quantwm_models import adapters, attach
from quantwm_models.adapters.matrix_game import MatrixGame
from quantwm_models.errors import HostError
from tests.models import causal_forcing_host, wan_host
from tests.models.chunks import bits
from tests.models.matrix_game_host import (
    ActionModel,
    CausalInferencePipeline,
    CausalInferenceStreamingPipeline,
)
from tests.models.wan_host import CHANNELS, FRAME, HEADS, noise

ORIGINAL = wan_host.attention
FRAME_NBYTES = 2 * 2 * FRAME * HEADS * CHANNELS  # keys and values of one layer
LENGTHS = (15, 6, 12)

HOSTS: dict[str, Callable[[], CausalInferencePipeline]] = {
    "window 6": CausalInferencePipeline,
    "window 4": lambda: CausalInferencePipeline(4),
    "window and sink": lambda: CausalInferencePipeline(9, sink=3),
    "streaming": CausalInferenceStreamingPipeline,
    "no mouse": lambda: CausalInferencePipeline(actions=(ActionModel(6, mouse=False), ActionModel(6, mouse=False))),
    "no action": lambda: CausalInferencePipeline(actions=(None, None)),
}


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    yield
    assert wan_host.attention is ORIGINAL


def videos(host: CausalInferencePipeline) -> list[torch.Tensor]:
    return [host.inference(noise(seed, frames)) for seed, frames in enumerate(LENGTHS)]


def state(host: CausalInferencePipeline) -> dict[Any, Any]:
    parts = [host, *(part for block in host.generator.model.blocks for part in (block.self_attn, block.action_model))]
    return {(number, name): value for number, part in enumerate(parts) if part for name, value in vars(part).items()}


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


@pytest.mark.parametrize("name", HOSTS)
def test_bf16_is_bit_identical_and_leaves_no_trace(name: str) -> None:
    host, ran = HOSTS[name](), HOSTS[name]()
    expected = [bits(each) for each in videos(ran)]
    for each in (host, ran):
        before = state(each)
        with attach(each, "bf16"):
            assert [bits(video) for video in videos(each)] == expected
        assert same(before, state(each))
    assert [bits(each) for each in videos(host)] == expected


@pytest.mark.parametrize("name", HOSTS)
def test_quantwm_seals_what_is_complete(name: str) -> None:
    host = HOSTS[name]()
    expected = videos(host)
    with attach(host, "quantwm", iterations=2) as attachment:
        quantized = videos(host)
    assert all(each.isfinite().all() for each in quantized)
    assert not torch.equal(quantized[-1], expected[-1])
    report = attachment.report()
    assert report.sealed_tokens == 2 * (host.local_attn_size - 3) * FRAME
    assert report.active_nbytes == 2 * 3 * FRAME_NBYTES


def test_action_caches_without_a_use_take_no_memory() -> None:
    host = CausalInferencePipeline(actions=(ActionModel(6, mouse=False), ActionModel(6)), spare=28)
    with attach(host, "bf16"):
        host.inference(noise(0, 6))
        assert host.kv_cache_mouse
        assert host.kv_cache_keyboard
        sizes = [[each["k"].numel(), each["v"].numel()] for each in host.kv_cache_mouse]
        full = FRAME * 6 * HEADS * CHANNELS
        assert sizes == [[0, 0], [full, full], *([0, 0] for _ in range(28))]
        assert [each["k"].numel() for each in host.kv_cache_keyboard[:3]] == [full // FRAME, full // FRAME, 0]
        # None is left where tensors have no data, indices included.
        entries = [*host.kv_cache_mouse, *host.kv_cache_keyboard]
        assert not any(tensor.is_meta for each in entries for tensor in each.values())


def test_a_longer_window() -> None:
    host = CausalInferencePipeline()
    stock, longer = bits(host.inference(noise(0, 18))), bits(CausalInferencePipeline(12).inference(noise(0, 18)))
    before = state(host)
    with attach(host, "bf16", adapter=MatrixGame(window=12)) as attachment:
        assert bits(host.inference(noise(0, 18))) == longer != stock
    assert attachment.report().tokens == 2 * 12 * FRAME
    assert same(before, state(host))
    assert bits(host.inference(noise(0, 18))) == stock


def test_a_window_shorter_than_a_chunk_is_refused() -> None:
    host = CausalInferencePipeline()
    before = state(host)
    with pytest.raises(ParameterError, match="window=2: need at least the 3 frames of a chunk"):
        attach(host, adapter=MatrixGame(window=2))
    assert same(before, state(host))


def test_attaching_twice_is_refused() -> None:
    host = CausalInferencePipeline()
    with attach(host, "rtn"), pytest.raises(StateError, match="CausalInferencePipeline: a cache is attached already"):
        attach(host, "bf16")


def test_two_hosts_of_one_model_cannot_both_set_its_window() -> None:
    one, other = CausalInferencePipeline(), CausalInferencePipeline()
    other.generator = one.generator
    before = state(one)
    with attach(one, "rtn", adapter=MatrixGame(window=9)):
        with pytest.raises(StateError, match=r"local_attn_size is set by another attachment"):
            attach(other, "rtn", adapter=MatrixGame(window=12))
        attach(other, "rtn").detach()
    assert same(state(one), before)


def test_what_is_no_host_is_told_apart_or_refused() -> None:
    adapter = adapters.get("matrix_game")
    host: Any = CausalInferencePipeline()
    assert adapter.matches(host)
    assert adapters.find(host) is adapter
    assert not adapter.matches(causal_forcing_host.CausalInferencePipeline())
    assert not adapter.matches(object())
    del host.generator.model.blocks[1].action_model
    before = state(CausalInferencePipeline()).keys()
    with pytest.raises(HostError, match=r"CausalInferencePipeline: need \.num_frame_per_block and .*action_model"):
        attach(host)
    assert "_initialize_kv_cache" not in vars(host)
    host.generator.model.blocks[1].action_model = None
    host._initialize_kv_cache_mouse_and_keyboard = None
    with pytest.raises(HostError, match=r"need a method _initialize_kv_cache_mouse_and_keyboard\(\.\.\., device\)"):
        attach(host)
    assert len(vars(host)) == len([key for key in before if key[0] == 0]) + 1
