"""``longcat_video`` under the classes of a checkout: github.com/meituan-longcat/LongCat-Video.

Run with ``nox -s hosts -- --checkout longcat_video=PATH``. The model computes in FP32, because the host leaves casting to
CUDA's autocast; keys and values are rounded to BF16 as they would be there.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_models import adapters, attach
from quantwm_models.adapters.longcat_video import LongCatVideo
from quantwm_models.errors import HostError
from tests.hosts.checkout import checkouts, importing
from tests.hosts.live import Live, footprint, prove, randomise, refuses_others, sdpa
from tests.models.chunks import bits

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

FRAME, LAYERS, HEADS, CHANNELS, TEXT = 16, 2, 4, 32, 24
WIDTH = 2 * 2 * HEADS * CHANNELS  # BF16 bytes of a token's keys and values
COND = 4  # latent frames of the history

Load = Callable[[str], Any]


def blockwise(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any = None, op: Any = None) -> Tensor:
    """Attention on ``[B, tokens, heads, head_dim]``, block by block where lengths are given."""
    if attn_bias is None:
        return sdpa(q, k, v)
    blocks = (each.split(lengths, dim=1) for each, lengths in zip((q, k, v), attn_bias, strict=True))
    return torch.cat([sdpa(*block) for block in zip(*blocks, strict=True)], dim=1)


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    root = checkouts(request.config).get("longcat_video")
    if root is None:
        pytest.skip("no checkout longcat_video was named")
    pytest.importorskip("diffusers.video_processor")
    pytest.importorskip("transformers")
    mask = SimpleNamespace(from_seqlens=lambda queries, keys: (queries, list(keys), list(keys)))
    masks = SimpleNamespace(attn_bias=SimpleNamespace(BlockDiagonalMask=mask))
    operations = {"memory_efficient_attention": blockwise, "fmha": masks}
    stubs: dict[str, dict[str, object]] = {
        "longcat_video.block_sparse_attention.bsa_interface": {"flash_attn_bsa_3d": None},
        "xformers": {"ops": SimpleNamespace(**operations)},
        "xformers.ops": dict(operations),
        "loguru": {"logger": None},
    }
    with importing(root, stubs=stubs) as load:
        yield load


def built(load: Load) -> Any:
    """The host's pipeline around a tiny model, with stand-ins for text encoder and VAE."""
    module = load("longcat_video.pipeline_longcat_video")
    model = load("longcat_video.modules.longcat_video_dit").LongCatVideoTransformer3DModel(
        hidden_size=HEADS * CHANNELS,
        depth=LAYERS,
        num_heads=HEADS,
        caption_channels=TEXT,
        mlp_ratio=1,
        adaln_tembed_dim=32,
        frequency_embedding_size=32,
        enable_xformers=True,
        cp_split_hw=[1, 1],
        text_tokens_zero_pad=True,
    )
    randomise(model)
    for block in model.blocks:
        for part in (block.attn.qkv, block.attn.k_norm):
            part.register_forward_hook(lambda _, __, output: output.bfloat16().float())
    config = SimpleNamespace(
        scale_factor_temporal=4, scale_factor_spatial=8, z_dim=16, latents_mean=[0.0] * 16, latents_std=[1.0] * 16
    )
    vae = SimpleNamespace(config=config, encode=encode)
    scheduler = load("longcat_video.modules.scheduling_flow_match_euler_discrete").FlowMatchEulerDiscreteScheduler()
    text = SimpleNamespace(config=SimpleNamespace(d_model=TEXT), dtype=torch.float32)
    pipeline = module.LongCatVideoPipeline(None, text, vae, scheduler, model.eval().requires_grad_(False))
    pipeline.device = "cpu"
    pipeline.get_condition_shape = lambda *_, **__: (64, 64)
    pipeline.encode_prompt = prompted
    return pipeline


def encode(video: Tensor) -> Any:
    """Latents of a video ``[1, 3, F, H, W]``, in the place of the VAE's."""
    latent = video[:, :1, ::4, ::8, ::8].expand(-1, 16, -1, -1, -1)
    return SimpleNamespace(latents=latent * torch.linspace(-1, 1, 16)[:, None, None, None])


