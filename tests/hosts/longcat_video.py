"""LongCat-Video's pipeline from a checkout, around a model of random weights: small, or of the released size.

On a CPU the model computes in FP32, because the host leaves casting to CUDA's autocast; keys and values are rounded to BF16
as they would be there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.hosts import checkout
from tests.hosts.live import Live, randomise, sdpa

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Size:
    """What a model and its videos measure; a small one where nothing is said.

    Attributes:
        height, width: Of a picture.
        history, new: Latent frames that a segment is given, and that it adds.
        text: Tokens and channels of a prompt.
        widening: Of the feed-forward layers.
        embedding: Channels of a step's embedding, and of its frequencies.
        split: Parts of a frame's height and of its width, each a rank's.
    """

    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    height: int = 64
    width: int = 64
    history: int = 4
    new: int = 2
    steps: int = 3
    text: tuple[int, int] = (8, 24)
    widening: int = 1
    embedding: tuple[int, int] = (32, 32)
    split: tuple[int, int] = (1, 1)
    device: str = "cpu"

    @property
    def frame(self) -> int:
        """Tokens of a latent frame."""
        return self.height * self.width // 256


SMALL = Size()
RELEASED = Size(
    layers=48,
    heads=32,
    head_dim=128,
    height=480,
    width=832,
    history=19,
    new=5,
    steps=2,
    text=(512, 4096),
    widening=4,
    embedding=(512, 256),
)


def blockwise(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any = None, op: Any = None) -> Tensor:
    """Attention on ``[B, tokens, heads, head_dim]``, block by block where lengths are given."""
    if attn_bias is None:
        return sdpa(q, k, v)
    blocks = (each.split(lengths, dim=1) for each, lengths in zip((q, k, v), attn_bias, strict=True))
    return torch.cat([sdpa(*block) for block in zip(*blocks, strict=True)], dim=1)


@contextmanager
def importing(root: Path) -> Iterator[Load]:
    """Import the host's modules by name while inside."""
    mask = SimpleNamespace(from_seqlens=lambda queries, keys: (queries, list(keys), list(keys)))
    masks = SimpleNamespace(attn_bias=SimpleNamespace(BlockDiagonalMask=mask))
    operations = {"memory_efficient_attention": blockwise, "fmha": masks}
    stubs: dict[str, dict[str, object]] = {
        "longcat_video.block_sparse_attention.bsa_interface": {"flash_attn_bsa_3d": None},
        "xformers": {"ops": SimpleNamespace(**operations)},
        "xformers.ops": dict(operations),
        "loguru": {"logger": None},
    }
    with checkout.importing(root, stubs=stubs) as load:
        yield load


def transformer(load: Load, size: Size) -> Any:
    """The host's transformer."""
    with torch.device(size.device):
        model = load("longcat_video.modules.longcat_video_dit").LongCatVideoTransformer3DModel(
            hidden_size=size.heads * size.head_dim,
            depth=size.layers,
            num_heads=size.heads,
            caption_channels=size.text[1],
            mlp_ratio=size.widening,
            adaln_tembed_dim=size.embedding[0],
            frequency_embedding_size=size.embedding[1],
            enable_xformers=True,
            cp_split_hw=list(size.split),
            text_tokens_zero_pad=True,
        )
    randomise(model)
    if size.device != "cpu":
        model.to(torch.bfloat16)
    else:
        for block in model.blocks:
            for part in (block.attn.qkv, block.attn.k_norm):
                part.register_forward_hook(lambda _, __, output: output.bfloat16().float())
    return model.eval().requires_grad_(False)


def built(load: Load, size: Size) -> Any:
    """The host's pipeline, with stand-ins for text encoder and VAE."""
    model = transformer(load, size)
    config = SimpleNamespace(
        scale_factor_temporal=4, scale_factor_spatial=8, z_dim=16, latents_mean=[0.0] * 16, latents_std=[1.0] * 16
    )
    vae = SimpleNamespace(config=config, encode=encode)
    scheduler = load("longcat_video.modules.scheduling_flow_match_euler_discrete").FlowMatchEulerDiscreteScheduler()
    text = SimpleNamespace(config=SimpleNamespace(d_model=size.text[1]), dtype=model.dtype)
    pipeline = load("longcat_video.pipeline_longcat_video").LongCatVideoPipeline(None, text, vae, scheduler, model)
    pipeline.device = size.device
    pipeline.get_condition_shape = lambda *_, **__: (size.height, size.width)
    pipeline.encode_prompt = prompting(size, model.dtype)
    pipeline.video_processor = SimpleNamespace(preprocess_video=lambda video, **_: video.transpose(1, 2))
    return pipeline


def encode(video: Tensor) -> Any:
    """Latents of a video ``[1, 3, F, H, W]``, in the place of the VAE's."""
    latent = video[:, :1, ::4, ::8, ::8].expand(-1, 16, -1, -1, -1)
    scale = torch.linspace(-1, 1, 16, dtype=video.dtype, device=video.device)
    return SimpleNamespace(latents=latent * scale[:, None, None, None])


def prompting(size: Size, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What gives a prompt and a negative one, with their masks."""
    generator = torch.Generator().manual_seed(7)
    prompt, negative = torch.randn(2, 1, 1, *size.text, generator=generator).to(size.device, dtype)
    mask = torch.ones(1, size.text[0], dtype=torch.int64, device=size.device)
    return lambda **_: (prompt, mask, negative, mask)


def lived(load: Load, pipeline: Any, size: Size, scale: float = 3.0, **arguments: Any) -> Live:
    """Segments, each continuing the one before, as the demo for long videos does."""

    def video(seed: int, segments: int) -> Tensor:
        generator = torch.Generator(size.device).manual_seed(seed)
        shape = (4 * size.history - 3, 3, size.height, size.width)
        frames = torch.rand(*shape, generator=generator, device=size.device)
        made = []
        for _ in range(segments):
            latents = pipeline.generate_vc(
                video=frames[None] * 2 - 1,
                prompt="a river",
                num_frames=4 * (size.history + size.new) - 3,
                num_cond_frames=4 * size.history - 3,
                num_inference_steps=size.steps,
                enhance_hf=False,
                guidance_scale=scale,
                generator=generator,
                output_type="latent",
                **arguments,
            )
            made.append(latents)
            pictures = latents[0, :3, -size.history :].float().sigmoid().repeat_interleave(4, dim=1)[:, 3:]
            frames = pictures.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).transpose(0, 1)
        return torch.cat(made, dim=2)

    modules = ("pipeline_longcat_video", "modules.attention", "modules.longcat_video_dit")
    notes = ("_guidance_scale", "_attention_kwargs", "_current_timestep", "_interrupt", "freqs_dict")
    return Live(pipeline, tuple(load(f"longcat_video.{name}") for name in modules), video, notes)
