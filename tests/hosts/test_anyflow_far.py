"""The adapter that docs/add-an-adapter.md makes, under diffusers' own ``AnyFlowFARPipeline``.

``nox -s hosts`` installs it as a distribution of its own; otherwise it is loaded from its file.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_models import adapters, attach
from quantwm_models.errors import HostError
from tests.hosts.live import Live, footprint, prove, randomise
from tests.models.chunks import bits

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

DOCS = Path(__file__).parents[2] / "docs"
FULL, SMALL = 16, 4  # tokens of a latent frame of 8 x 8, from patches of 2 x 2 and of 4 x 4
LAYERS, HEADS, CHANNELS, TEXT = 2, 2, 32, 24
CHUNKS = (1, 3, 3, 3, 2)  # latent frames; two chunks stay as they are, older ones come from larger patches


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("diffusers", minversion="0.42")
    if "anyflow_far" in adapters.names():
        yield adapters.get("anyflow_far")
        return
    monkeypatch.syspath_prepend(DOCS / "anyflow")
    yield importlib.import_module("quantwm_anyflow")
    del sys.modules["quantwm_anyflow"]


def pipeline(heads: int = HEADS) -> Any:
    """The pipeline around a tiny model, given embeddings instead of a prompt."""
    diffusers = importlib.import_module("diffusers")
    sizes = {"num_attention_heads": heads, "attention_head_dim": CHANNELS, "num_layers": LAYERS, "ffn_dim": 64}
    small = {"text_dim": TEXT, "freq_dim": 32, "in_channels": 4, "out_channels": 4}
    model = diffusers.AnyFlowFARTransformer3DModel(**sizes, **small).eval().requires_grad_(False)
    randomise(model)
    made = diffusers.AnyFlowFARPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=model.to(torch.bfloat16),
        vae=None,
        scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
    )
    made.set_progress_bar_config(disable=True)
    return made


def lived(guided: bool = False, given: int = 0) -> Live:
    """Videos of the first so many chunks; of ``given`` frames each begins with the same ones."""
    host = pipeline()

    def video(seed: int, chunks: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        prompt, negative = torch.randn(2, 1, 8, TEXT, generator=generator)
        first = torch.randn(1, given, 4, 8, 8, generator=generator).to(torch.bfloat16)
        noise = torch.randn(1, 4, sum(CHUNKS), 8, 8, generator=generator)[:, :, : sum(CHUNKS[:chunks])]
        frames: Tensor = host(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative if guided else None,
            guidance_scale=3.0 if guided else 1.0,
            video_latents=first if given else None,
            height=64,
            width=64,
            num_frames=4 * sum(CHUNKS[:chunks]) - 3,
            chunk_partition=list(CHUNKS[:chunks]),
            num_inference_steps=2,
            latents=noise,
            output_type="latent",
        ).frames
        return frames

    module = sys.modules[type(host.transformer).__module__]
    notes = ("_guidance_scale", "_attention_kwargs", "_interrupt", "_num_timesteps", "_freqs_cache")
    return Live(host, (module,), video, notes)


@pytest.mark.parametrize("guided", [False, True])
def test_videos(adapter: Any, guided: bool) -> None:
    attachment = prove(lambda: lived(guided), (3, 4), adapter)
    report = attachment.report()
    # The fourth chunk attends to two that are as they were, and to one of larger patches.
    tokens = 1 * SMALL + 6 * FULL
    assert report.tokens == report.sealed_tokens == LAYERS * tokens
    assert report.active_nbytes == 0
    assert report.sealed_bf16_nbytes == (1 + guided) * LAYERS * tokens * 2 * 2 * HEADS * CHANNELS
    for cache in attachment.caches:
        assert [(chunk.start, chunk.stop) for chunk in cache.chunks] == [(0, SMALL), (SMALL, tokens)]
        assert all("basis" in chunk.keys.arrays for chunk in cache.chunks)


def test_a_video_that_begins_with_given_frames(adapter: Any) -> None:
    report = prove(lambda: lived(given=4), (4,), adapter).report()
    assert report.tokens == LAYERS * (1 * SMALL + 6 * FULL)


def test_queries_of_later_chunks_do_not_change_what_was_sealed_before(adapter: Any) -> None:
    live, sealed = lived(), []
    for chunks in (4, 5):
        with attach(live.pipeline, "quantwm", adapter=adapter, iterations=2) as attachment:
            caches = recorded(attachment)
            live.video(0, chunks)
        sealed.append(caches)
    assert sealed[0] == sealed[1][: len(sealed[0])]


def recorded(attachment: Any) -> list[bytes]:
    """Bytes of the keys of the first layer's caches, as each is made."""
    cache, made = attachment.caches[0], []
    rebuild = cache.rebuild

    def record(*args: Any) -> None:
        rebuild(*args)
        made.append(b"".join(bits(chunk.keys.arrays["codes"]) for chunk in cache.chunks))

    cache.rebuild = record
    return made


def test_memory_of_the_hosts_own_cache_goes_when_the_first_layer_call_comes(adapter: Any) -> None:
    live, seen = lived(), []
    live.pipeline.transformer.blocks[0].register_forward_hook(lambda _, args, __: seen.append(args[5]))
    with attach(live.pipeline, "bf16", adapter=adapter):
        live.video(0, 3)
    assert seen
    assert not any(isinstance(part, Tensor) for entry in seen for part in entry.values())


def test_a_pipeline_of_another_shape_is_refused_before_anything_changes(adapter: Any) -> None:
    live = lived()
    with attach(live.pipeline, adapter=adapter), pytest.raises(StateError, match="attached already"):
        attach(live.pipeline.transformer, adapter=adapter)
    del live.pipeline.transformer.blocks[1].attn1.norm_q
    before = footprint(live)
    with pytest.raises(HostError, match=r"AnyFlowFARPipeline: need \.blocks of \.attn1"):
        attach(live.pipeline, adapter=adapter)
    assert footprint(live) == before


def test_a_distribution_of_its_own_is_found(adapter: Any) -> None:
    if not isinstance(adapter, ModuleType) or "anyflow_far" not in adapters.names():
        pytest.skip("docs/anyflow is not installed")
    assert adapters.find(pipeline()) is adapter


def test_the_document_shows_the_file() -> None:
    text = (DOCS / "add-an-adapter.md").read_text()
    source = (DOCS / "anyflow" / "quantwm_anyflow.py").read_text()
    shown = re.findall(r"```python\n(.*?)```", text.partition("## A cache that is made anew")[2], re.DOTALL)
    written = [[line for line in each.splitlines() if line] for each in ("".join(shown), source)]
    assert written[0] == written[1]