def prompted(**_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A prompt and a negative one."""
    generator = torch.Generator().manual_seed(7)
    prompt, negative = torch.randn(2, 1, 1, 8, TEXT, generator=generator)
    mask = torch.ones(1, 8, dtype=torch.int64)
    return prompt, mask, negative, mask


def lived(load: Load, scale: float = 3.0, **arguments: Any) -> Live:
    """Segments, each continuing the one before, as the demo for long videos does."""
    pipeline = built(load)

    def video(seed: int, segments: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        frames = torch.rand(4 * COND - 3, 3, 64, 64, generator=generator)
        made = []
        for _ in range(segments):
            latents = pipeline.generate_vc(
                video=frames[None] * 2 - 1,
                prompt="a river",
                num_frames=4 * (COND + 2) - 3,
                num_cond_frames=4 * COND - 3,
                num_inference_steps=3,
                enhance_hf=False,
                guidance_scale=scale,
                generator=generator,
                output_type="latent",
                **arguments,
            )
            made.append(latents)
            pictures = latents[0, :3, -COND:].sigmoid().repeat_interleave(4, dim=1)[:, 3:]
            frames = pictures.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).transpose(0, 1)
        return torch.cat(made, dim=2)

    pipeline.video_processor = SimpleNamespace(preprocess_video=lambda video, **_: video.transpose(1, 2))
    modules = ("pipeline_longcat_video", "modules.attention", "modules.longcat_video_dit")
    notes = ("_guidance_scale", "_attention_kwargs", "_current_timestep", "_interrupt", "freqs_dict")
    return Live(pipeline, tuple(load(f"longcat_video.{name}") for name in modules), video, notes)


CASES: dict[str, dict[str, Any]] = {
    "guided": {},
    "not guided": {"scale": 1.0},
    "moved to the CPU between reads": {"offload_kv_cache": True},
}


@pytest.mark.parametrize("name", CASES)
def test_segments(load: Load, name: str) -> None:
    report = prove(lambda: lived(load, **CASES[name]), (3, 2)).report()
    assert (report.tokens, report.sealed_tokens) == (LAYERS * COND * FRAME, LAYERS * COND * FRAME)
    assert report.active_nbytes == 0
    assert report.host_nbytes == (report.sealed_nbytes if "offload_kv_cache" in CASES[name] else 0)
    assert report.workspace_nbytes == WIDTH * COND * FRAME


@pytest.mark.parametrize(("units", "tokens"), [(1, [64]), (2, [32, 32]), (3, [32, 16, 16]), (9, [16] * 4)])
def test_statistics_serve_from_the_second_unit_of_the_first_segment(load: Load, units: int, tokens: list[int]) -> None:
    live = lived(load)
    with attach(live.pipeline, "quantwm", adapter=LongCatVideo(first_units=units), iterations=2) as attachment:
        live.video(0, 1)
        first = [(chunk.tokens, "basis" in chunk.keys.arrays) for chunk in attachment.caches[0].chunks]
        live.video(1, 1)
        later = [(chunk.tokens, "basis" in chunk.keys.arrays) for chunk in attachment.caches[0].chunks]
    assert first == [(count, number > 0) for number, count in enumerate(tokens)]
    assert later == [(COND * FRAME, True)]


def test_chunks_per_seal_does_not_leave_a_history_unsealed(load: Load) -> None:
    live = lived(load)
    with attach(live.pipeline, "quantwm", chunks_per_seal=2, iterations=2) as attachment:
        live.video(0, 2)
    assert attachment.report().sealed_tokens == LAYERS * COND * FRAME


def test_without_a_cache_the_host_is_left_alone(load: Load) -> None:
    live = lived(load, use_kv_cache=False)
    plain = bits(live.video(0, 2))
    with attach(live.pipeline, "quantwm") as attachment:
        assert bits(live.video(0, 2)) == plain
    assert attachment.report().tokens == 0


def test_a_pipeline_of_another_shape_is_refused_before_anything_changes(load: Load) -> None:
    live = lived(load)
    assert adapters.find(live.pipeline).matches(live.pipeline.dit)
    refuses_others()
    with attach(live.pipeline.dit), pytest.raises(StateError, match="attached already"):
        attach(live.pipeline)
    del live.pipeline.dit.blocks[1].attn.rope_3d.freqs_dict
    before = footprint(live)
    with pytest.raises(HostError, match=r"LongCatVideoPipeline: need \.blocks of \.attn or"):
        attach(live.pipeline)
    assert footprint(live) == before
