"""``hy_world`` under the classes of a checkout: github.com/Tencent-Hunyuan/HY-WorldPlay.

Run with ``nox -s hosts -- --checkout hy_world=PATH``. The 5B model has 880 tokens a frame written into it.
"""

import contextlib
import importlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_models import adapters, attach
from quantwm_models.adapters.hy_world import HyWorld
from quantwm_models.errors import HostError
from tests.hosts.checkout import checkouts, importing
from tests.hosts.hy_world import CHUNK, SMALL, WAN_FRAME, Load, cameras, importing_wan, lived_wan
from tests.hosts.live import Live, footprint, prove, randomise, refuses_others
from tests.models.chunks import bits
from tests.models.ranks import Rank, launch, proved

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

LAYERS, HEADS, CHANNELS, TEXT = SMALL.layers, SMALL.heads, SMALL.head_dim, SMALL.text[1]
WIDTH = 2 * 2 * HEADS * 2 * CHANNELS  # BF16 bytes of a token's keys and values, each of two kinds


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest) -> Path:
    found = checkouts(request.config).get("hy_world")
    if found is None:
        pytest.skip("no checkout hy_world was named")
    pytest.importorskip("diffusers")
    return found


@pytest.fixture
def load_wan(root: Path) -> Iterator[Load]:
    with importing_wan(root) as load:
        yield load


