"""The demo adapter under the bundled world model itself, with small random weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core import methods
from quantwm_models import adapters, attach, snapshot
from quantwm_models.errors import HostError
from tests.models import miniatures
from tests.models.chunks import bits

WINDOWS = [(7, 0), (3, 0), (1, 0), (4, 4), (4, 6), (2, 3)]
FRAMES = 24


def named(name: str, module: str) -> Any:
    """An object whose class is called so."""
    return type(name, (), {"__module__": module})()


def test_the_demo_is_known_by_what_it_is() -> None:
    demo = adapters.get("demo")
    assert demo.matches(named("WorldPipeline", "quantwm_eval.demo.sampler"))
    assert not demo.matches(named("WorldPipeline", "elsewhere.sampler"))
    assert not demo.matches(named("Pipeline", "quantwm_eval.demo.sampler"))
    derived = type("Mine", (type(named("WorldPipeline", "quantwm_eval.demo.sampler")),), {})()
    assert demo.matches(derived)
    with pytest.raises(HostError, match=r"need \.model, \.config\.frame_tokens and \.sink_frames"):
        attach(derived, "bf16")
    derived.model, derived.sink_frames, derived.config = torch.nn.Linear(1, 1), 0, SimpleNamespace(frame_tokens=4)
    with pytest.raises(HostError, match="need a method _initialize_kv_cache"):
        attach(derived, "bf16")


@pytest.fixture(scope="module")
def world() -> Any:
    return miniatures.world()


def video(world: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 256, (2, 4, 64, 64, 3), dtype=torch.uint8, generator=generator)
    actions = torch.randint(0, 7, (2, FRAMES), generator=generator)
    result: Tensor = world.generate(first, actions, seeds=[seed, seed + 1])
    return result


@pytest.mark.parametrize(("chunks", "sink"), WINDOWS)
def test_bf16_is_bit_identical_over_several_videos(world: Any, chunks: int, sink: int) -> None:
    world.local_attn_chunks, world.sink_frames = chunks, sink
    plain = [bits(video(world, seed)) for seed in (1, 2)]
    with attach(world, "bf16") as attachment:
        assert [bits(video(world, seed)) for seed in (1, 2)] == plain
        report = attachment.report()
    chunk_tokens = world.config.chunk_tokens
    assert report.tokens == 2 * min(chunks + 1, FRAMES // 4 + 1) * chunk_tokens
    assert report.active_nbytes == 2 * 2 * 2 * 2 * 2 * 32 * chunk_tokens
    assert "_initialize_kv_cache" not in vars(world)
    assert bits(video(world, 1)) == plain[0]


@pytest.mark.parametrize("method", [name for name in methods.names() if name != "bf16"])
def test_every_method_runs_and_differs(world: Any, method: str) -> None:
    world.local_attn_chunks, world.sink_frames = 4, 0
    plain = video(world, 1)
    with attach(world, method) as attachment:
        quantized = video(world, 1)
    report = attachment.report()
    assert quantized.shape == plain.shape
    assert not torch.equal(quantized, plain)
    assert report.ratio > 1.5
    assert report.chunks_sealed > 0


def test_the_sink_that_is_set_later_is_the_one_that_counts(world: Any) -> None:
    world.local_attn_chunks, world.sink_frames = 4, 0
    with attach(world, "rtn") as attachment:
        world.sink_frames = 2
        video(world, 1)
    sink = 2 * world.config.frame_tokens
    assert attachment.caches[0].chunks[0].stop == sink
    assert attachment.caches[0].stream.live[0] == (0, sink)


def walked(world: Any, caches: Any, numbers: range) -> list[bytes]:
    """Chunks of a video by a loop that can begin anywhere; noise and actions are of the chunk's number alone."""
    made, size = [], world.config.chunk_frames
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        frames = torch.randn(2, size, 64, 64, 3, generator=generator)
        actions = torch.randint(0, 7, (2, size), generator=generator)
        for level in (1.0, 0.5, 0.0):
            frames = world.model.denoise(frames, level, actions, caches, number * world.config.chunk_tokens)
        made.append(bits(frames))
    return made


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("method", ["quantwm", "klt"])
def test_a_world_goes_on_from_a_snapshot(world: Any, method: str, offload: bool, tmp_path: Path) -> None:
    world.local_attn_chunks, world.sink_frames = 3, 4
    with torch.no_grad(), attach(world, method, offload=offload) as attachment:
        caches = world._initialize_kv_cache(2, world.dtype, "cpu")
        walked(world, caches, range(5))
        snapshot.save(attachment, tmp_path / "world")
        straight = walked(world, caches, range(5, 8))
    with torch.no_grad(), attach(world, method, offload=offload) as attachment:
        caches = world._initialize_kv_cache(2, world.dtype, "cpu")
        snapshot.load(attachment, tmp_path / "world")
        for entry, cache in zip(caches, attachment.caches, strict=True):
            entry["global_end_index"].fill_(cache.stream.end)
            entry["local_end_index"].fill_(cache.tokens)
        assert walked(world, caches, range(5, 8)) == straight
