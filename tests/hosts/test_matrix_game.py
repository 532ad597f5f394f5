"""``matrix_game`` under the classes of a checkout: folder Matrix-Game-2 of github.com/SkyworkAI/Matrix-Game.

Run with ``nox -s hosts -- --checkout matrix_game=PATH``, the path being that of the folder. The host has 880 tokens a
frame written into it, which makes these tests slow.
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
from quantwm_models.adapters.matrix_game import MatrixGame
from quantwm_models.errors import HostError
from tests.hosts.checkout import checkouts, importing
from tests.hosts.live import Live, footprint, prove, randomise, refuses_others, sdpa, smaller
from tests.models.chunks import bits

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

FRAME, HEADS, CHANNELS = 880, 2, 32
WIDTH = 2 * 2 * HEADS * CHANNELS  # BF16 bytes of a token's keys and values
ACTION_HEADS, ACTION_CHANNELS = 2, 64
LONGEST = 12  # frames of the longest video

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Tiny:
    """Frames of the window, and which blocks have an action module."""

    window: int = 6
    layers: int = 2
    actions: tuple[int, ...] = (0,)
    mouse: bool = True
    kind: str = "CausalInferencePipeline"


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    root = checkouts(request.config).get("matrix_game")
    if root is None:
        pytest.skip("no checkout matrix_game was named")
    pytest.importorskip("diffusers")
    stubs: dict[str, dict[str, object]] = {
        "flash_attn": {"flash_attn_func": sdpa},
        "utils.visualize": {"process_video": lambda *_, **__: None},
    }
    packages = ("wan", "wan.modules", "utils", "pipeline")
    with importing(root, bare=packages, stubs=stubs, device=torch.device("cpu")) as load:
        # The stub stands for the action modules' function; the host's own fallback serves self-attention.
        load("wan.modules.attention").FLASH_ATTN_2_AVAILABLE = False
        load("wan.modules.model").flash_attention = sdpa
        pipeline = load("pipeline.causal_inference")
        pipeline.ZERO_VAE_CACHE = [None]
        pipeline.get_current_action = pressed
        pipeline.input = lambda _: ""
        yield load


def pressed(**_: object) -> dict[str, Tensor]:
    """What a user of the streaming pipeline would be asked for."""
    mouse, keyboard = ([0.1, 0.0], [1.0, 0.0, 0.0, 0.0])
    return {name: torch.tensor(each, dtype=torch.bfloat16) for name, each in (("mouse", mouse), ("keyboard", keyboard))}


def built(load: Load, tiny: Tiny) -> Any:
    """A pipeline of the host's class around a tiny model, with a stand-in for the VAE."""
    wrapper_module = load("utils.wan_wrapper")
    wrapper = wrapper_module.WanDiffusionWrapper.__new__(wrapper_module.WanDiffusionWrapper)
    torch.nn.Module.__init__(wrapper)
    model = load("wan.modules.causal_model").CausalWanModel(
        model_type="i2v",
        dim=HEADS * CHANNELS,
        ffn_dim=64,
        freq_dim=32,
        num_heads=HEADS,
        num_layers=tiny.layers,
        local_attn_size=tiny.window,
        action_config={
            "blocks": list(tiny.actions),
            "img_hidden_size": HEADS * CHANNELS,
            "keyboard_dim_in": 4,
            "hidden_size": 32,
            "heads_num": ACTION_HEADS,
            "mouse_hidden_dim": ACTION_HEADS * ACTION_CHANNELS,
            "keyboard_hidden_dim": ACTION_HEADS * ACTION_CHANNELS,
            "enable_mouse": tiny.mouse,
        },
    )
    randomise(model)
    wrapper.model = model.eval().requires_grad_(False).to(torch.bfloat16)
    wrapper.uniform_timestep = False
    wrapper.scheduler = load("utils.scheduler").FlowMatchScheduler(shift=5.0, sigma_min=0.0, extra_one_step=True)
    wrapper.scheduler.set_timesteps(1000, training=True)
    wrapper.post_init()
    arguments = SimpleNamespace(
        denoising_step_list=[1000, 500], warp_denoising_step=False, num_frame_per_block=3, context_noise=0
    )
    pipeline = getattr(load("pipeline.causal_inference"), tiny.kind)(
        arguments, "cpu", generator=wrapper, vae_decoder=lambda latents, *cache: (latents[:, :, :3], cache)
    )
    pipeline.num_transformer_blocks = tiny.layers + 1  # the host allocates for as many as the released models have
    smaller(pipeline, "_initialize_kv_cache", 15 * FRAME, HEADS, CHANNELS)
    smaller(pipeline, "_initialize_kv_cache_mouse_and_keyboard", 15 * FRAME, ACTION_HEADS, ACTION_CHANNELS)
    return pipeline