@pytest.fixture
def load_hunyuan(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    stubs: dict[str, dict[str, object]] = {
        "loguru": {"logger": logging.getLogger("hyvideo")},
        "torchvision": {},
        "torchvision.transforms": {},
        "hyvideo": {"__path__": [str(root / "hyvideo")]},
        "hyvideo.models.text_encoders": dict.fromkeys(("PROMPT_TEMPLATE", "TextEncoder")),
        "hyvideo.models.text_encoders.byT5": dict.fromkeys(("ByT5Mapper", "load_glyph_byT5_v2")),
        "hyvideo.models.text_encoders.byT5.format_prompt": {"MultilingualPromptFormat": None},
        "hyvideo.models.vision_encoder": {"VisionEncoder": None},
    }
    # They ask for torchvision when they are first used, and must not find the stub.
    for lazy in ("models.autoencoders.autoencoder_kl", "pipelines.pipeline_utils", "image_processor"):
        importlib.import_module(f"diffusers.{lazy}")
    with importing(root, stubs=stubs, bare=("hyvideo.pipelines",)) as load:
        alone = SimpleNamespace(sp_enabled=False, sp=1, sp_rank=0)
        vars(load("hyvideo.commons.parallel_states"))["__parallel_dims"] = alone
        state = load("hyvideo.commons.infer_state")
        vars(state)["__infer_state"] = state.InferState()
        yield load


HUNYUAN_FRAME = 16  # tokens of a latent frame of 4 x 4


def hunyuan_pipeline(load: Load, *, guided: bool) -> Any:
    """The 8B pipeline around a tiny model, past the encoders."""
    model = load("hyvideo.models.transformers.worldplay_1_5_transformer").HunyuanVideo_1_5_DiffusionTransformer(
        patch_size=[1, 1, 1],
        in_channels=4,
        hidden_size=HEADS * CHANNELS,
        heads_num=HEADS,
        mlp_width_ratio=1.0,
        mm_double_blocks_depth=LAYERS,
        mm_single_blocks_depth=0,
        rope_dim_list=[4, 6, 6],
        text_states_dim=TEXT,
        attn_mode="torch",
        vision_projection="linear",
        vision_states_dim=TEXT,
    )
    model.add_action_parameters()
    randomise(model)
    kind = load("hyvideo.pipelines.worldplay_video_pipeline").HunyuanVideo_1_5_Pipeline
    settings = {"do_classifier_free_guidance": guided, "guidance_scale": 3.0, "progress_bar": quiet}
    pipeline: Any = object.__new__(type("Settled", (kind,), settings))
    vars(pipeline).update(
        transformer=model.eval().requires_grad_(False).to(torch.bfloat16),
        scheduler=load("hyvideo.schedulers.scheduling_flow_match_discrete").FlowMatchDiscreteScheduler(),
        target_dtype=torch.bfloat16,
        autocast_enabled=False,
        enable_offloading=False,
        execution_device=torch.device("cpu"),
        chunk_latent_frames=CHUNK,
        num_inference_steps=2,
        num_warmup_steps=0,
        points_local=load("hyvideo.utils.retrieval_context").generate_points_in_sphere(200, 8.0),
    )
    pipeline.register_to_config()
    return pipeline


@contextlib.contextmanager
def quiet(self: Any, **_: object) -> Iterator[None]:
    """No bar."""
    yield


def lived_hunyuan(load: Load, *, guided: bool) -> Live:
    pipeline = hunyuan_pipeline(load, guided=guided)
    prompts = 2 if guided else 1

    def video(seed: int, chunks: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        pipeline.chunk_num = chunks
        pipeline.scheduler.set_timesteps(2, device="cpu")
        views, intrinsics, actions = cameras(CHUNK * chunks)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # the host's own serves CUDA
            latents: Tensor = pipeline.ar_rollout(
                latents=draw(1, 4, CHUNK * chunks, 4, 4),
                timesteps=pipeline.scheduler.timesteps,
                prompt_embeds=draw(prompts, 8, TEXT),
                prompt_mask=torch.ones(prompts, 8, dtype=torch.int64),
                vision_states=draw(prompts, 3, TEXT),
                cond_latents=draw(1, 5, CHUNK * chunks, 4, 4),
                task_type="i2v",
                extra_kwargs={"byt5_text_states": draw(prompts, 2, TEXT), "byt5_text_mask": torch.ones(prompts, 2)},
                viewmats=views,
                Ks=intrinsics,
                action=actions,
                device="cpu",
            )
        return latents

    modules = ("models.transformers.worldplay_1_5_transformer", "models.transformers.modules.attention")
    return Live(pipeline, tuple(load(f"hyvideo.{name}") for name in modules), video, ("chunk_num", "attn_param"))


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("guided", [False, True])
def test_hunyuan(load_hunyuan: Load, guided: bool, once: bool) -> None:
    attachment = prove(lambda: lived_hunyuan(load_hunyuan, guided=guided), (7, 3), HyWorld(once))
    report = attachment.report()
    assert report.tokens == report.sealed_tokens == (1 + guided) * LAYERS * 2 * CHUNK * HUNYUAN_FRAME
    assert report.sealed_bf16_nbytes == report.tokens * WIDTH // (1 + once)
    assert report.active_nbytes == 0
    assert all("basis" in chunk.keys.arrays for cache in attachment.caches for chunk in cache.chunks)


def test_a_pipeline_of_another_shape_is_refused_before_anything_changes(load_hunyuan: Load) -> None:
    live = lived_hunyuan(load_hunyuan, guided=False)
    assert adapters.find(live.pipeline) is adapters.get("hy_world")
    refuses_others()
    with attach(live.pipeline), pytest.raises(StateError, match="attached already"):
        attach(live.pipeline)
    del live.pipeline.transformer.double_blocks
    before = footprint(live)
    with pytest.raises(HostError, match=r"Settled: need \.transformer with \.blocks"):
        attach(live.pipeline)
    assert footprint(live) == before


@pytest.mark.slow
@pytest.mark.parametrize("once", [False, True])
def test_wan(load_wan: Load, once: bool) -> None:
    attachment = prove(lambda: lived_wan(load_wan, SMALL), (3, 2), HyWorld(once))
    report = attachment.report()
    assert report.tokens == report.sealed_tokens == LAYERS * CHUNK * WAN_FRAME
    assert report.sealed_bf16_nbytes == report.tokens * WIDTH // (1 + once)
    assert report.active_nbytes == 0
    # The first chunk's queries weigh the first cache.
    assert all("basis" in chunk.keys.arrays for cache in attachment.caches for chunk in cache.chunks)


@pytest.mark.slow
def test_wan_with_frames_that_are_retrieved_from_memory(load_wan: Load) -> None:
    live = lived_wan(load_wan, SMALL)
    plain = bits(live.video(0, 6))
    with attach(live.pipeline, "bf16") as attachment:
        assert bits(live.video(0, 6)) == plain
    # Twelve frames before the sixth chunk, and four from memory, of the twenty that there are.
    assert attachment.report().tokens == LAYERS * 16 * WAN_FRAME


def one_of_two_ranks(rank: Rank, _: Path, root: Path) -> None:
    """What each process of the test below does."""
    with importing_wan(root) as load:
        for heads, once in ((2, True), (3, False)):  # the host pads the latter to four
            live = lived_wan(load, replace(SMALL, heads=heads))

            def video(seed: int, live: Live = live) -> Tensor:
                return live.video(seed, 2)

            attachment = proved(live.pipeline, video, HyWorld(once), videos=1)
            cache = attachment.caches[0]
            assert cache.ranks == rank.count
            assert cache.chunks[0].keys.shape == (1, heads - 1, CHUNK * WAN_FRAME, 2 * CHANNELS)


@pytest.mark.slow
def test_wan_of_two_ranks(root: Path, tmp_path: Path) -> None:
    launch(one_of_two_ranks, 2, "cpu", tmp_path, root)
