"""``fastvideo`` under FastVideo's own causal Wan and the stage that allocates its caches.

Run with ``nox -s hosts -- --checkout fastvideo=PATH``, where PATH holds the package ``fastvideo``.
"""

from collections.abc import Callable, Iterator
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
from tests.hosts.weights import TREATMENTS

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

FRAME, LAYERS, HEADS, CHANNELS, TEXT, CHUNK = 16, 2, 2, 32, 24, 3
WIDTH = 2 * 2 * HEADS * CHANNELS  # BF16 bytes of a token's keys and values

Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    root = checkouts(request.config).get("fastvideo")
    if root is None:
        pytest.skip("no checkout fastvideo was named")
    with fastvideo.importing(root) as load:
        yield load


def lived(load: Load, treat: str = "", **more: Any) -> Live:
    """Chunks, each denoised and then run once more clean, as the stage's ``forward`` does."""
    module = load("fastvideo.models.dits.causal_wanvideo")
    configs = load("fastvideo.configs.models.dits.wanvideo")
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": CHANNELS, "num_layers": LAYERS, "ffn_dim": 32}
    small = {"text_dim": TEXT, "freq_dim": 32, "in_channels": 4, "out_channels": 4}
    config = configs.WanVideoConfig(arch_config=configs.WanVideoArchConfig(**sizes, **small, **more))
    model = module.CausalWanTransformer3DModel(config, {}).eval().requires_grad_(False)
    randomise(model)
    model.to(torch.bfloat16)
    if treat:
        model = TREATMENTS[treat](model)
    stage = load("fastvideo.pipelines.stages.causal_denoising").CausalDMDDenosingStage(model, None)
    stage.frame_seq_length = FRAME

    def video(seed: int, chunks: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        caches = stage._initialize_kv_cache(batch_size=1, dtype=torch.bfloat16, device=torch.device("cpu"))
        text = torch.randn(1, 8, TEXT, generator=generator).to(torch.bfloat16)
        made = []
        for number in range(chunks):
            x = torch.randn(1, 4, CHUNK, 8, 8, generator=generator).to(torch.bfloat16)
            for step in (1000.0, 500.0, 0.0):
                times = torch.full((1, CHUNK), step)
                start = number * CHUNK
                with torch.no_grad(), fastvideo.calling(load):
                    new = model(x, text, times, kv_cache=caches, current_start=start * FRAME, start_frame=start)
                x = (0.5 * x + 0.5 * new).to(torch.bfloat16)
            made.append(x)
        return torch.cat(made, dim=2)

    return Live(stage, (module,), video, ("__warningregistry__",))


CASES: dict[str, dict[str, Any]] = {
    "all kept": {},
    "window 6": {"local_attn_size": 6},
    "window 9, sink 3": {"local_attn_size": 9, "sink_size": 3},
    "window 8, sink 1": {"local_attn_size": 8, "sink_size": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_videos(load: Load, name: str) -> None:
    case = CASES[name]
    report = prove(lambda: lived(load, **case), (5, 4)).report()
    window = case.get("local_attn_size", 4 * CHUNK)
    assert report.tokens == LAYERS * FRAME * min(window, 4 * CHUNK)
    assert report.sealed_tokens == report.tokens - LAYERS * FRAME * CHUNK
    assert report.active_nbytes == WIDTH * LAYERS * FRAME * CHUNK


@pytest.mark.parametrize("treat", ["moved_by_leaf", "moved_by_block"])
def test_weights_that_are_moved(load: Load, treat: str) -> None:
    report = prove(lambda: lived(load, treat, local_attn_size=6), (3, 2)).report()
    assert report.sealed_tokens == LAYERS * FRAME * CHUNK


def test_another_policy_or_shape_is_refused_before_anything_changes(load: Load) -> None:
    live = lived(load)
    assert adapters.find(live.pipeline) is adapters.get("fastvideo")
    with attach(live.pipeline), pytest.raises(StateError, match="attached already"):
        attach(live.pipeline)
    other = lived(load, rope_cache_policy="relativistic", local_attn_size=6, sink_size=1)
    before = footprint(other)
    with pytest.raises(HostError, match="before RoPE are not served"):
        attach(other.pipeline)
    other.pipeline.transformer.blocks[0].attn1.attn = None
    del other.pipeline.transformer.blocks[1].attn1.rope_cache_policy
    with pytest.raises(HostError, match=r"need \.transformer with \.blocks of \.attn1"):
        attach(other.pipeline)
    assert before
