"""Causal-Forcing's pipelines from a checkout, around a model of random weights: small, or of the released size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.hosts import checkout
from tests.hosts.live import Live, randomise, sdpa, smaller

FRAME = 16  # tokens of a latent frame of 8 x 8
RELEASED_SLOTS = 32760  # what the host's allocator has written into it, of 12 heads x 128

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Size:
    """What a model and its videos measure; a small one where nothing is said.

    Attributes:
        height, width: Of a latent frame.
        text: Tokens and channels of a prompt.
        steps: Noise levels of a chunk, before the clean pass.
    """

    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    window: int = -1
    sink: int = 0
    chunk: int = 3
    slots: int = 24 * FRAME
    height: int = 8
    width: int = 8
    text: tuple[int, int] = (8, 16)
    ffn: int = 64
    frequencies: int = 32
    steps: tuple[int, ...] = (1000, 500)
    device: str = "cpu"

    @property
    def frame(self) -> int:
        """Tokens of a latent frame."""
        return self.height * self.width // 4


RELEASED = Size(
    layers=30,
    heads=12,
    head_dim=128,
    slots=RELEASED_SLOTS,
    height=60,
    width=104,
    text=(512, 4096),
    ffn=8960,
    frequencies=256,
    steps=(1000, 750, 500, 250),
)


@contextmanager
def importing(root: Path) -> Iterator[Load]:
    """Import the host's modules by name while inside."""
    with checkout.importing(root, bare=("wan", "wan.modules", "wan.utils", "pipeline")) as load:
        load("wan.modules.model").flash_attention = sdpa
        yield load


def wrapped(load: Load, size: Size) -> Any:
    """The host's wrapper around a model, without the checkpoint that its constructor loads."""
    wrapper_module, scheduler = load("utils.wan_wrapper"), load("utils.scheduler")
    with torch.device(size.device):
        model = load("wan.modules.causal_model").CausalWanModel(
            model_type="t2v",
            dim=size.heads * size.head_dim,
            ffn_dim=size.ffn,
            freq_dim=size.frequencies,
            text_dim=size.text[1],
            text_len=size.text[0],
            num_heads=size.heads,
            num_layers=size.layers,
            local_attn_size=size.window,
            sink_size=size.sink,
        )
    randomise(model)
    wrapper = wrapper_module.WanDiffusionWrapper.__new__(wrapper_module.WanDiffusionWrapper)
    torch.nn.Module.__init__(wrapper)
    wrapper.model = model.eval().requires_grad_(False).to(torch.bfloat16)
    wrapper.uniform_timestep = False
    wrapper.scheduler = scheduler.FlowMatchScheduler(shift=5.0, sigma_min=0.0, extra_one_step=True)
    wrapper.scheduler.set_timesteps(1000, training=True)
    wrapper.seq_len = 1000 * size.frame
    wrapper.post_init()
    return wrapper


def built(load: Load, kind: str, module: str, size: Size) -> Any:
    """A pipeline of the host's class, with stand-ins for text encoder and VAE."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randn(2, *size.text, generator=generator).to(size.device, torch.bfloat16)
    arguments = SimpleNamespace(
        denoising_step_list=list(size.steps),
        warp_denoising_step=False,
        num_frame_per_block=size.chunk,
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
        size.device,
        generator=wrapped(load, size),
        text_encoder=encode,
        vae=SimpleNamespace(decode_to_pixel=pixels),
    )
    pipeline.num_transformer_blocks, pipeline.frame_seq_length = size.layers, size.frame
    if (size.heads, size.head_dim) != (12, 128):
        smaller(pipeline, "_initialize_kv_cache", size.slots, size.heads, size.head_dim)
    return pipeline


def pixels(latent: Tensor, use_cache: bool = False) -> Tensor:
    """No decoder: the latents are what is compared."""
    return latent


def noise(seed: int, frames: int, size: Size, batch: int = 1) -> Tensor:
    """Where a video begins, ``[B, frames, 16, height, width]``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, frames, 16, size.height, size.width)
    return torch.randn(*shape, generator=generator).to(size.device, torch.bfloat16)


def lived(load: Load, pipeline: Any, size: Size, run: str = "inference", batch: int = 1, **arguments: Any) -> Live:
    """A pipeline that makes videos of so many chunks."""

    def video(seed: int, chunks: int) -> Tensor:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            made = getattr(pipeline, run)(
                noise=noise(seed, chunks * size.chunk, size, batch),
                text_prompts=["a door"] * batch,
                return_latents=True,
                **arguments,
            )
        latents: Tensor = made[1]
        return latents

    modules = (load("wan.modules.causal_model"), load("wan.modules.model"))
    return Live(pipeline, modules, video, notes=("timesteps",))


FEW_STEPS = ("CausalInferencePipeline", "pipeline.causal_inference")
