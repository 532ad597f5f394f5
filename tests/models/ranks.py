"""What each of several processes does that share a model's heads, its tokens or its weights."""

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from quantwm_core.errors import StateError
from quantwm_models import Attachment, LayerCache, attach, snapshot
from tests.models import longcat_host
from tests.models.chunks import bits, normal
from tests.models.wan_host import CHANNELS, FRAME, Block, Entry, Model, attention, put, turned

CHUNKS, OWN_HEADS = 5, 2
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
Chunk = list[Tensor]


@dataclass(frozen=True)
class Rank:
    """One of ``count`` processes, each on a device of its own if there are any."""

    number: int
    count: int
    device: torch.device

    def part(self, x: Tensor, axis: int) -> Tensor:
        """The rank's share of an axis."""
        return x.chunk(self.count, dim=axis)[self.number]

    def exchanged(self, x: Tensor, scatter: int, gather: int) -> Tensor:
        """Shares of one axis go to the ranks, and what they send is joined along another."""
        sent = torch.stack(x.chunk(self.count, dim=scatter))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), dim=gather)

    def gathered(self, x: Tensor, axis: int) -> Tensor:
        """The shares of all ranks along an axis."""
        received = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(self.count)]
        dist.all_gather(received, x.contiguous())
        return torch.cat(received, dim=axis)


class Collectives(TorchDispatchMode):
    """Names of the collectives that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation if it is one, and run it."""
        if "c10d" in func.namespace:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def launch(task: Callable[..., None], count: int, device: str, folder: Path, *arguments: Any) -> None:
    """Run a task in ``count`` processes, given each its rank and the folder; what one of them raises is raised here."""
    spawn(_process, args=(task, count, device, folder, *arguments), nprocs=count)


def _process(number: int, task: Callable[..., None], count: int, device: str, folder: Path, *more: Any) -> None:
    torch.set_num_threads(1)
    place = torch.device(device, number) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast, which few bytes do not need
    group = (folder / task.__name__).as_uri()
    dist.init_process_group(BACKENDS[device], init_method=group, rank=number, world_size=count)
    task(Rank(number, count, place), folder, *more)
    gc.collect()  # sharded modules hold the group in cycles, and it must end before the process does
    dist.barrier()
    dist.destroy_process_group()


def stream(heads: int, tokens: int, device: torch.device) -> list[Chunk]:
    """Keys, values and queries of all chunks, ``[B, H, N, D]``."""
    return [list(normal(3, 1, heads, tokens, 32, seed=seed).to(device)) for seed in range(CHUNKS)]


