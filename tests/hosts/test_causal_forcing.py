"""``causal_forcing`` under the classes of a checkout: github.com/thu-ml/Causal-Forcing.

Run with ``nox -s hosts -- --checkout causal_forcing=PATH``; ``self_forcing=PATH`` takes github.com/guandeh17/Self-Forcing,
which the same adapter serves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import ParameterError
from quantwm_models import adapters, attach
from quantwm_models.adapters.causal_forcing import CausalForcing
from quantwm_models.errors import HostError
from tests.hosts.checkout import checkouts, importing
from tests.hosts.live import Live, footprint, prove, randomise, refuses_others, sdpa, smaller
from tests.models.chunks import bits

pytestmark = pytest.mark.filterwarnings("ignore")  # the hosts have their own

FRAME = 16  # tokens of a latent frame of 8 x 8
TEXT = 16


@dataclass(frozen=True)
class Tiny:
    """A small model: 2 layers of 4 heads x 32, or the released width in one layer."""

    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    window: int = -1
    sink: int = 0
    chunk: int = 3
    slots: int = 24 * FRAME


Load = Callable[[str], Any]


@pytest.fixture(scope="module", params=["causal_forcing", "self_forcing"])
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    name, _, folder = request.param.partition("/")
    root = checkouts(request.config).get(name)
    if root is None:
        pytest.skip(f"no checkout {name} was named")
    pytest.importorskip("diffusers")
    with importing(root / folder, bare=("wan", "wan.modules", "wan.utils", "pipeline")) as load:
        load("wan.modules.model").flash_attention = sdpa
        yield load


def wrapped(load: Load, tiny: Tiny) -> Any:
    """The host's wrapper around a tiny model, without the checkpoint that its constructor loads."""
    wrapper_module, scheduler = load("utils.wan_wrapper"), load("utils.scheduler")
    model = load("wan.modules.causal_model").CausalWanModel(
        model_type="t2v",
        dim=tiny.heads * tiny.head_dim,
        ffn_dim=64,
        freq_dim=32,
        text_dim=TEXT,
        text_len=8,
        num_heads=tiny.heads,
        num_layers=tiny.layers,
        local_attn_size=tiny.window,
        sink_size=tiny.sink,
    )
    randomise(model)
    wrapper = wrapper_module.WanDiffusionWrapper.__new__(wrapper_module.WanDiffusionWrapper)
    torch.nn.Module.__init__(wrapper)
    wrapper.model = model.eval().requires_grad_(False).to(torch.bfloat16)
    wrapper.uniform_timestep = False
    wrapper.scheduler = scheduler.FlowMatchScheduler(shift=5.0, sigma_min=0.0, extra_one_step=True)
    wrapper.scheduler.set_timesteps(1000, training=True)
    wrapper.seq_len = 1000 * FRAME
    wrapper.post_init()
    return wrapper


