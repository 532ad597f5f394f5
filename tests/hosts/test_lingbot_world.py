"""``lingbot_world`` under the classes of a checkout: github.com/robbyant/lingbot-world-v2.

Run with ``nox -s hosts -- --checkout lingbot_world=PATH``. The model computes in FP32, because the host leaves casting to
CUDA's autocast, and caches in BF16.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quantwm_models import adapters, attach
from quantwm_models.errors import HostError
from tests.hosts.checkout import checkouts, importing
from tests.hosts.live import Live, footprint, prove, randomise, refuses_others, sdpa
from tests.models.chunks import bits
from tests.models.ranks import Rank, launch, proved

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

FRAME, LAYERS, HEADS, CHANNELS = 16, 2, 4, 32
WIDTH = 2 * 2 * HEADS * CHANNELS  # BF16 bytes of a token's keys and values
TEXT = 4096  # the host's dummy prompt has it written in

# Views of weights, which FSDP makes anew at each call.
RENEWED = ("weight", "bias", "modulation")

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Tiny:
    """Frames of the window, the sink and a chunk, and how the host is run."""

    window: int = -1
    sink: int = 0
    chunk: int = 4
    mode: str = "causal_fast"
    parallel: bool = False
    sharded: bool = False


@contextlib.contextmanager
def imported(root: Path) -> Iterator[Load]:
    """The host's modules, with stand-ins for what a CPU lacks."""
    vision = {"to_tensor": lambda image: image.clone()}
    packages = ("wan", "wan.modules", "wan.utils", "wan.distributed")
    stubs = {"torchvision": {}, "torchvision.transforms": {}, "torchvision.transforms.functional": vision}
    with importing(root, bare=packages, stubs=stubs) as load:
        # The host's own fallback returns BF16, which its FP32 projection refuses; CUDA's autocast would cast it.
        for module, name in (
            ("model_fast", "attention"),
            ("model_fast", "flash_attention"),
            ("model_causal", "attention"),
            ("model_causal", "flash_attention"),
        ):
            setattr(load(f"wan.modules.{module}"), name, sdpa)
        load("wan.distributed.sequence_parallel").flash_attention = sdpa
        yield load


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest) -> Path:
    found = checkouts(request.config).get("lingbot_world")
    if found is None:
        pytest.skip("no checkout lingbot_world was named")
    pytest.importorskip("diffusers")
    return found


@pytest.fixture(scope="module")
def load(root: Path) -> Iterator[Load]:
    with imported(root) as load:
        yield load


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=(tmp_path / "group").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def action(tmp_path: Path) -> Path:
    """A camera that moves and turns a little."""
    poses = np.tile(np.eye(4), (400, 1, 1))
    poses[:, 0, 3] = np.linspace(0, 4, 400)
    np.save(tmp_path / "poses.npy", poses)
    np.save(tmp_path / "intrinsics.npy", np.tile([400.0, 400.0, 416.0, 240.0], (400, 1)))
    return tmp_path