def held(chunks: Sequence[Chunk], ranks: int = 1) -> dict[str, Tensor]:
    """All that a cache holds after these chunks, of which the window keeps three and a sink that ends within one."""
    size = chunks[0][0].shape[2]
    cache = LayerCache("quantwm", sink=size // 3, window=3 * size, iterations=2, centroids=8)
    cache.ranks = ranks
    for keys, values, queries in chunks:
        cache.append(keys, values)
        cache.observe(queries)
    arrays = dict(zip(("keys", "values"), (each.clone() for each in cache.read()), strict=True))
    for number, unit in enumerate(cache.chunks):
        for kind, tensor in (("keys", unit.keys), ("values", unit.values)):
            arrays |= {f"{number} {kind} {name}": array for name, array in tensor.arrays.items()}
    return arrays


def share(rank: Rank, folder: Path, tokens: int) -> None:
    """Seal, then serve."""
    seal(rank, folder, tokens)
    keep(rank, folder, tokens)
    serve(rank)


def seal(rank: Rank, folder: Path, tokens: int) -> None:
    """Seal own heads of all tokens, then own tokens of all heads, and leave what was sealed in two files."""
    whole = stream(OWN_HEADS * rank.count, tokens, rank.device)
    # Projections know the rank's own tokens; queries, keys and values are exchanged, as the host does it.
    heads = [[rank.exchanged(rank.part(each, 2), scatter=1, gather=2) for each in chunk] for chunk in whole]
    with Collectives() as collectives:
        of_heads = held(heads, rank.count)
        of_tokens = held([[rank.part(each, 2) for each in chunk] for chunk in whole])
    assert collectives.names == []
    for name, arrays in (("heads", of_heads), ("tokens", of_tokens)):
        save_file({key: each.cpu().contiguous() for key, each in arrays.items()}, folder / f"{name}-{rank.number}")


def keep(rank: Rank, folder: Path, tokens: int) -> None:
    """Save a share of the heads, which no other rank can load."""
    cache, (keys, values, _) = LayerCache("rtn"), stream(OWN_HEADS, tokens, rank.device)[0]
    cache.ranks = rank.count
    cache.append(keys, values)
    snapshot.save(cache, folder / f"world.{rank.number}")
    dist.barrier()
    resumed, other = LayerCache("rtn"), (rank.number + 1) % rank.count
    for ranks in (1, rank.count):
        resumed.ranks = ranks
        with pytest.raises(StateError, match=f"'rank {other} of {rank.count}', this is 'rank {rank.number} of"):
            snapshot.load(resumed, folder / f"world.{other}")
    snapshot.load(resumed, folder / f"world.{rank.number}")
    assert torch.equal(resumed.read()[0], cache.read()[0])


def serve(rank: Rank) -> None:
    """Prove the adapters under hosts that share heads, weights too, and tokens."""
    for sharded in (False, True):
        ulysses = WanI2VCausal(rank, sharded=sharded)
        attachment = proved(ulysses, ulysses.generate)
        assert {cache.ranks for cache in attachment.caches} == {rank.count}
        assert {unit.keys.shape[1] for cache in attachment.caches for unit in cache.chunks} == {OWN_HEADS}
    share_frames(rank)
    spatial = longcat_host.LongCatVideoPipeline()
    spatial.dit.to(rank.device)
    before = {*vars(spatial), "kv_cache_dict"}
    attachment = proved(spatial, lambda seed: spatial.video(seed, 3, device=rank.device))
    assert set(vars(spatial)) == before
    assert {cache.tokens for cache in attachment.caches} == {4 * longcat_host.TOKENS // rank.count}


def proved(host: Any, video: Callable[[int], Tensor], adapter: Any = None, videos: int = 2) -> Attachment:
    """Hold caches against the untouched host: bits of so many videos, and collectives.

    Returns:
        What ``quantwm`` left.
    """

    def seen() -> tuple[list[bytes], list[str]]:
        with Collectives() as collectives:
            made = [video(seed) for seed in range(videos)]
        assert all(each.isfinite().all() for each in made)
        return [bits(each.cpu()) for each in made], collectives.names

    plain, called = seen()
    with attach(host, "bf16", adapter=adapter):
        assert seen() == (plain, called)
    with attach(host, "quantwm", adapter=adapter, iterations=2) as attachment:
        quantized, ours = seen()
    assert quantized != plain
    assert ours == called != []
    return attachment


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the layers below look up."""
    return attention(q, k, v)


class Ulysses(nn.Module):
    """Self-attention that is given a rank's tokens, and caches its heads."""

    def __init__(self, rank: Rank, seed: int) -> None:
        super().__init__()
        self.rank, self.local_attn_size, self.sink_size = rank, 9, 1
        self.num_heads = OWN_HEADS * rank.count
        width = self.num_heads * CHANNELS
        self.weights = nn.Parameter(normal(3, width, width, seed=seed) / width**0.5, requires_grad=False)

    def forward(self, x: Tensor, kv_cache: Entry, current_start: int) -> Tensor:
        """One call on a rank's share of a chunk, ``[B, n, width]``."""
        parts = [(x @ weight).unflatten(-1, (self.num_heads, -1)) for weight in self.weights]
        q, k, v = (self.rank.exchanged(each, scatter=2, gather=1) for each in parts)
        q, k = (turned(each, current_start // FRAME) for each in (q, k))
        end = put(kv_cache, k, v, current_start + k.shape[1], self.sink_size * FRAME)
        made = flash_attention(q, kv_cache["k"][:, :end], kv_cache["v"][:, :end])
        return x + self.rank.exchanged(made, scatter=1, gather=2).flatten(2)


class WanI2VCausal:
    """LingBot-World's pipeline on several ranks; a window of three chunks of three frames."""

    def __init__(self, rank: Rank, *, sharded: bool) -> None:
        self.rank = rank
        self.model: nn.Module = Model([Ulysses(rank, seed) for seed in range(2)]).to(rank.device)
        if sharded:
            self.model = FullyShardedDataParallel(
                self.model, device_id=rank.device, auto_wrap_policy=ModuleWrapPolicy({Block})
            )
            self.generate(0)  # it checks itself at its first call

    def _initialize_self_kv_cache(self, shape: list[int], device: torch.device) -> list[Entry]:
        ends = ("global_end_index", "local_end_index")
        return [
            {
                **{half: torch.zeros(shape, dtype=torch.bfloat16, device=device) for half in ("k", "v")},
                **{end: torch.tensor([0], device=device) for end in ends},
            }
            for _ in range(2)
        ]

    @torch.no_grad()
    def generate(self, seed: int) -> Tensor:
        """Five chunks."""
        size, made = 3 * FRAME, []
        cache = self._initialize_self_kv_cache([1, 3 * size, OWN_HEADS, CHANNELS], self.rank.device)
        noise = normal(1, 5 * size, OWN_HEADS * self.rank.count * CHANNELS, seed=seed).to(self.rank.device)
        for number, chunk in enumerate(noise.split(size, dim=1)):
            x = self.rank.part(chunk, axis=1)
            for _ in range(2):
                x = 0.5 * x + 0.5 * self.model(x, cache, number * size)
            self.model(x, cache, number * size)
            made.append(self.rank.gathered(x, axis=1))
        return torch.cat(made, dim=1)


def share_frames(rank: Rank) -> None:
    """Let LongCat-Video's miniature give each rank its own tokens of every frame."""

    def own(x: Tensor, axis: int) -> Tensor:
        return rank.part(x.unflatten(axis, (-1, longcat_host.TOKENS)), axis + 1).flatten(axis, axis + 1)

    def joined(x: Tensor, axis: int) -> Tensor:
        frames = x.unflatten(axis, (-1, longcat_host.TOKENS // rank.count))
        return rank.gathered(frames, axis + 1).flatten(axis, axis + 1)

    longcat_host.Rotation.own = staticmethod(own)
    longcat_host.Attention.all = staticmethod(joined)
