"""Stand-ins for what a small model or a CPU has not: encoders, decoders, a GPU."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def decoded(latents: Tensor, use_cache: bool = False) -> Tensor:
    """A video ``[1, F, 3, H, W]`` from -1 to 1, in the place of the VAE's."""
    return torch.cat([latents[:, :1, :3], latents[:, 1:, :3].repeat_interleave(4, 1)], 1).float().tanh()


class OnCpu:
    """PyTorch, but that a GPU that is named is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: Any) -> torch.device:
        return torch.device("cpu" if str(name).startswith("cuda") else name)


class Encoder:
    """In the place of the text encoder."""

    model = torch.nn.Identity()

    def __call__(self, prompts: list[str], _: Any) -> list[Tensor]:
        return [torch.full((4, 4096), len(prompts[0]) / 100)]


encoder = Encoder()


def encode(videos: list[Tensor]) -> list[Tensor]:
    """Latents of a video ``[3, F, H, W]``, in the place of the VAE's."""
    latent = videos[0][:1, ::4, ::8, ::8].expand(16, -1, -1, -1)
    return [latent * torch.linspace(-1, 1, 16)[:, None, None, None]]


def decode(latents: list[Tensor]) -> list[Tensor]:
    """A video of latents ``[16, F, H, W]``, likewise."""
    frames = torch.cat([latents[0][:3, :1], latents[0][:3, 1:].repeat_interleave(4, 1)], 1)
    return [frames.float().tanh().repeat_interleave(8, 2).repeat_interleave(8, 3)]


class Decoder(torch.nn.Module):
    """In the place of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.conv2 = torch.nn.Linear(1, 1)

    def forward(self, latents: Tensor, *caches: Any) -> tuple[Tensor, Any]:
        frames = latents[:, :, :3]
        begins = caches[0] is None
        made = torch.cat([frames[:, :begins], frames[:, begins:].repeat_interleave(4, 1)], 1)
        return made, [torch.zeros(1)]


def vae_of(path: str, dtype: torch.dtype) -> Any:
    """In the place of the encoder and of CLIP."""
    made: Any = SimpleNamespace(
        vae=SimpleNamespace(model=Decoder()),
        clip=SimpleNamespace(encode_video=lambda image: image.mean() + torch.zeros(1, 257, 1280)),
        encode=lambda video, **_: video[:, :1, ::4, ::8, ::8].repeat(1, 16, 1, 1, 1),
    )
    made.to = lambda *_: made
    return made
