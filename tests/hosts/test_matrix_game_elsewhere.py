"""``fastvideo`` under FastVideo's Matrix-Game 2: the stage of its pipeline that denoises, with its own ``forward``.

Run with ``nox -s hosts``, or with ``-- --checkout fastvideo=PATH``, where PATH holds the package ``fastvideo``.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_models import adapters, attach
from quantwm_models.errors import HostError
from tests.hosts import fastvideo
from tests.hosts.checkout import checkouts
from tests.hosts.live import Live, footprint, prove, randomise

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

FRAME, LAYERS, HEADS, CHANNELS, CHUNK = 16, 2, 2, 32, 3
WIDTH = 2 * 2 * HEADS * CHANNELS  # BF16 bytes of a token's keys and values
ACTION_HEADS, ACTION_CHANNELS = 2, 64
LONGEST = 4  # chunks of the longest video
STAGE = "fastvideo.pipelines.stages.matrixgame2_denoising"

Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    root = checkouts(request.config).get("fastvideo")
    if root is None:
        pytest.skip("no checkout fastvideo was named, and it is not installed")
    with fastvideo.importing(root) as load:
        load(STAGE).get_local_torch_device = lambda: torch.device("cpu")
        load("fastvideo.pipelines.stages.denoising").get_world_group = lambda: SimpleNamespace(local_rank=1)
        load("fastvideo.models.dits.matrixgame2.causal_model").get_sp_world_size = lambda: 1
        yield load


def lived(load: Load, mouse: bool = True, **more: Any) -> Live:
    """The stage around a tiny model, of which one of two layers has an action module."""
    configs = load("fastvideo.configs.models.dits.matrixgame2")
    actions = {
        **configs.MatrixGame2WanVideoArchConfig().action_config,
        "blocks": [0],
        "enable_mouse": mouse,
        "heads_num": ACTION_HEADS,
        "hidden_size": 32,
        "img_hidden_size": HEADS * CHANNELS,
        "mouse_hidden_dim": ACTION_HEADS * ACTION_CHANNELS,
        "keyboard_hidden_dim": ACTION_HEADS * ACTION_CHANNELS,
    }
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": CHANNELS, "num_layers": LAYERS, "ffn_dim": 64}
    small = {"freq_dim": 32, "in_channels": 36, "out_channels": 16, "added_kv_proj_dim": HEADS * CHANNELS}
    arch = configs.MatrixGame2WanVideoArchConfig(
        **sizes, **small, action_config=actions, **{"local_attn_size": 6, **more}
    )
    config = configs.MatrixGame2WanVideoConfig(arch_config=arch)
    model = load("fastvideo.models.dits.matrixgame2.causal_model").CausalMatrixGame2WanModel(config, {})
    randomise(model.eval().requires_grad_(False))
    model.to(torch.bfloat16)
    scheduler = load("fastvideo.models.schedulers.scheduling_self_forcing_flow_match").SelfForcingFlowMatchScheduler()
    stage = load(STAGE).MatrixGame2CausalDenoisingStage(model, scheduler)
    settings = SimpleNamespace(
        disable_autocast=False,
        pipeline_config=SimpleNamespace(
            dmd_denoising_steps=[1000, 500], warp_denoising_step=False, dit_config=config, context_noise=0
        ),
    )
    conditions = conditioned(mouse)

    def video(seed: int, chunks: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(1, 16, CHUNK * chunks, 8, 8, generator=generator).to(torch.bfloat16)
        batch = SimpleNamespace(latents=latents, generator=generator, **conditions)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # the host's own serves CUDA
            made: Tensor = stage(batch, settings).latents
        return made

    return Live(stage, (load(STAGE), load("fastvideo.models.dits.matrixgame2.causal_model")), video, NOTES)


# What the stage and its layers note when they run, the table of rotations among it.
NOTES = ("frame_seq_length", "_freqs_cache", "_freqs_cos", "_freqs_sin", "__warningregistry__")


def conditioned(mouse: bool) -> dict[str, Any]:
    """What a batch carries beside the noise."""
    generator = torch.Generator().manual_seed(3)
    frames = CHUNK * LONGEST
    pressed = torch.randn(1, 1 + 4 * (frames - 1), 6, generator=generator).to(torch.bfloat16)
    return {
        "prompt_embeds": [torch.zeros(1, 0, 0)],
        "image_embeds": [torch.randn(1, 257, 1280, generator=generator)],
        "image_latent": torch.randn(1, 20, frames, 8, 8, generator=generator).to(torch.bfloat16),
        "keyboard_cond": pressed[..., :4],
        "mouse_cond": pressed[..., 4:] if mouse else None,
    }


CASES: dict[str, dict[str, Any]] = {
    "window 6": {},
    "window 6, no mouse": {"mouse": False},
    "window 9, sink 3": {"local_attn_size": 9, "sink_size": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_videos(load: Load, name: str) -> None:
    case = CASES[name]
    attachment = prove(lambda: lived(load, **case), (4, 3))
    report = attachment.report()
    assert report.tokens == LAYERS * FRAME * case.get("local_attn_size", 6)
    assert report.active_nbytes == WIDTH * LAYERS * FRAME * CHUNK
    assert all("basis" in cache.chunks[-1].keys.arrays for cache in attachment.caches)


def test_action_caches_without_a_use_take_no_memory(load: Load) -> None:
    live, seen = lived(load), []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append([[each["k"].numel() for each in kwargs[f"kv_cache_{name}"]] for name in ("mouse", "keyboard")])

    live.pipeline.transformer.register_forward_pre_hook(note, with_kwargs=True)
    live.video(0, 1)
    with attach(live.pipeline, "bf16"):
        live.video(0, 1)
    stock, ours = seen[0], seen[-1]
    for each in (0, 1):  # of the two layers, the first has an action module
        assert stock[each][0] == stock[each][1] == ours[each][0] > 0
        assert ours[each][1] == 0


def test_another_policy_is_refused_before_anything_changes(load: Load) -> None:
    live = lived(load)
    assert adapters.find(live.pipeline) is adapters.get("fastvideo")
    with attach(live.pipeline), pytest.raises(StateError, match="attached already"):
        attach(live.pipeline)
    other = lived(load, rope_cache_policy="relativistic")
    before = footprint(other)
    with pytest.raises(HostError, match="before RoPE are not served"):
        attach(other.pipeline)
    assert footprint(other) == before
