"""The live pipeline: cache protocol, both paths through the weights, noise, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantwm_core.errors import QuantWMError
from quantwm_eval.demo import model as model_module
from quantwm_eval.demo.config import ModelConfig, denormalize, normalize
from quantwm_eval.demo.episodes import random_walk
from quantwm_eval.demo.masking import sequence_mask
from quantwm_eval.demo.model import NO_ACTION, VideoTransformer
from quantwm_eval.demo.sampler import WorldInputError, WorldPipeline, draw_noise, load, save

TINY = ModelConfig(width=48, heads=2, blocks=2, mlp_width=32, past_chunks=3)
FRAMES = torch.zeros(2, 4, 64, 64, 3, dtype=torch.uint8)
NOOPS = torch.zeros(2, 8, dtype=torch.int64)


def tiny(dtype: torch.dtype = torch.float32) -> WorldPipeline:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VideoTransformer(TINY)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return WorldPipeline(model, dtype)


def start_and_actions(batch: int, frames: int) -> tuple[Tensor, Tensor]:
    walk = random_walk(torch.arange(batch), 4 + frames)
    return walk.video()[:, :4], walk.actions[:, 4:]


def test_generation_through_the_cache_equals_the_training_path() -> None:
    world, chunks = tiny(), 6
    walk = random_walk(torch.arange(2), 4 * chunks)
    clean, actions = normalize(walk.video(), TINY), walk.actions.clone()
    actions[:, :4] = NO_ACTION
    noisy = draw_noise([1, 2], 4 * (chunks - 1))
    levels = torch.full((2, chunks - 1), 0.5)
    with torch.no_grad():
        together = world.model(clean, noisy, levels, walk.actions, sequence_mask(TINY, chunks, "cpu", dense=True))
        cache = world._initialize_kv_cache(2, torch.float32, "cpu")
        for chunk in range(chunks):
            here, current_start = slice(4 * chunk, 4 * chunk + 4), chunk * TINY.chunk_tokens
            if chunk:
                before = slice(4 * chunk - 4, 4 * chunk)
                alone = world.model.denoise(noisy[:, before], 0.5, actions[:, here], cache, current_start)
                torch.testing.assert_close(alone, together[:, before], rtol=1e-4, atol=1e-5)
            world.model.denoise(clean[:, here], 0.0, actions[:, here], cache, current_start)


def test_the_mask_shows_a_noisy_chunk_the_clean_past_of_the_window_and_itself() -> None:
    mask = sequence_mask(TINY, 6, "cpu", dense=True)
    assert isinstance(mask, Tensor)
    blocks = mask[:: TINY.chunk_tokens, :: TINY.chunk_tokens]
    assert blocks[6 + 4].nonzero().flatten().tolist() == [2, 3, 4, 6 + 4]
    assert blocks[4].nonzero().flatten().tolist() == [1, 2, 3, 4]


class Recorder:
    """A cache tensor that writes down which slots are set and read, and refuses everything else."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.events = tensor, list[tuple[str, int, int]]()
        self.shape = tensor.shape

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        self.events.append(("get", int(index[1].start or 0), int(index[1].stop)))
        return self.tensor[index]

    def __setitem__(self, index: tuple[slice, slice], value: Tensor) -> None:
        self.events.append(("set", int(index[1].start), int(index[1].stop)))
        self.tensor[index] = value


