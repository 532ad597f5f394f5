"""``longcat_video`` under LongCat's transformer as other projects have it, driven as their pipelines drive it.

Run with ``nox -s hosts -- --checkout diffsynth=PATH --checkout fastvideo=PATH``: github.com/modelscope/DiffSynth-Studio,
github.com/hao-ai-lab/FastVideo, or the folders that hold the packages of these names.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_models import adapters, attach
from quantwm_models.adapters.longcat_video import LongCatVideo
from tests.hosts import fastvideo
from tests.hosts.checkout import checkouts, importing
from tests.hosts.live import Live, prove, randomise
from tests.hosts.weights import TREATMENTS

pytestmark = pytest.mark.filterwarnings("ignore")  # the hosts have their own

FRAME, LAYERS, HEADS, CHANNELS, TEXT = 16, 2, 4, 32, 24
COND, NEW = 4, 2  # latent frames of the history, and of what continues it
TINY = {
    "hidden_size": HEADS * CHANNELS,
    "depth": LAYERS,
    "caption_channels": TEXT,
    "mlp_ratio": 1,
    "adaln_tembed_dim": 32,
    "frequency_embedding_size": 32,
}


class Host(SimpleNamespace):
    """A transformer, what it must be called in, and its modules."""

    model: torch.nn.Module
    context: Callable[[], AbstractContextManager[Any]]
    modules: tuple[Any, ...]
    masked: bool


@pytest.fixture(scope="module", params=["diffsynth", "fastvideo"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Host]]:
    root = checkouts(request.config).get(request.param)
    if root is None:
        pytest.skip(f"no checkout {request.param} was named")
    if request.param == "fastvideo":
        with fastvideo.importing(root) as load:
            yield lambda: fast(load)
        return
    pytest.importorskip("einops")
    bare = ("diffsynth", "diffsynth.models", "diffsynth.core")
    stubs: dict[str, dict[str, object]] = {
        "diffsynth.models.wan_video_camera_controller": {"SimpleAdapter": None},
        "diffsynth.models.wantodance": dict.fromkeys(("WanToDanceRotaryEmbedding", "WanToDanceMusicEncoderLayer")),
    }
    with importing(root, bare=bare, stubs=stubs, within="diffsynth") as load:
        yield lambda: diffsynth(load)


def diffsynth(load: Callable[[str], Any]) -> Host:
    module = load("diffsynth.models.longcat_video_dit")
    model = module.LongCatVideoTransformer3DModel(**TINY, num_heads=HEADS, enable_flashattn2=False)
    return Host(model=model, context=nullcontext, modules=(module,), masked=True)


def fast(load: Callable[[str], Any]) -> Host:
    module = load("fastvideo.models.dits.longcat")
    configs = load("fastvideo.configs.models.dits.longcat")
    sizes = {**TINY, "num_attention_heads": HEADS, "attention_head_dim": CHANNELS}
    config = configs.LongCatVideoConfig(arch_config=configs.LongCatVideoArchConfig(**sizes))
    model = module.LongCatTransformer3DModel(config, {})
    return Host(model=model, context=lambda: fastvideo.calling(load), modules=(module,), masked=False)


def lived(make: Callable[[], Host], *, offload: bool = False, prompts: int = 2, treat: str = "") -> Live:
    """Segments, each continuing the one before: history in one pass, then steps that read it, as both pipelines do."""
    host = make()
    model = host.model.eval().requires_grad_(False)
    randomise(model)
    if treat:
        model = TREATMENTS[treat](model)
    for attention in (module for module in model.modules() if hasattr(module, "rope_3d")):
        for part in (getattr(attention, name, None) for name in ("k_norm", "qkv", "to_v")):
            if part is not None:
                part.register_forward_hook(as_in_bf16)

    def called(x: Tensor, text: Tensor, step: float, **more: Any) -> Any:
        times = torch.full((len(x), x.shape[2]), step)
        with torch.no_grad(), host.context():
            return model(hidden_states=x, timestep=times, encoder_hidden_states=text, **more)

    def video(seed: int, segments: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(1, 16, COND, 8, 8, generator=generator)]
        text = torch.randn(prompts, 1, 8, TEXT, generator=generator) if host.masked else None
        text = torch.randn(prompts, 8, TEXT, generator=generator) if text is None else text
        for _ in range(segments):
            history = torch.cat(made, dim=2)[:, :, -COND:]
            _, kv = called(history, 0 * text[:1], 0.0, return_kv=True, skip_crs_attn=True, offload_kv_cache=offload)
            x = torch.randn(1, 16, NEW, 8, 8, generator=generator)
            for step in (900.0, 400.0):
                new = called(x.expand(prompts, -1, -1, -1, -1), text, step, num_cond_latents=COND, kv_cache_dict=kv)
                x = 0.5 * x + 0.5 * (2 * new[:1] - new[-1:])
            made.append(x)
        return torch.cat(made[1:], dim=2)

    return Live(model, host.modules, video, ("freqs_dict", "__warningregistry__"))


def as_in_bf16(_: Any, __: Any, output: Any) -> Any:
    """What a projection gives where the host computes in BF16."""
    rounded = (each.bfloat16().float() if isinstance(each, Tensor) else each for each in output)
    return output.bfloat16().float() if isinstance(output, Tensor) else tuple(rounded)


@pytest.mark.parametrize("offload", [False, True])
def test_segments(make: Callable[[], Host], offload: bool) -> None:
    report = prove(lambda: lived(make, offload=offload), (3, 2)).report()
    assert report.tokens == report.sealed_tokens == LAYERS * COND * FRAME
    assert report.active_nbytes == 0
    assert report.host_nbytes == offload * report.sealed_nbytes


@pytest.mark.parametrize("treat", TREATMENTS)
def test_weights_that_are_moved_adapted_or_quantized(make: Callable[[], Host], treat: str) -> None:
    report = prove(lambda: lived(make, treat=treat), (2, 1)).report()
    assert report.sealed_tokens == LAYERS * COND * FRAME


def test_queries_of_both_prompts_count_and_later_units_know_them(make: Callable[[], Host]) -> None:
    live = lived(make)
    assert adapters.find(live.pipeline).matches(live.pipeline)
    with attach(live.pipeline, "quantwm", adapter=LongCatVideo(first_units=2), iterations=2) as attachment:
        live.video(0, 1)
    cache = attachment.caches[0]
    assert ["basis" in chunk.keys.arrays for chunk in cache.chunks] == [False, True]
    past = cache.queries.folded().past
    assert past is not None
    assert past.queries == FRAME * (COND + 2 * 2 * NEW)
