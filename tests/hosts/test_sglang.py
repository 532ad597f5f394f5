"""``sglang`` under SGLang's own cache, self-attention and stage, without its server.

Run with ``nox -s hosts -- --checkout sglang=PATH``, where PATH holds the package ``sglang``. The four modules that are run
import servers, kernels and loaders; every other module of the package is hollow here, its names classes that do nothing.
What the chunks go through, a stage's allocator and reset, a layer's forward and the cache that it writes, is the host's.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwm_core.errors import StateError
from quantwm_models import adapters, attach
from quantwm_models.errors import HostError
from tests.hosts.checkout import checkouts, importing
from tests.hosts.live import Live, footprint, prove, sdpa
from tests.models.chunks import bits

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

FRAME, LAYERS, HEADS, CHANNELS, CHUNK = 8, 2, 2, 16, 3
WIDTH = HEADS * CHANNELS
ROOT = "sglang.multimodal_gen.runtime."
CACHE, WAN, LINGBOT, STAGE = (
    ROOT + name
    for name in (
        "layers.kvcache.causal_attention_cache",
        "models.dits.causal_wanvideo",
        "models.dits.lingbot_world",
        "pipelines_core.stages.causal_denoising",
    )
)
KINDS = {WAN: "CausalWanSelfAttention", LINGBOT: "LingBotWorldCausalSelfAttention"}

Load = Callable[[str], Any]


def nothing(*_: object, **__: object) -> None:
    """What is called in a hollow module."""


class Void(type):
    """A class of which anything can be asked."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing


class Hollow(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = Void(name, (), {"__init__": nothing, "__getattr__": lambda *_: nothing})
        setattr(self, name, kind)
        return kind


class Hollowing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is not to be run, and what only leads to what is."""

    def __init__(self, root: Path, wanted: Sequence[str]) -> None:
        self.root = root
        self.wanted = wanted

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Of all modules of the package but those that are wanted."""
        if name.partition(".")[0] != "sglang" or name in self.wanted:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty one."""
        made = Hollow(spec.name)
        made.__path__ = [str(self.root.joinpath(*spec.name.split(".")))]
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    root = checkouts(request.config).get("sglang")
    if root is None:
        pytest.skip("no checkout sglang was named")
    finder = Hollowing(root, (CACHE, WAN, LINGBOT, STAGE))
    sys.meta_path.insert(0, finder)
    try:
        with importing(root) as load:
            load(ROOT + "platforms.aiter").USE_AITER = False
            for layer in map(load, KINDS):
                layer.LocalAttention, layer._apply_rotary_emb = Local, turned
            load(LINGBOT).get_ulysses_parallel_world_size = lambda: 1
            yield load
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]


class Local(nn.Module):
    """Attention on ``[B, tokens, heads, head_dim]``, in the place of the host's, which chooses a kernel."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.dim() == k.dim() == v.dim() == 4
        return sdpa(q, k, v)


def turned(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """Rotation of neighbouring channels, in the place of the host's, which chooses a kernel."""
    assert not is_neox_style
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).type_as(x)


class Block(nn.Module):
    """A projection and the host's self-attention."""

    def __init__(self, load: Load, module: str, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(3, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.weights = nn.Parameter(weights.to(torch.bfloat16), requires_grad=False)
        self.attn1 = getattr(load(module), KINDS[module])(WIDTH, HEADS)

    def forward(self, x: Tensor, cache: Any, start: int) -> Tensor:
        q, k, v = ((x @ weight).unflatten(-1, (HEADS, CHANNELS)) for weight in self.weights)
        positions = start // FRAME + torch.arange(x.shape[1]) // FRAME
        angles = positions[:, None] * 0.7 ** torch.arange(CHANNELS // 2)
        attended = self.attn1(q, k, v, (angles.cos(), angles.sin()), None, kv_cache=cache, current_start=start)
        return x + attended.flatten(2)


def staged(load: Load, module: str, window: int, sink: int) -> Any:
    """The host's stage around a tiny model, without the checkpoint that its constructor asks for."""
    kind = load(STAGE).CausalDMDDenoisingStage
    transformer: Any = nn.Module()
    transformer.blocks = nn.ModuleList(Block(load, module, seed) for seed in range(LAYERS))
    transformer.num_attention_heads, transformer.attention_head_dim = HEADS, CHANNELS
    stage = kind.__new__(kind)
    vars(stage).update(
        transformer=transformer,
        causal_kv_cache=None,
        crossattn_cache=None,
        causal_kv_cache_neg=None,
        crossattn_cache_neg=None,
        num_transformer_blocks=LAYERS,
        num_frames_per_block=CHUNK,
        num_token_per_frame=FRAME,
        sliding_window_num_frames=21,
        local_attn_size=window,
        sink_size=sink,
    )
    return stage


def lived(
    load: Load,
    window: int = -1,
    sink: int = 0,
    *,
    module: str = WAN,
    pins: bool = False,
    guided: bool = False,
    recent: int | None = None,
) -> Live:
    """Chunks, each denoised and then run once more clean, through caches that the stage makes once and resets.

    A layer of LingBot-World's sees the sink and so many ``recent`` frames before the chunk, if the request says so.
    """
    stage = staged(load, module, window, sink)
    request = SimpleNamespace(realtime_causal_kv_sample_tokens=None if recent is None else recent * FRAME)
    load(LINGBOT).get_forward_context = lambda: SimpleNamespace(forward_batch=request)
    sizes: dict[str, Any] = {
        "batch_size": 1,
        "max_text_len": 4,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "kv_cache_kwargs": {"global_sink_tokens": FRAME} if pins else None,
    }

    def caches() -> list[list[Any]]:
        if stage.causal_kv_cache is None:
            stage._initialize_causal_caches(**sizes)
        else:
            stage._reset_causal_caches(kv_cache=stage.causal_kv_cache, crossattn_cache=stage.crossattn_cache)
        if not guided:
            return [stage.causal_kv_cache]
        batch = SimpleNamespace(extra={})
        negative, _ = stage._reset_or_init_negative_caches(batch=batch, **sizes)
        return [stage.causal_kv_cache, negative]

    def model(x: Tensor, cache: list[Any], start: int) -> Tensor:
        for block, each in zip(stage.transformer.blocks, cache, strict=True):
            x = block(x, each, start)
        return x

    def video(seed: int, chunks: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        branches, made = caches(), []
        with torch.no_grad():
            for number in range(chunks):
                x = torch.randn(1, CHUNK * FRAME, WIDTH, generator=generator).to(torch.bfloat16)
                for _ in range(3):  # the last call has the chunk as it stays
                    first, *others = (
                        model(x + place, each, number * CHUNK * FRAME) for place, each in enumerate(branches)
                    )
                    x = (0.5 * x + 0.5 * (first - sum(others, start=torch.zeros_like(first)))).to(torch.bfloat16)
                made.append(x)
                if pins and number == 1:
                    stage._pin_current_chunk(stage.causal_kv_cache, CHUNK)
        return torch.cat(made, dim=1)

    notes = ("causal_kv_cache", "crossattn_cache", "causal_kv_cache_neg", "crossattn_cache_neg")
    return Live(stage, (load(CACHE), load(module), load(STAGE)), video, notes)


CASES: dict[str, dict[str, Any]] = {
    "all kept": {},
    "window 6": {"window": 6},
    "window 9, sink 3": {"window": 9, "sink": 3},
    "window 8, sink 1": {"window": 8, "sink": 1},
    "window 9, a frame kept for ever and a pinned chunk": {"window": 9, "sink": 3, "pins": True},
    "window 6, two prompts": {"window": 6, "guided": True},
    "LingBot-World, window 9, sink 3": {"module": LINGBOT, "window": 9, "sink": 3},
    "LingBot-World, of which the sink and 2 recent frames are seen": {
        "module": LINGBOT,
        "window": 9,
        "sink": 1,
        "recent": 2,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_videos(load: Load, name: str) -> None:
    case = CASES[name]
    attachment = prove(lambda: lived(load, **case), (5, 4))
    report, branches = attachment.report(), 1 + case.get("guided", False)
    window = min(case.get("window", 4 * CHUNK), 4 * CHUNK)
    assert report.tokens == branches * LAYERS * FRAME * window
    assert report.active_nbytes == branches * LAYERS * 2 * 2 * WIDTH * FRAME * CHUNK
    assert all("basis" in cache.chunks[-1].keys.arrays for cache in attachment.caches)


def test_the_hosts_own_caches_come_back(load: Load) -> None:
    live = lived(load, 6)
    plain = bits(live.video(0, 4))
    own = live.pipeline.causal_kv_cache
    with attach(live.pipeline, "quantwm"):
        live.video(0, 4)
        assert live.pipeline.causal_kv_cache is not own
    assert live.pipeline.causal_kv_cache is own
    assert bits(live.video(0, 4)) == plain


def test_a_stage_of_another_shape_is_refused_before_anything_changes(load: Load) -> None:
    live = lived(load)
    assert adapters.find(live.pipeline) is adapters.get("sglang")
    with attach(live.pipeline), pytest.raises(StateError, match="attached already"):
        attach(live.pipeline)
    live.pipeline._kv_quant_args = SimpleNamespace(enabled=True)
    with pytest.raises(HostError, match="packs its cache itself"):
        attach(live.pipeline)
    del live.pipeline._kv_quant_args, live.pipeline.transformer.blocks[1].attn1.attn
    before = footprint(live)
    with pytest.raises(HostError, match=r"need \._get_causal_sink_tokens and \.transformer with \.blocks of \.attn1"):
        attach(live.pipeline)
    assert footprint(live) == before