def record(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    allocate: Callable[..., Any] = world._initialize_kv_cache
    recorders: list[Recorder] = []

    def allocate_recorders(*arguments: Any) -> Any:
        layers = allocate(*arguments)
        for layer in layers:
            layer["k"] = Recorder(layer["k"])
            recorders.append(layer["k"])
        return layers

    monkeypatch.setattr(world, "_initialize_kv_cache", allocate_recorders)
    return recorders


def test_every_call_of_a_chunk_writes_the_same_slots_and_only_the_first_rolls(monkeypatch: pytest.MonkeyPatch) -> None:
    world, size = tiny(), TINY.chunk_tokens
    world.local_attn_chunks = 1
    start, actions = start_and_actions(1, 8)
    expected = world.generate(start, actions)
    recorders = record(world, monkeypatch)
    assert torch.equal(world.generate(start, actions), expected)
    first = [("set", 0, size), ("get", 0, size)]
    call = [("set", size, 2 * size), ("get", 0, 2 * size)]
    roll = [("get", size, 2 * size), ("set", 0, size)]
    assert recorders[0].events == first + 3 * call + roll + 3 * call


def test_a_sink_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = tiny()
    world.local_attn_chunks, world.sink_frames = 2, 2
    start, actions = start_and_actions(1, 16)
    recorders = record(world, monkeypatch)
    world.generate(start, actions)
    sink = 2 * TINY.frame_tokens
    writes = {(event[1], event[2]) for event in recorders[0].events if event[0] == "set"}
    assert writes == {(0, 256), (256, 512), (512, 768), (sink, 512)}


def test_indices_follow_the_protocol() -> None:
    world = tiny()
    world.local_attn_chunks = 1
    cache = world._initialize_kv_cache(1, torch.float32, "cpu")
    frames, actions = torch.zeros(1, 4, 64, 64, 3), torch.zeros(1, 4, dtype=torch.int64)
    ends = []
    for chunk in (0, 1, 1, 2):
        world.model.denoise(frames, 0.0, actions, cache, chunk * 256)
        ends.append((int(cache[0]["global_end_index"]), int(cache[0]["local_end_index"])))
    assert ends == [(256, 256), (512, 512), (512, 512), (768, 512)]


def test_attention_is_looked_up_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    world, calls = tiny(), list[tuple[int, int]]()
    plain = model_module.attention

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append((q.shape[1], k.shape[1]))
        return plain(q, k, v)

    monkeypatch.setattr(model_module, "attention", counted)
    world.generate(*start_and_actions(1, 4))
    assert calls == 2 * [(256, 256)] + 6 * [(256, 512)]


def test_noise_of_a_scene_depends_on_its_seed_alone() -> None:
    together = draw_noise([5, 6, 7], 8)
    assert torch.equal(together[1], draw_noise([6], 8)[0])
    assert torch.equal(together[1, :4], draw_noise([6], 4)[0])


def test_a_batch_equals_its_scenes_alone_and_the_global_generator_is_left_alone() -> None:
    world, before = tiny(), torch.random.get_rng_state()
    start, actions = start_and_actions(2, 8)
    both = world.generate(start, actions, seeds=[3, 4])
    alone = world.generate(start[1:], actions[1:], seeds=[4])
    assert (both[1].int() - alone[0].int()).abs().max() <= 1
    assert torch.equal(both, world.generate(start, actions, noise=draw_noise([3, 4], 8)))
    assert torch.equal(before, torch.random.get_rng_state())


def test_progress_is_told_after_every_chunk() -> None:
    told: list[tuple[int, int]] = []
    start, actions = start_and_actions(1, 8)
    tiny().generate(start, actions, steps=1, progress=lambda made, count: told.append((made, count)))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("first_frames", "actions", "options", "message"),
    [
        (FRAMES.float(), NOOPS, {}, "first_frames must be uint8"),
        (FRAMES[:, :3], NOOPS, {}, r"got torch.uint8 \[2, 3, 64, 64, 3\]"),
        (FRAMES, NOOPS.int(), {}, "actions must be int64"),
        (FRAMES, NOOPS[:1], {}, "B=2"),
        (FRAMES, NOOPS[:, :6], {}, "multiple of 4, got 6; pad with noop"),
        (FRAMES, NOOPS[:, :0], {}, "got 0"),
        (FRAMES, NOOPS + 7, {}, "got 7 to 7"),
        (FRAMES, torch.zeros(2, 1024, dtype=torch.int64), {}, "at most 1020 new frames"),
        (FRAMES, NOOPS, {"steps": 0}, "steps must be at least 1"),
        (FRAMES, NOOPS, {"seeds": [1]}, "noise must be"),
        (FRAMES, NOOPS, {"seeds": [1, 2], "noise": torch.zeros(1)}, "both seeds and noise"),
        (FRAMES, NOOPS, {"seeds": []}, r"one seed or row a scene; got torch\.float32 \(0, 8, 64, 64, 3\)"),
        (FRAMES[:0], NOOPS[:0], {"seeds": []}, "B must be at least 1"),
    ],
)
def test_bad_input_is_refused(first_frames: Tensor, actions: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorldInputError, match=message) as raised:
        tiny().generate(first_frames, actions, **options)
    assert isinstance(raised.value, QuantWMError)


@pytest.mark.parametrize(("window", "sink"), [(0, 0), (4, 0), (2, 5), (2, -1)])
def test_a_window_that_training_never_showed_is_refused(window: int, sink: int) -> None:
    world = tiny()
    world.local_attn_chunks, world.sink_frames = window, sink
    with pytest.raises(WorldInputError, match=r"local_attn_chunks|sink_frames"):
        world.generate(FRAMES, NOOPS)


def test_weights_survive_a_file(tmp_path: Path) -> None:
    world = tiny(torch.bfloat16)
    save(world.model, tmp_path / "tiny.safetensors")
    again = load(tmp_path / "tiny.safetensors")
    assert again.config == TINY
    start, actions = start_and_actions(1, 4)
    assert torch.equal(world.generate(start, actions), again.generate(start, actions))


def test_foreign_and_missing_weights_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(WorldInputError, match="no 'config'"):
        load(tmp_path / "foreign.safetensors")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing.safetensors")


def test_the_rotation_table_stays_exact_in_bfloat16() -> None:
    world = tiny(torch.bfloat16)
    assert world.model.cos.dtype == torch.float32
    assert torch.equal(world.model.cos, tiny().model.cos)


def test_denormalize_undoes_normalize() -> None:
    frames = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16, 1)
    assert torch.equal(denormalize(normalize(frames, TINY), TINY), frames)
