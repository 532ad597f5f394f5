"""HY-World 1.5's 5B pipeline from a checkout, around a model of random weights: small, or of the released size.

Frames have the released size in both: 880 tokens a frame are written into the host.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.hosts.checkout import importing
from tests.hosts.live import Live, randomise

WAN_FRAME, CHUNK = 880, 4  # tokens of a frame, frames of a chunk

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Size:
    """What a model measures; a small one where nothing is said.

    Attributes:
        latent: Channels of a latent frame.
        text: Tokens and channels of a prompt.
        positions: Of RoPE, at most.
    """

    layers: int = 2
    heads: int = 2
    head_dim: int = 16
    latent: int = 4
    text: tuple[int, int] = (8, 24)
    ffn: int = 32
    frequencies: int = 32
    positions: int = 64
    device: str = "cpu"


SMALL = Size()
RELEASED = Size(
    layers=30, heads=24, head_dim=128, latent=48, text=(512, 4096), ffn=14336, frequencies=256, positions=1024
)


def heads_first(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Dense attention on ``[B, heads, tokens, head_dim]``, in the place of a kernel that is not installed."""
    return scaled_dot_product_attention(q, k, v)


@contextmanager
def importing_wan(root: Path) -> Iterator[Load]:
    """Import the modules of the 5B codebase by name while inside; nothing is compiled.

    Ranks are those of the process group, if there is one: the host's own group asks for a GPU.
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    stubs: dict[str, dict[str, object]] = {
        "sageattention": {"sageattn": heads_first},
        "distributed.communication_op": dict.fromkeys(("all_to_all_sp", "sequence_model_parallel_all_gather")),
        "distributed.parallel_state": {
            "get_sp_world_size": lambda: ranks,
            "get_sp_parallel_rank": lambda: rank,
            "get_sp_parallel_local_rank": lambda: rank,
        },
        "models.par_vae.tools": dict.fromkeys(("distribute_data_to_gpus", "gather_results")),
        "hyvideo": {"__path__": [str(root / "hyvideo")]},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda each: each))
        if not torch.cuda.is_available():
            for name in ("range_push", "range_pop"):
                patch.setattr(torch.cuda.nvtx, name, lambda *_: None)
            patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        packages = ("inference", "models", "distributed", "distributed.device_communicators")
        with importing(root / "wan", stubs=stubs, bare=packages) as load:
            patch.setenv("WORLD_SIZE", str(ranks if dist.is_initialized() else 0))
            if dist.is_initialized():
                between(load, ranks)
            yield load


def between(load: Load, ranks: int) -> None:
    """Let the host's own collectives run on the process group."""
    own = load("distributed.device_communicators.base_device_communicator").DistributedAutograd
    operations = load("distributed.communication_op")

    def exchange(x: Tensor, scatter_dim: int, gather_dim: int) -> Tensor:
        return own.AllToAll4D.apply(dist.group.WORLD, x, ranks, scatter_dim, gather_dim)

    def gather(x: Tensor, dim: int) -> Tensor:
        return own.AllGather.apply(dist.group.WORLD, x, ranks, dim)

    operations.all_to_all_sp, operations.sequence_model_parallel_all_gather = exchange, gather


def wan_pipeline(load: Load, size: Size) -> Any:
    """The 5B pipeline, with stand-ins for text encoder and VAE."""
    with torch.device(size.device):
        model = load("models.dits.arwan_w_action_w_mem_relative_rope").WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=size.heads,
            attention_head_dim=size.head_dim,
            in_channels=size.latent,
            out_channels=size.latent,
            text_dim=size.text[1],
            freq_dim=size.frequencies,
            ffn_dim=size.ffn,
            num_layers=size.layers,
            rope_max_seq_len=size.positions,
        )
        model.add_discrete_action_parameters()
    randomise(model)
    kind = load("inference.pipeline_wan_w_mem_relative_rope").WanPipeline
    # The host's base class asks parts for their device that are not here.
    place = torch.device(size.device)
    pipeline: Any = object.__new__(type("Placed", (kind,), {"_execution_device": place, "device": place}))
    scheduler = load("diffusers").FlowMatchEulerDiscreteScheduler()
    vars(pipeline).update(
        transformer=model.eval().requires_grad_(False).to(torch.bfloat16),
        transformer_2=None,
        scheduler=scheduler,
        vae=None,
        vae_scale_factor_temporal=4,
        vae_scale_factor_spatial=16,
        parallel_run=False,
        par_vae_decode=False,
        video_processor=None,
        init_decode_state=lambda *_: None,
        encode_prompt=prompting(size),
        check_inputs=lambda *_: None,
    )
    pipeline.register_to_config(boundary_ratio=None)
    return pipeline


def prompting(size: Size) -> Callable[..., tuple[Tensor, None]]:
    """What gives a prompt."""
    prompt = torch.randn(1, *size.text, generator=torch.Generator().manual_seed(7)).to(size.device)
    return lambda **_: (prompt, None)


def cameras(frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """View matrices, intrinsics and actions of a camera that moves and turns."""
    views = torch.eye(4).repeat(1, frames, 1, 1)
    turn = 0.1 * torch.arange(frames)
    views[0, :, 0, 0], views[0, :, 0, 2] = turn.cos(), turn.sin()
    views[0, :, 2, 0], views[0, :, 2, 2] = -turn.sin(), turn.cos()
    views[0, :, 2, 3] = 0.2 * torch.arange(frames)
    intrinsics = torch.tensor([[0.5, 0, 0.5], [0, 0.9, 0.5], [0, 0, 1]]).repeat(1, frames, 1, 1)
    return views, intrinsics, torch.arange(frames)[None] % 5


def lived_wan(load: Load, size: Size, window: int = 16) -> Live:
    """A pipeline that makes videos of so many chunks, one call each."""
    pipeline = wan_pipeline(load, size)

    def video(seed: int, chunks: int) -> Tensor:
        views, intrinsics, actions = (each.to(size.device) for each in cameras(CHUNK * chunks))
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(1, size.latent, CHUNK * chunks, 44, 80, generator=generator).to(size.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for number in range(chunks):
                place = slice(CHUNK * number, CHUNK * (number + 1))
                pipeline(
                    prompt="a valley",
                    guidance_scale=1.0,
                    num_frames=4 * CHUNK * chunks - 3,
                    latents=latents,
                    output_type="latent",
                    use_memory=True,
                    context_window_length=window,
                    first_chunk_size=CHUNK,
                    chunk_i=number,
                    viewmats=views[:, place],
                    Ks=intrinsics[:, place],
                    action=actions[:, place],
                    few_step=True,
                )
        made: Tensor = pipeline.ctx["latents"].clone()
        return made

    own = ("ctx", "points_local", "use_kv_cache", "_decode_state", "_progress_bar_config", "_num_timesteps")
    settings = ("_guidance_scale", "_guidance_scale_2", "_attention_kwargs", "_current_timestep", "_interrupt")
    return Live(pipeline, (load("models.dits.arwan_w_action_w_mem_relative_rope"),), video, (*own, *settings))
