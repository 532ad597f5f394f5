"""HY-World's two pipelines in small: caches that are made anew before each chunk, attention that runs twice."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

FRAME, HEADS, CHANNELS, CHUNK = 8, 2, 16, 2  # tokens of a frame; frames of a chunk
WIDTH = HEADS * CHANNELS


def sageattn(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False) -> Tensor:
    """Dense attention on ``[B, heads, tokens, head_dim]``."""
    assert (tensor_layout, is_causal) == ("HND", False)
    return scaled_dot_product_attention(q, k, v)


def sequence_parallel_attention_vision(
    q: Any, k: Any, v: Any, block_idx: Any = None, kv_cache: Any = None, cache_vision: bool = False
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The 8B model's attention, on pairs ``[B, tokens, heads, head_dim]``."""
    query, key, value = (torch.cat(list(pair)).transpose(1, 2) for pair in (q, k, v))
    entry = kv_cache[block_idx]
    past = (entry["k_vision"], entry["v_vision"])
    made = {"k_vision": key, "v_vision": value} if cache_vision else {}
    if not cache_vision and past[0] is not None:
        key, value = (torch.cat([old, new], dim=2) for old, new in zip(past, (key, value), strict=True))
    key, value = (
        torch.cat([entry[half].repeat(2, 1, 1, 1), new], dim=2) for half, new in (("k_txt", key), ("v_txt", value))
    )
    first, second = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2).chunk(2)
    return first, second, made


def weights(seed: int, count: int) -> nn.Parameter:
    """Square matrices."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return nn.Parameter(drawn.to(torch.bfloat16), requires_grad=False)


class Scene(NamedTuple):
    """Where frames are: angles as cosines and sines ``[1, 1, N, D]``, and cameras ``[1, frames, 4, 4]``."""

    rotation: tuple[Tensor, Tensor]
    views: Tensor


def scene(frames: Tensor) -> Scene:
    """The scene of frames with these numbers."""
    angles = frames.repeat_interleave(FRAME)[:, None] * 0.7 ** torch.arange(CHANNELS // 2)
    angles = angles.repeat_interleave(2, dim=-1)[None, None]
    views = torch.eye(4).repeat(1, len(frames), 1, 1)
    views[0, :, 0, 0], views[0, :, 0, 1] = (0.2 * frames).cos(), (0.2 * frames).sin()
    views[0, :, 1, 0], views[0, :, 1, 1] = -(0.2 * frames).sin(), (0.2 * frames).cos()
    views[0, :, 2, 3] = 0.3 * frames
    return Scene((angles.cos(), angles.sin()), views.to(torch.bfloat16))


def prope_qkv(q: Tensor, k: Tensor, v: Tensor, *, viewmats: Tensor, Ks: Any = None) -> tuple[Any, ...]:
    """Queries, keys and values ``[B, H, N, D]`` by their camera."""
    inverse = viewmats.float().inverse().to(viewmats.dtype)

    def tiled(x: Tensor, matrices: Tensor) -> Tensor:
        tiles = x.reshape(*x.shape[:2], matrices.shape[1], -1, x.shape[3] // 4, 4)
        return torch.einsum("bcij,bhcntj->bhcnti", matrices, tiles).reshape(x.shape)

    return tiled(q, viewmats.mT), tiled(k, inverse), tiled(v, inverse), lambda x: tiled(x, viewmats)


def apply_rotary_emb(
    xq: Tensor, xk: Tensor, freqs_cis: tuple[Tensor, Tensor], head_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[B, N, H, D]``, each two neighbouring channels turned."""
    assert not head_first
    cosines, sines = (each.transpose(1, 2) for each in freqs_cis)
    turned = (torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2).float() for x in (xq, xk))
    first, second = ((x.float() * cosines + y * sines).to(x.dtype) for x, y in zip((xq, xk), turned, strict=True))
    return first, second


