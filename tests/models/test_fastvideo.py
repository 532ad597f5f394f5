"""The adapter of FastVideo under miniatures of its stages: layers that attend in modules, or by PyTorch's function."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from quantwm_core.errors import StateError
from quantwm_models import adapters, attach
from quantwm_models.errors import HostError
from tests.models import rolling_host
from tests.models.chunks import bits
from tests.models.graphs import compiled
from tests.models.rolling_host import Entry, Settings


class LocalAttention(nn.Module):
    """Attention as a module."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """On ``[B, tokens, heads, head_dim]``."""
        assert q.dim() == k.dim() == v.dim() == 4
        return rolling_host.attention(q, k, v)


class SelfAttention(nn.Module):
    """A layer that detaches its cache before it writes."""

    def __init__(self, settings: Settings, seed: int, sink_size: int) -> None:
        super().__init__()
        self.attn, self.rope_cache_policy, self.sink_size = LocalAttention(), "absolute", sink_size
        self.projection = rolling_host.Layer(settings, seed)

    def forward(self, x: Tensor, cache: Entry, start: int) -> Tensor:
        """One call on a chunk."""
        q, k, v = ((x @ weight).unflatten(-1, (-1, 16)) for weight in self.projection.weights)
        cache["k"], cache["v"] = cache["k"].detach(), cache["v"].detach()
        end = self.projection.write(cache, k, v, start)
        attended: Tensor = self.attn(q, cache["k"][:, :end], cache["v"][:, :end])
        return x + attended.flatten(2)


class DenseSelfAttention(SelfAttention):
    """One that has such a module only for training."""

    def forward(self, x: Tensor, cache: Entry, start: int) -> Tensor:
        """One call on a chunk."""
        q, k, v = ((x @ weight).unflatten(-1, (-1, 16)) for weight in self.projection.weights)
        cache["k"], cache["v"] = cache["k"].detach(), cache["v"].detach()
        end = self.projection.write(cache, k, v, start)
        k, v = (cache[half][:, :end][:, -end:].transpose(1, 2) for half in "kv")
        return x + scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Holds the layer."""

    def __init__(self, kind: type[SelfAttention], settings: Settings, seed: int, sink_size: int) -> None:
        super().__init__()
        self.attn1 = kind(settings, seed, sink_size)


class Transformer(nn.Module):
    """The blocks."""

    kind: type[SelfAttention]

    def __init__(self, settings: Settings, sink_size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(self.kind, settings, seed, sink_size) for seed in range(settings.layers))


class CausalWanTransformer3DModel(Transformer):
    """Those of the causal Wan."""

    kind = SelfAttention


class CausalMatrixGame2WanModel(Transformer):
    """Those of Matrix-Game 2."""

    kind = DenseSelfAttention


class Stage(rolling_host.Pipeline):
    """A stage that denoises: four frames of 24 tokens in the cache, the first of which may be a sink."""

    model: type[Transformer]

    def __init__(self, sink_size: int = 0) -> None:
        super().__init__(Settings(sink=24 * sink_size))
        self.transformer: Any = self.model(self.settings, sink_size)
        self.transformer_2: Any = None
        self.local_attn_size, self.sliding_window_num_frames = 4, 21

    def _model(self, x: Tensor, caches: list[Entry], start: int) -> Tensor:
        for block, cache in zip(self.transformer.blocks, caches, strict=True):
            x = block.attn1(x, cache, start)
        return x


class CausalDMDDenosingStage(Stage):
    """That of the causal Wan."""

    model = CausalWanTransformer3DModel


class MatrixGame2CausalDenoisingStage(Stage):
    """That of Matrix-Game 2."""

    model = CausalMatrixGame2WanModel


STAGES = (CausalDMDDenosingStage, MatrixGame2CausalDenoisingStage)


def state(host: Stage) -> list[Any]:
    return [sorted(vars(host)), *(sorted(vars(module)) for module in host.transformer.modules())]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sink_size", [0, 1])
def test_bf16_is_bit_identical_and_leaves_no_trace(stage: type[Stage], sink_size: int) -> None:
    host = stage(sink_size)
    expected, before = [bits(host.inference(seed, 6)) for seed in range(2)], state(host)
    with attach(host, "bf16"):
        assert [bits(host.inference(seed, 6)) for seed in range(2)] == expected
    assert state(host) == before
    assert bits(host.inference(0, 6)) == expected[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sink_size", [0, 1])
def test_quantwm_seals_all_but_the_active_chunk_by_the_queries_before(stage: type[Stage], sink_size: int) -> None:
    host = stage(sink_size)
    expected = host.inference(0, 6)
    with attach(host, "quantwm", iterations=2) as attachment:
        quantized = host.inference(0, 6)
    assert quantized.isfinite().all()
    assert not torch.equal(quantized, expected)
    report = attachment.report()
    assert (report.tokens, report.sealed_tokens) == (2 * 96, 2 * 72)
    assert all("basis" in cache.chunks[-1].keys.arrays for cache in attachment.caches)
    assert all(cache.stream.sink == 24 * sink_size for cache in attachment.caches)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_served_is_refused_before_anything_changes(stage: type[Stage]) -> None:
    host = stage()
    assert adapters.find(host) is adapters.get("fastvideo")
    with attach(host), pytest.raises(StateError, match="attached already"):
        attach(host)
    before = state(host)
    host.transformer.blocks[1].attn1.rope_cache_policy = "relativistic"
    with pytest.raises(HostError, match=r"\['absolute', 'relativistic'\].*need 'absolute'"):
        attach(host)
    host.transformer.blocks[1].attn1.rope_cache_policy = "absolute"
    host.transformer_2 = host.transformer
    with pytest.raises(HostError, match="two transformers"):
        attach(host)
    host.transformer_2 = None
    assert state(host) == before
    del host.transformer.blocks[0].attn1.attn
    with pytest.raises(HostError, match=r"need \.transformer with \.blocks of \.attn1"):
        attach(host)


@pytest.mark.parametrize("stage", STAGES)
def test_compiled_layers_do_not_trace_the_cache(stage: type[Stage]) -> None:
    host = stage()
    with attach(host, "quantwm", iterations=2) as attachment:
        expected = bits(host.inference(0, 6))
    asked = [cache.queries.folded() for cache in attachment.caches]

    layers = [block.attn1 for block in host.transformer.blocks]
    with compiled(layers) as graphs, attach(host, "quantwm", iterations=2) as attachment:
        assert bits(host.inference(0, 6)) == expected
    assert any("test_fastvideo.py" in graph for graph in graphs)
    assert not any("quantwm_models" in graph for graph in graphs)
    for cache, before in zip(attachment.caches, asked, strict=True):
        after = cache.queries.folded()
        assert before.past is not None
        assert after.past is not None
        assert (after.past.queries, bits(after.past.mean)) == (before.past.queries, bits(before.past.mean))
