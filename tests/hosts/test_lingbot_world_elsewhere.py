"""``lingbot_world`` under FastVideo's LingBot-World 2: the stage of its pipeline that generates, with its own ``forward``.

Run with ``nox -s hosts``, or with ``-- --checkout fastvideo=PATH``, where PATH holds the package ``fastvideo``.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantwm_models import adapters, attach
from quantwm_models.errors import HostError
from tests.hosts import fastvideo
from tests.hosts.checkout import checkouts
from tests.hosts.live import Live, footprint, prove, randomise, sdpa

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

FRAME, LAYERS, HEADS, CHANNELS, TEXT = 16, 2, 4, 32, 24
WIDTH = 2 * 2 * HEADS * CHANNELS  # BF16 bytes of a token's keys and values
STAGE = "fastvideo.pipelines.basic.lingbotworld2.causal_fast_pipeline"

Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    root = checkouts(request.config).get("fastvideo")
    if root is None:
        pytest.skip("no checkout fastvideo was named, and it is not installed")
    with fastvideo.importing(root) as load:
        # The host's own fallback returns BF16, which its FP32 projection refuses; CUDA's autocast would cast it.
        module, stage = load("fastvideo.models.dits.lingbotworld2.causal_fast"), load(STAGE)
        module.attention = module.flash_attention = sdpa
        module.get_sp_world_size = stage.get_sp_world_size = lambda: 1
        module.get_sp_parallel_rank = lambda: 0
        stage.get_local_torch_device = lambda: torch.device("cpu")
        yield load


@pytest.fixture
def action(tmp_path: Path) -> Path:
    """A camera that moves a little."""
    poses = np.tile(np.eye(4), (400, 1, 1))
    poses[:, 0, 3] = np.linspace(0, 4, 400)
    np.save(tmp_path / "poses.npy", poses)
    np.save(tmp_path / "intrinsics.npy", np.tile([400.0, 400.0, 416.0, 240.0], (400, 1)))
    return tmp_path


class Coder:
    """Latents of a video ``[1, 3, F, H, W]``, in the place of the VAE's."""

    shift_factor = None
    scaling_factor = torch.ones(1)

    def to(self, _: object) -> "Coder":
        return self

    def encode(self, video: Tensor) -> Any:
        latent = video[:, :1, ::4, ::8, ::8].expand(-1, 16, -1, -1, -1)
        return SimpleNamespace(mean=latent * torch.linspace(-1, 1, 16)[:, None, None, None])


def lived(load: Load, action: Path, window: int, sink: int, chunk: int) -> Live:
    """The stage around a tiny model, called as its pipeline calls it."""
    configs = load("fastvideo.configs.models.dits.lingbotworld2")
    arch = configs.LingBotWorld2CausalFastArchConfig(
        text_len=8,
        dim=HEADS * CHANNELS,
        ffn_dim=64,
        freq_dim=32,
        text_dim=TEXT,
        num_heads=HEADS,
        num_layers=LAYERS,
        local_attn_size=window,
        sink_size=sink,
        chunk_size=chunk,
        max_area=64 * 64,
    )
    module = load("fastvideo.models.dits.lingbotworld2.causal_fast")
    config = configs.LingBotWorld2CausalFastVideoConfig(arch_config=arch)
    model = module.LingBotWorld2CausalFastTransformer3DModel(config, {}).eval().requires_grad_(False)
    randomise(model)
    model.patch_embedding_wancamctrl.register_forward_pre_hook(lambda _, args: (args[0].float(),))  # as autocast would
    scheduler = load("fastvideo.models.schedulers.scheduling_flow_unipc_multistep").FlowUniPCMultistepScheduler(
        shift=1.0
    )
    stage = load(STAGE).LingBotWorld2CausalFastGenerationStage(model, scheduler, Coder())
    settings = SimpleNamespace(
        pipeline_config=SimpleNamespace(dit_config=SimpleNamespace(arch_config=arch)), vae_cpu_offload=False
    )
    prompt, image = (
        torch.rand(shape, generator=torch.Generator().manual_seed(5)) for shape in ((1, 4, TEXT), (3, 64, 64))
    )

    def video(seed: int, chunks: int) -> Tensor:
        batch = SimpleNamespace(
            action_path=str(action),
            max_sequence_length=8,
            num_frames=4 * chunk * chunks - 3,
            pil_image=image,
            seed=seed,
            prompt_embeds=[prompt],
            prompt_attention_mask=None,
        )
        latents: Tensor = stage(batch, settings).latents
        return latents

    return Live(stage, (module, load(STAGE)), video, ("_cross_attn_initialized", "freqs", "__warningregistry__"))


CASES = {
    "all kept, chunk 4": ((-1, 0, 4), (3, 2)),
    "window 18, sink 6, chunk 4": ((18, 6, 4), (7, 3)),
    "window 9, sink 0, chunk 3": ((9, 0, 3), (5, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_videos(load: Load, action: Path, name: str) -> None:
    (window, sink, chunk), chunks = CASES[name]
    report = prove(lambda: lived(load, action, window, sink, chunk), chunks).report()
    frames = chunk * chunks[-1]
    assert report.tokens == LAYERS * FRAME * (min(window, frames) if window > 0 else frames)
    assert report.active_nbytes == LAYERS * WIDTH * FRAME * chunk


def test_a_stage_of_another_shape_is_refused_before_anything_changes(load: Load, action: Path) -> None:
    live = lived(load, action, 18, 6, 4)
    assert adapters.find(live.pipeline) is adapters.get("lingbot_world")
    del live.pipeline.transformer.blocks[0].self_attn.sink_size
    before = footprint(live)
    with pytest.raises(HostError, match=r"GenerationStage: need \.transformer\.blocks of \.self_attn with \.sink_size"):
        attach(live.pipeline)
    assert footprint(live) == before