class Processor:
    """Self-attention of the 5B model."""

    otherwise = False  # computes the same rotation in another way, as a compiler may

    def rotate(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Keys or queries ``[B, H, N, D]`` after RoPE."""
        if self.otherwise:
            rotation = (rotation[0] * (1 - 2**-9), rotation[1])
        cosines, sines = (each[..., ::2] for each in rotation)
        first, second = x[..., ::2], x[..., 1::2]
        both = torch.stack([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
        return both.flatten(-2).to(x.dtype)

    def __call__(self, layer: Any, x: Tensor, cache: Any, is_cache: bool, place: Scene) -> tuple[Tensor, Any]:
        """The output, and the cache if it is asked for."""
        q, k, v = ((x @ each).unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2) for each in layer.weights[:3])
        *projected, back = prope_qkv(q, k, v, viewmats=place.views, Ks=None)
        raw = (self.rotate(q, place.rotation), self.rotate(k, place.rotation), v)
        queries, keys, values = (tuple(each) for each in zip(raw, projected, strict=True))
        old = cache["k"], cache["v"]
        made = {}
        if old[1] is not None and not is_cache:
            keys, values = (
                tuple(torch.cat([past, now], dim=-2) for past, now in zip(each.chunk(2, dim=-1), new, strict=True))
                for each, new in zip(old, (keys, values), strict=True)
            )
        if is_cache:
            made = {"k": torch.cat(keys, dim=-1), "v": torch.cat(values, dim=-1)}
        query, key, value = (torch.cat(each) for each in (queries, keys, values))
        first, second = sageattn(query, key, value, tensor_layout="HND").chunk(2)
        return (first + back(second)).transpose(1, 2).flatten(2), made


class WanBlock(nn.Module):
    """A layer of the 5B model; attention to the prompt goes through the same function."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.attn1 = SimpleNamespace(processor=Processor())
        self.weights = weights(seed, 4)

    def forward(
        self, x: Tensor, prompt: Tensor, temb: Any, rotary_emb: Any, kv_cache: Any, is_cache: bool, views: Tensor
    ) -> Any:
        """The output, and the cache if it is asked for."""
        first, second = (each.repeat(1, 1, x.shape[1] // each.shape[2], 1) for each in rotary_emb)
        made, cache = self.attn1.processor(self, x, kv_cache, is_cache, Scene((first, second), views))
        x = x + made
        q, k = ((each @ self.weights[3]).unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2) for each in (x, prompt))
        return x + sageattn(q, k, k).transpose(1, 2).flatten(2), cache


class WanPipeline:
    """One call a chunk.

    Attributes:
        ranks: Parts of the rotation of which a block is given the first, as one of several ranks is.
    """

    ranks = 1

    def __init__(self, layers: int = 2, memory: int = 4) -> None:
        self.transformer: Any = nn.Module()
        self.transformer.blocks = nn.ModuleList(WanBlock(seed) for seed in range(layers))
        self.memory = memory
        self.fails = False

    def init_kv_cache(self) -> None:
        """Forget the video."""
        self._kv_cache: Any = [{"k": None, "v": None} for _ in self.transformer.blocks]

    def _model(self, x: Tensor, start: int, is_cache: bool) -> Any:
        place, made = scene(torch.arange(start, start + x.shape[1] // FRAME)), []
        prompt = torch.ones(1, 3, WIDTH, dtype=x.dtype)
        rotation = tuple(each[:, :, : x.shape[1] // self.ranks] for each in place.rotation)
        for number, block in enumerate(self.transformer.blocks):
            x, cache = block(x, prompt, None, rotation, self._kv_cache[number], is_cache, place.views)
            made.append(cache)
            if self.fails:
                raise LookupError
        return made if is_cache else x

    def video(self, seed: int, chunks: int) -> Tensor:
        """All chunks; a chunk sees the newest frames before it."""
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(1, chunks * CHUNK * FRAME, WIDTH, generator=generator).to(torch.bfloat16)
        self.init_kv_cache()
        size = CHUNK * FRAME
        for number in range(chunks):
            place = slice(number * size, (number + 1) * size)
            past = min(number * CHUNK, self.memory)
            if number:
                self._kv_cache = self._model(latents[:, place.start - past * FRAME : place.start], 0, True)
            for _ in range(2):
                latents[:, place] = 0.5 * latents[:, place] + 0.5 * self._model(latents[:, place], past, False)
        return latents


class VisionBlock(nn.Module):
    """A layer of the 8B model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weights = weights(seed, 3)

    def forward(self, *, x: Tensor, place: Scene, block_idx: int, kv_cache: Any, cache_vision: bool) -> Any:
        """The output, and the cache if it is asked for."""
        q, k, v = ((x @ each).unflatten(-1, (HEADS, CHANNELS)) for each in self.weights)
        by_head = (each.permute(0, 2, 1, 3) for each in (q, k, v))
        *projected, back = prope_qkv(*by_head, viewmats=place.views, Ks=None)
        raw = (*apply_rotary_emb(q, k, place.rotation, head_first=False), v)
        queries, keys, values = ((one, other.permute(0, 2, 1, 3)) for one, other in zip(raw, projected, strict=True))
        first, second, made = sequence_parallel_attention_vision(
            queries, keys, values, block_idx=block_idx, kv_cache=kv_cache, cache_vision=cache_vision
        )
        second = back(second.unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2)).transpose(1, 2).flatten(2)
        return x + first + second, made


class HunyuanVideo_1_5_Pipeline:  # noqa: N801  # the host's name
    """All chunks in one call, with guidance or without."""

    def __init__(self, layers: int = 2, *, guided: bool = False, memory: int = 4) -> None:
        self.transformer: Any = nn.Module()
        self.transformer.double_blocks = nn.ModuleList(VisionBlock(seed) for seed in range(layers))
        self.guided, self.memory = guided, memory

    def init_kv_cache(self) -> None:
        """Forget the video."""
        self._kv_cache = self._texts(0.5)
        self._kv_cache_neg = self._texts(-0.5)

    def _texts(self, prompt: float) -> Any:
        text = torch.full((1, HEADS, 3, CHANNELS), prompt, dtype=torch.bfloat16)
        entry = {"k_vision": None, "v_vision": None}
        return [{**entry, "k_txt": text + layer, "v_txt": text - layer} for layer, _ in self._blocks()]

    def _blocks(self) -> Any:
        return list(enumerate(self.transformer.double_blocks))

    def _model(self, x: Tensor, start: int, caches: Any, cache_vision: bool) -> Any:
        place, made = scene(torch.arange(start, start + x.shape[1] // FRAME)), []
        for number, block in self._blocks():
            x, vision = block(x=x, place=place, block_idx=number, kv_cache=caches, cache_vision=cache_vision)
            made.append({**caches[number], **vision})
        return made if cache_vision else x

    def video(self, seed: int, chunks: int) -> Tensor:
        """All chunks; a chunk sees the newest frames before it."""
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(1, chunks * CHUNK * FRAME, WIDTH, generator=generator).to(torch.bfloat16)
        self.init_kv_cache()
        size = CHUNK * FRAME
        for number in range(chunks):
            place = slice(number * size, (number + 1) * size)
            past = min(number * CHUNK, self.memory)
            context = latents[:, place.start - past * FRAME : place.start]
            if number:
                self._kv_cache = self._model(context, 0, self._kv_cache, True)
            if number and self.guided:
                self._kv_cache_neg = self._model(context, 0, self._kv_cache_neg, True)
            for _ in range(2):
                made = self._model(latents[:, place], past, self._kv_cache, False)
                if self.guided:
                    made = 2 * made - self._model(latents[:, place], past, self._kv_cache_neg, False)
                latents[:, place] = 0.5 * latents[:, place] + 0.5 * made
        return latents