def built(load: Load, tiny: Tiny) -> Any:
    """A pipeline of the host's class around a tiny model, without the checkpoints that its constructor loads."""
    fast = tiny.mode == "causal_fast"
    sizes: dict[str, Any] = {
        "model_type": "i2v",
        "in_dim": 36,
        "dim": HEADS * CHANNELS,
        "ffn_dim": 64,
        "freq_dim": 32,
        "text_dim": TEXT,
        "text_len": 8,
        "num_heads": HEADS,
        "num_layers": LAYERS,
    }
    if fast:
        model = load("wan.modules.model_fast").WanModelFast(**sizes, local_attn_size=tiny.window, sink_size=tiny.sink)
    else:
        model = load("wan.modules.model_causal").WanModelCausal(**sizes)
    randomise(model)
    kind = load("wan.image2video").WanI2VCausal
    pipeline = kind.__new__(kind)
    vars(pipeline).update(
        infer_mode=tiny.mode,
        device=torch.device("cpu"),
        config=SimpleNamespace(**sizes, vae_stride=(4, 8, 8), patch_size=(1, 2, 2)),
        rank=0,
        t5_cpu=True,
        init_on_cpu=True,
        num_train_timesteps=1000,
        param_dtype=torch.float32,
        pipe_dtype=torch.bfloat16,
        local_attn_size=tiny.window,
        sink_size=tiny.sink,
        text_encoder=lambda prompts, _: [torch.full((4, TEXT), len(prompts[0]) / 100)],
        vae_stride=(4, 8, 8),
        patch_size=(1, 2, 2),
        vae=SimpleNamespace(encode=encode, decode=lambda latents: latents),
        sp_size=1,
        _t5_cache={},
        _cross_attn_initialized=False,
    )
    shard = functools.partial(
        load("wan.distributed.fsdp").shard_model,
        device_id=torch.device("cpu"),
        param_dtype=None,  # what is computed in FP32 must not make it cast the cache
        sync_module_states=False,
    )
    pipeline.model = pipeline._configure_model(
        model, use_sp=tiny.parallel, dit_fsdp=tiny.sharded, shard_fn=shard, convert_model_dtype=False
    )
    pipeline.scheduler = load("wan.utils.fm_solvers_unipc").FlowUniPCMultistepScheduler(
        num_train_timesteps=1000, shift=1, use_dynamic_shifting=False
    )
    return pipeline


def encode(videos: list[Tensor]) -> list[Tensor]:
    """Latents of a video ``[3, F, H, W]``, in the place of the VAE's."""
    video = videos[0]
    latent = video[:1, ::4, ::8, ::8].expand(16, -1, -1, -1)
    return [latent * torch.linspace(-1, 1, 16)[:, None, None, None]]


def lived(load: Load, tiny: Tiny, action: Path, **arguments: Any) -> Live:
    pipeline = built(load, tiny)
    image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(5))

    def video(seed: int, chunks: int) -> Tensor:
        latents: Tensor = pipeline.generate(
            "a street",
            image,
            str(action),
            chunk_size=tiny.chunk,
            max_area=64 * 64,
            frame_num=4 * tiny.chunk * chunks - 3,
            seed=seed,
            offload_model=False,
            max_sequence_length=8,
            **arguments,
        )
        return latents

    modules = ("modules.model_fast", "modules.model_causal", "distributed.sequence_parallel", "image2video")
    return Live(
        pipeline,
        tuple(load(f"wan.{name}") for name in modules),
        video,
        notes=("_cross_attn_initialized", "_t5_cache", "_warmed", *(RENEWED if tiny.sharded else ())),
    )


