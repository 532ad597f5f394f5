"""LongCat-Video's pipeline in small: a history that is built in one pass, and rotated anew for each read."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HEADS, CHANNELS = 8, 2, 16  # tokens of a frame
WIDTH = HEADS * CHANNELS
Shape = tuple[int, int, int]


def alone(x: Tensor, axis: int) -> Tensor:
    """The tokens of a rank that shares them with none, or those of all."""
    return x


class Rotation(nn.Module):
    """Rotates neighbouring channels; the angles of a grid are kept.

    Attributes:
        own: Takes of all tokens those of this rank, given their axis.
    """

    own = staticmethod(alone)

    def __init__(self) -> None:
        super().__init__()
        self.freqs_dict: dict[Shape, Tensor] = {}

    def forward(self, q: Tensor, k: Tensor, grid: Shape) -> tuple[Tensor, Tensor]:
        """Queries and keys ``[B, H, N, D]`` of a grid of frames, rows and columns."""
        if grid not in self.freqs_dict:
            tokens = torch.arange(grid[0] * grid[1] * grid[2])
            angles = (tokens // (grid[1] * grid[2]))[:, None] * 0.8 ** torch.arange(CHANNELS // 2)
            self.freqs_dict[grid] = self.own(angles.repeat_interleave(2, dim=1), axis=0)
        cos, sin = (each(self.freqs_dict[grid].to(q.device)) for each in (torch.cos, torch.sin))
        q, k = ((x.float() * cos + self.quarter(x.float()) * sin).type_as(x) for x in (q, k))
        return q, k

    @staticmethod
    def quarter(x: Tensor) -> Tensor:
        """A quarter turn of each pair."""
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


class Attention(nn.Module):
    """Self-attention that can show its keys and values, or be given earlier ones.

    Attributes:
        all: Joins the tokens of all ranks, given their axis.
    """

    all = staticmethod(alone)

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(3, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.weights = nn.Parameter(weights.to(torch.bfloat16), requires_grad=False)
        self.rope_3d = Rotation()

    def _process_attn(self, q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
        assert shape[1] * shape[2] == TOKENS
        return scaled_dot_product_attention(q, self.all(k, axis=2), self.all(v, axis=2))

    def _project(self, x: Tensor) -> list[Tensor]:
        return [(x @ weight).unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2) for weight in self.weights]

    def forward(self, x: Tensor, shape: Shape) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The chunk alone, and its keys and values before rotation."""
        q, k, v = self._project(x)
        rotated, turned = self.rope_3d(q, k, shape)
        made = k.contiguous(), v.contiguous()
        return self._process_attn(rotated, turned, v, shape).transpose(1, 2).flatten(2), made

    def continued(self, x: Tensor, shape: Shape, frames: int, cache: tuple[Tensor, Tensor]) -> Tensor:
        """The chunk after a history of some frames."""
        q, k, v = self._project(x)
        keys, values = (
            torch.cat([each.repeat(len(x), 1, 1, 1), new], 2) for each, new in zip(cache, (k, v), strict=True)
        )
        padded = torch.cat([torch.zeros_like(keys[:, :, : -k.shape[2]]), q], dim=2)
        rotated, keys = self.rope_3d(padded, keys, (shape[0] + frames, *shape[1:]))
        return self._process_attn(rotated[:, :, -q.shape[2] :], keys, values, shape).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """A layer, called as the host calls it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.attn = Attention(seed)

    def forward(
        self,
        x: Tensor,
        prompt: Tensor,
        latent_shape: Shape,
        frames: int = 0,
        return_kv: bool = False,
        kv_cache: Any = None,
    ) -> Any:
        """The chunk, with its keys and values if asked."""
        if kv_cache is not None:
            cache = (kv_cache[0].to(x.device), kv_cache[1].to(x.device))
            return x + self.attn.continued(x, latent_shape, frames, cache) + prompt
        made, pair = self.attn(x, latent_shape)
        return (x + made, pair) if return_kv else x + made + prompt


class LongCatVideoTransformer3DModel(nn.Module):
    """The blocks."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seed) for seed in range(layers))

    def forward(
        self,
        x: Tensor,
        prompt: Tensor,
        frames: int = 0,
        return_kv: bool = False,
        kv_cache_dict: Any = None,
        offload: bool = False,
    ) -> Any:
        """The chunk, with all layers' keys and values if asked."""
        shape, made = (x.shape[1] // TOKENS, 2, TOKENS // 2), {}
        x = Rotation.own(x, axis=1)
        for number, block in enumerate(self.blocks):
            cache = (kv_cache_dict or {}).get(number, None)
            output = block(x, prompt, latent_shape=shape, frames=frames, return_kv=return_kv, kv_cache=cache)
            x = output[0] if return_kv else output
            if return_kv:
                made[number] = tuple(each.cpu() if offload else each.contiguous() for each in output[1])
        return (x, made) if return_kv else Attention.all(x, axis=1)


class LongCatVideoPipeline:
    """Continues a video, segment by segment."""

    def __init__(self, layers: int = 2, *, guided: bool = True, offload: bool = False, cached: bool = True) -> None:
        self.dit = LongCatVideoTransformer3DModel(layers)
        self.guided, self.offload, self.cached = guided, offload, cached

    def generate_vc(self, history: Tensor, x: Tensor) -> Tensor:
        """A segment ``x`` ``[1, tokens, width]`` after a history of as many or more tokens."""
        frames, kv = history.shape[1] // TOKENS, None
        prompts = torch.tensor([0.5, -0.5] if self.guided else [0.5]).to(x)[:, None, None]
        if self.cached:
            _, self.kv_cache_dict = self.dit(history, prompts[:1] * 0, return_kv=True, offload=self.offload)
            kv = self.kv_cache_dict
        for _ in range(2):
            made = self.dit(x.repeat(len(prompts), 1, 1), prompts, frames, kv_cache_dict=kv)
            x = 0.5 * x + 0.5 * (made[:1] + (made[:1] - made[1:2] if self.guided else 0))
        return x

    def video(self, seed: int, segments: int, frames: int = 4, device: torch.device | str = "cpu") -> Tensor:
        """Segments, each with the one before as its history."""
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(1 + segments, 1, frames * TOKENS, WIDTH, generator=generator).to(device, torch.bfloat16)
        made = [draw[0]]
        for start in draw[1:]:
            made.append(self.generate_vc(made[-1], start))
        return torch.cat(made[1:], dim=1)