def built(load: Load, kind: str, module: str, tiny: Tiny) -> Any:
    """A pipeline of the host's class, with stand-ins for text encoder and VAE."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randn(2, 8, TEXT, generator=generator).to(torch.bfloat16)
    arguments = SimpleNamespace(
        denoising_step_list=[1000, 500],
        warp_denoising_step=False,
        num_frame_per_block=tiny.chunk,
        independent_first_frame=False,
        context_noise=0,
        num_train_timestep=1000,
        timestep_shift=5.0,
        guidance_scale=3.0,
        negative_prompt="blurred",
    )

    def encode(text_prompts: list[str]) -> dict[str, Tensor]:
        return {"prompt_embeds": torch.stack([prompt[int(text == "blurred")] for text in text_prompts])}

    pipeline = getattr(load(module), kind)(
        arguments,
        "cpu",
        generator=wrapped(load, tiny),
        text_encoder=encode,
        vae=SimpleNamespace(decode_to_pixel=pixels),
    )
    pipeline.num_transformer_blocks, pipeline.frame_seq_length = tiny.layers, FRAME
    if (tiny.heads, tiny.head_dim) != (12, 128):
        smaller(pipeline, "_initialize_kv_cache", tiny.slots, tiny.heads, tiny.head_dim)
    return pipeline


def pixels(latent: Tensor, use_cache: bool = False) -> Tensor:
    """No decoder: the latents are what is compared."""
    return latent


def noise(seed: int, frames: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, frames, 16, 8, 8, generator=generator).to(torch.bfloat16)


def lived(load: Load, pipeline: Any, run: str = "inference", batch: int = 1, **arguments: Any) -> Live:
    chunk = pipeline.num_frame_per_block

    def video(seed: int, chunks: int) -> Tensor:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            made = getattr(pipeline, run)(
                noise=noise(seed, chunks * chunk, batch),
                text_prompts=["a door"] * batch,
                return_latents=True,
                **arguments,
            )
        latents: Tensor = made[1]
        return latents

    modules = (load("wan.modules.causal_model"), load("wan.modules.model"))
    return Live(pipeline, modules, video, notes=("timesteps",))


FEW_STEPS = ("CausalInferencePipeline", "pipeline.causal_inference")

CASES = {
    "chunkwise, global": (Tiny(), (4, 2, 5)),
    "chunkwise, window": (Tiny(window=6), (5, 1, 4)),
    "chunkwise, window and sink": (Tiny(window=9, sink=3), (6, 2, 5)),
    "window no multiple of the chunk": (Tiny(window=8, sink=3), (6, 4)),
    "half-sink chunk": (Tiny(window=10, sink=4), (6, 4)),
    "framewise, global": (Tiny(chunk=1), (6, 3)),
    "framewise, window and sink": (Tiny(window=4, sink=1, chunk=1), (8, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_few_step_pipeline(load: Load, name: str) -> None:
    tiny, chunks = CASES[name]
    attachment = prove(lambda: lived(load, built(load, *FEW_STEPS, tiny)), chunks)
    report = attachment.report()
    window = tiny.window if tiny.window > 0 else chunks[-1] * tiny.chunk
    width = 2 * 2 * tiny.heads * tiny.head_dim
    assert report.tokens == tiny.layers * FRAME * min(window, chunks[-1] * tiny.chunk)
    assert report.active_nbytes == tiny.layers * width * FRAME * tiny.chunk
    assert report.ratio > 1.5


def test_released_width_through_the_stock_allocator(load: Load) -> None:
    tiny = Tiny(layers=1, heads=12, head_dim=128, window=6)
    report = prove(lambda: lived(load, built(load, *FEW_STEPS, tiny)), (4,)).report()
    assert report.tokens == 6 * FRAME
    assert report.ratio > 3


def test_batch_of_two(load: Load) -> None:
    report = prove(lambda: lived(load, built(load, *FEW_STEPS, Tiny(window=6)), batch=2), (4, 3)).report()
    assert report.sealed_bf16_nbytes == 2 * 2 * 2 * 2 * 4 * 32 * 3 * FRAME


def test_video_that_begins_with_given_frames(load: Load) -> None:
    first = noise(9, 3)
    live = lived(load, built(load, *FEW_STEPS, Tiny(window=9)), initial_latent=first)
    prove(lambda: live, (3, 2))


def test_guided_pipeline_has_a_cache_for_each_prompt(load: Load) -> None:
    def make() -> Live:
        pipeline = built(
            load, "CausalDiffusionInferencePipeline", "pipeline.causal_diffusion_inference", Tiny(window=6)
        )
        pipeline.sampling_steps = 4
        return lived(load, pipeline)

    attachment = prove(make, (4, 3))
    assert len(attachment.caches) == 2 * 2
    assert attachment.report().tokens == 2 * 2 * 6 * FRAME


def test_93_frames_need_room_that_stock_code_does_not_make(load: Load) -> None:
    tiny = Tiny(layers=1, slots=21 * FRAME)
    live = lived(load, built(load, *FEW_STEPS, tiny))
    with pytest.raises(RuntimeError, match="expanded size"):
        live.video(0, 8)
    roomy = lived(load, built(load, *FEW_STEPS, Tiny(layers=1, slots=24 * FRAME)))
    plain = bits(roomy.video(0, 8))
    again = lived(load, built(load, *FEW_STEPS, tiny))
    before = footprint(again)
    with attach(again.pipeline, "bf16", adapter=CausalForcing(frames=24)) as attachment:
        assert bits(again.video(0, 8)) == plain
        assert again.pipeline.generator.model.blocks[0].self_attn.max_attention_size == 24 * FRAME
    assert attachment.report().tokens == 24 * FRAME
    assert footprint(again) == before
    with pytest.raises(ParameterError, match="frames=24 for a host with a window"):
        attach(built(load, *FEW_STEPS, Tiny(window=6)), adapter=CausalForcing(frames=24))
    with pytest.raises(ParameterError, match="need 1 to 1024"):
        attach(again.pipeline, adapter=CausalForcing(frames=1025))


def test_a_pipeline_of_another_shape_is_refused_before_anything_changes(load: Load) -> None:
    live = lived(load, built(load, *FEW_STEPS, Tiny()))
    assert adapters.find(live.pipeline).matches(live.pipeline)
    refuses_others()
    del live.pipeline.generator.model.blocks[0].self_attn
    before = footprint(live)
    with pytest.raises(HostError, match=r"CausalInferencePipeline: need .*self_attn"):
        attach(live.pipeline)
    assert footprint(live) == before


@pytest.mark.parametrize("chunks", [(12, 4), (4, 10)])
@pytest.mark.parametrize("load", ["causal_forcing/long_video"], indirect=True)
def test_long_video_rotates_its_first_block_anew(load: Load, chunks: tuple[int, ...]) -> None:
    def make() -> Live:
        pipeline = built(load, "CausalInferencePipeline", "pipeline.rolling_forcing_inference", Tiny())
        for block in pipeline.generator.model.blocks:
            attention = block.self_attn
            attention.frame_length, attention.block_length = FRAME, 3 * FRAME
            attention.max_attention_size = 21 * FRAME
        return lived(load, pipeline, "inference_rolling_forcing")

    attachment = prove(make, chunks)
    report = attachment.report()
    assert report.tokens == 2 * FRAME * min(24, 3 * chunks[-1])
    assert attachment.caches[0].chunks[0].start == 0
    assert "basis" not in attachment.caches[0].chunks[0].keys.arrays
    assert "basis" in attachment.caches[0].chunks[-1].keys.arrays