CASES = {
    "global, chunk 3": (Tiny(chunk=3), (3, 4)),
    "global, chunk 4": (Tiny(), (3, 2)),
    "window 18, sink 6, chunk 4": (Tiny(window=18, sink=6), (8, 3, 6)),
    "window 18, sink 6, chunk 3": (Tiny(window=18, sink=6, chunk=3), (8, 7)),
    "window 9, sink 0, chunk 3": (Tiny(window=9, chunk=3), (5, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_distilled_model(load: Load, action: Path, name: str) -> None:
    tiny, chunks = CASES[name]
    attachment = prove(lambda: lived(load, tiny, action), chunks)
    check_sizes(attachment.report(), tiny, chunks[-1])


def check_sizes(report: Any, tiny: Tiny, chunks: int, branches: int = 1) -> None:
    frames = tiny.chunk * chunks
    assert report.tokens == branches * LAYERS * FRAME * (min(tiny.window, frames) if tiny.window > 0 else frames)
    assert report.active_nbytes == branches * LAYERS * WIDTH * FRAME * tiny.chunk
    assert report.ratio > 1.5


def test_the_sink_keeps_half_of_a_chunk(load: Load, action: Path) -> None:
    live = lived(load, Tiny(window=18, sink=6), action)
    with attach(live.pipeline, "quantwm", iterations=2) as attachment:
        live.video(0, 8)
    stream = attachment.caches[0].stream
    assert stream.live == ((0, 6 * FRAME), (20 * FRAME, 32 * FRAME))
    assert [(unit.start // FRAME, unit.stop // FRAME) for unit in stream.units] == [(0, 4), (4, 6), (20, 24), (24, 28)]


def test_reads_that_stop_short_of_the_window(load: Load, action: Path) -> None:
    tiny = Tiny(window=18, sink=6)
    prove(lambda: lived(load, tiny, action, max_attention_size=15 * FRAME + 3), (6, 3))


def test_a_dummy_forward_before_the_first_video(load: Load, action: Path) -> None:
    tiny = Tiny(window=12, sink=4)
    live = lived(load, tiny, action)
    plain = bits(live.video(0, 4))
    with attach(live.pipeline, "bf16") as attachment:
        live.pipeline.prewarm(torch.zeros(3, 64, 64), 64 * 64, 4 * tiny.chunk * 4 - 3, tiny.chunk, text_seq_len=8)
        assert live.pipeline._warmed
        assert attachment.report().tokens == LAYERS * FRAME * tiny.chunk
        assert bits(live.video(0, 4)) == plain
    assert attachment.report().tokens == LAYERS * FRAME * 12


@pytest.mark.slow
def test_pretrained_model_has_a_cache_for_each_prompt(load: Load, action: Path) -> None:
    tiny = Tiny(mode="causal_pretrain", chunk=3)
    attachment = prove(lambda: lived(load, tiny, action), (3, 2))
    check_sizes(attachment.report(), tiny, 2, branches=2)
    assert sorted(attachment._caches) == [(branch, layer) for branch in ("cond", "uncond") for layer in range(LAYERS)]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("tiny", [Tiny(parallel=True), Tiny(window=18, sink=6, parallel=True)])
def test_ulysses(load: Load, action: Path, tiny: Tiny) -> None:
    chunks = (6, 3)
    attachment = prove(lambda: lived(load, tiny, action), chunks)
    check_sizes(attachment.report(), tiny, chunks[-1])
    assert load("wan.distributed.sequence_parallel").flash_attention is sdpa


def one_of_two_ranks(rank: Rank, folder: Path, root: Path) -> None:
    """What each process of the test below does."""
    chunks = (7, 3)
    with imported(root) as load:
        for sharded in (False, True):
            tiny = Tiny(window=18, sink=6, parallel=True, sharded=sharded)
            live = lived(load, tiny, folder)
            live.pipeline.sp_size = rank.count
            live.video(9, 1)  # FSDP checks itself at its first call

            def video(seed: int, live: Live = live) -> Tensor:
                return live.video(seed, chunks[seed])

            cache = proved(live.pipeline, video).caches[0]
            assert cache.ranks == rank.count
            assert cache.chunks[0].keys.shape == (1, HEADS // 2, tiny.chunk * FRAME, CHANNELS)


@pytest.mark.slow
def test_ulysses_of_two_ranks(root: Path, action: Path) -> None:
    launch(one_of_two_ranks, 2, "cpu", action, root)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("parallel", [False, True])
def test_sharded_weights_hand_out_rebuilt_dicts(load: Load, action: Path, parallel: bool) -> None:
    tiny = Tiny(window=9, sink=3, chunk=3, parallel=parallel, sharded=True)

    def make() -> Live:
        live = lived(load, tiny, action)
        live.video(9, 1)  # the first call settles what FSDP knows of its modules
        return live

    attachment = prove(make, (5, 3))
    check_sizes(attachment.report(), tiny, 3)


def test_a_pipeline_of_another_shape_is_refused_before_anything_changes(load: Load, action: Path) -> None:
    live = lived(load, Tiny(), action)
    assert adapters.find(live.pipeline) is adapters.get("lingbot_world")
    refuses_others()
    del live.pipeline.model.blocks[0].self_attn.sink_size
    before = footprint(live)
    with pytest.raises(HostError, match=r"WanI2VCausal: need \.model\.blocks of \.self_attn with \.sink_size"):
        attach(live.pipeline)
    assert footprint(live) == before