def conditions(mouse: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    frames = 1 + 4 * (LONGEST - 1)
    made = {
        "cond_concat": torch.randn(1, 20, LONGEST, 44, 80, generator=generator),
        "visual_context": torch.randn(1, 257, 1280, generator=generator),
        "keyboard_cond": torch.randn(1, frames, 4, generator=generator),
        "mouse_cond": torch.randn(1, frames, 2, generator=generator),
    }
    return {name: each.to(torch.bfloat16) for name, each in made.items() if mouse or name != "mouse_cond"}


def lived(load: Load, tiny: Tiny) -> Live:
    pipeline = built(load, tiny)
    streaming = {"output_folder": "", "name": ""} if "Streaming" in tiny.kind else {}

    def video(seed: int, chunks: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, 16, 3 * chunks, 44, 80, generator=generator).to(torch.bfloat16)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            latents: Tensor = pipeline.inference(
                noise=noise,
                conditional_dict=conditions(tiny.mouse),
                return_latents=True,
                mode="universal" if tiny.mouse else "templerun",
                **streaming,
            )
        return latents

    modules = tuple(load(f"wan.modules.{name}") for name in ("causal_model", "model", "action_module"))
    return Live(pipeline, modules, video)


CASES = {
    "universal, window 6": (Tiny(), (4, 2)),
    "gta_drive, window 4": (Tiny(window=4), (3,)),
    "temple run, window 6, no mouse": (Tiny(mouse=False), (3,)),
    "streaming": (Tiny(kind="CausalInferenceStreamingPipeline"), (3, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pipeline(load: Load, name: str) -> None:
    tiny, chunks = CASES[name]
    report = prove(lambda: lived(load, tiny), chunks).report()
    assert report.tokens == tiny.layers * FRAME * tiny.window
    assert report.active_nbytes == tiny.layers * WIDTH * FRAME * 3
    assert report.sealed_tokens == tiny.layers * FRAME * (tiny.window - 3)
    assert report.ratio > 3.5


@pytest.mark.slow
def test_a_longer_window(load: Load) -> None:
    stock, longer = lived(load, Tiny()), lived(load, Tiny(window=9))
    plain, expected = bits(stock.video(0, 4)), bits(longer.video(0, 4))
    before = footprint(stock)
    with attach(stock.pipeline, "bf16", adapter=MatrixGame(window=9)) as attachment:
        assert bits(stock.video(0, 4)) == expected != plain
    assert attachment.report().tokens == 2 * FRAME * 9
    assert footprint(stock) == before
    assert bits(stock.video(0, 4)) == plain
    with pytest.raises(ParameterError, match="window=2: need at least the 3 frames"):
        attach(stock.pipeline, adapter=MatrixGame(window=2))


def action_nbytes(pipeline: Any) -> int:
    caches = (pipeline.kv_cache_mouse, pipeline.kv_cache_keyboard)
    return sum(entry[half].nbytes for cache in caches for entry in cache for half in ("k", "v"))


@pytest.mark.slow
def test_action_caches_without_a_use_take_no_memory(load: Load) -> None:
    live = lived(load, Tiny())
    live.video(0, 1)
    stock = action_nbytes(live.pipeline)
    with attach(live.pipeline, "bf16"):
        live.video(0, 1)
        # One of three layers has an action module.
        assert action_nbytes(live.pipeline) * 3 == stock
        assert live.pipeline.kv_cache_mouse[0]["k"].shape == (FRAME, 6, ACTION_HEADS, ACTION_CHANNELS)
        assert live.pipeline.kv_cache_mouse[1]["k"].numel() == 0
    assert action_nbytes(live.pipeline) == stock


def test_a_pipeline_of_another_shape_is_refused_before_anything_changes(load: Load) -> None:
    live = lived(load, Tiny())
    assert adapters.find(live.pipeline).matches(live.pipeline)
    assert not adapters.get("causal_forcing").matches(live.pipeline)
    refuses_others()
    del live.pipeline.num_frame_per_block
    before = footprint(live)
    with pytest.raises(HostError, match=r"CausalInferencePipeline: need \.num_frame_per_block"):
        attach(live.pipeline)
    assert footprint(live) == before
