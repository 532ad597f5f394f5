"""``causal_forcing`` under the classes of a checkout: github.com/thu-ml/Causal-Forcing.

Run with ``nox -s hosts -- --checkout causal_forcing=PATH``; ``self_forcing=PATH`` takes github.com/guandeh17/Self-Forcing,
which the same adapter serves.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from quantwm_core.errors import ParameterError
from quantwm_models import adapters, attach
from quantwm_models.adapters.causal_forcing import CausalForcing
from quantwm_models.errors import HostError
from tests.hosts.causal_forcing import FEW_STEPS, FRAME, Load, Size, built, importing, lived, noise
from tests.hosts.checkout import checkouts
from tests.hosts.live import Live, footprint, prove, refuses_others
from tests.hosts.weights import TREATMENTS
from tests.models.chunks import bits

pytestmark = pytest.mark.filterwarnings("ignore")  # the hosts have their own


@pytest.fixture(scope="module", params=["causal_forcing", "self_forcing"])
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    name, _, folder = request.param.partition("/")
    root = checkouts(request.config).get(name)
    if root is None:
        pytest.skip(f"no checkout {name} was named")
    pytest.importorskip("diffusers")
    with importing(root / folder) as load:
        yield load


CASES = {
    "chunkwise, global": (Size(), (4, 2, 5)),
    "chunkwise, window": (Size(window=6), (5, 1, 4)),
    "chunkwise, window and sink": (Size(window=9, sink=3), (6, 2, 5)),
    "window no multiple of the chunk": (Size(window=8, sink=3), (6, 4)),
    "half-sink chunk": (Size(window=10, sink=4), (6, 4)),
    "framewise, global": (Size(chunk=1), (6, 3)),
    "framewise, window and sink": (Size(window=4, sink=1, chunk=1), (8, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_few_step_pipeline(load: Load, name: str) -> None:
    size, chunks = CASES[name]
    attachment = prove(lambda: lived(load, built(load, *FEW_STEPS, size), size), chunks)
    report = attachment.report()
    window = size.window if size.window > 0 else chunks[-1] * size.chunk
    width = 2 * 2 * size.heads * size.head_dim
    assert report.tokens == size.layers * FRAME * min(window, chunks[-1] * size.chunk)
    assert report.active_nbytes == size.layers * width * FRAME * size.chunk
    assert report.ratio > 1.5


@pytest.mark.parametrize("treat", ["moved_by_leaf", "moved_by_block", "adapted"])
def test_weights_that_are_moved_or_adapted(load: Load, treat: str) -> None:
    size = Size(window=6)

    def make() -> Live:
        pipeline = built(load, *FEW_STEPS, size)
        TREATMENTS[treat](pipeline.generator.model)
        return lived(load, pipeline, size)

    report = prove(make, (4, 3)).report()
    assert report.sealed_tokens == size.layers * FRAME * size.chunk


def test_released_width_through_the_stock_allocator(load: Load) -> None:
    size = Size(layers=1, heads=12, head_dim=128, window=6)
    report = prove(lambda: lived(load, built(load, *FEW_STEPS, size), size), (4,)).report()
    assert report.tokens == 6 * FRAME
    assert report.ratio > 3


def test_batch_of_two(load: Load) -> None:
    size = Size(window=6)
    report = prove(lambda: lived(load, built(load, *FEW_STEPS, size), size, batch=2), (4, 3)).report()
    assert report.sealed_bf16_nbytes == 2 * 2 * 2 * 2 * 4 * 32 * 3 * FRAME


def test_video_that_begins_with_given_frames(load: Load) -> None:
    size = Size(window=9)
    live = lived(load, built(load, *FEW_STEPS, size), size, initial_latent=noise(9, 3, size))
    prove(lambda: live, (3, 2))


def test_guided_pipeline_has_a_cache_for_each_prompt(load: Load) -> None:
    size = Size(window=6)

    def make() -> Live:
        pipeline = built(load, "CausalDiffusionInferencePipeline", "pipeline.causal_diffusion_inference", size)
        pipeline.sampling_steps = 4
        return lived(load, pipeline, size)

    attachment = prove(make, (4, 3))
    assert len(attachment.caches) == 2 * 2
    assert attachment.report().tokens == 2 * 2 * 6 * FRAME


def test_93_frames_need_room_that_stock_code_does_not_make(load: Load) -> None:
    size = Size(layers=1, slots=21 * FRAME)
    live = lived(load, built(load, *FEW_STEPS, size), size)
    with pytest.raises(RuntimeError, match="expanded size"):
        live.video(0, 8)
    longer = replace(size, slots=24 * FRAME)
    roomy = lived(load, built(load, *FEW_STEPS, longer), longer)
    plain = bits(roomy.video(0, 8))
    again = lived(load, built(load, *FEW_STEPS, size), size)
    before = footprint(again)
    with attach(again.pipeline, "bf16", adapter=CausalForcing(frames=24)) as attachment:
        assert bits(again.video(0, 8)) == plain
        assert again.pipeline.generator.model.blocks[0].self_attn.max_attention_size == 24 * FRAME
    assert attachment.report().tokens == 24 * FRAME
    assert footprint(again) == before
    with pytest.raises(ParameterError, match="frames=24 for a host with a window"):
        attach(built(load, *FEW_STEPS, Size(window=6)), adapter=CausalForcing(frames=24))
    with pytest.raises(ParameterError, match="need 1 to 1024"):
        attach(again.pipeline, adapter=CausalForcing(frames=1025))


def test_a_pipeline_of_another_shape_is_refused_before_anything_changes(load: Load) -> None:
    live = lived(load, built(load, *FEW_STEPS, Size()), Size())
    assert adapters.find(live.pipeline).matches(live.pipeline)
    refuses_others()
    del live.pipeline.generator.model.blocks[0].self_attn
    before = footprint(live)
    with pytest.raises(HostError, match=r"CausalInferencePipeline: need .*self_attn"):
        attach(live.pipeline)
    assert footprint(live) == before


@pytest.mark.parametrize("chunks", [(12, 4), (4, 10)])
@pytest.mark.parametrize("load", ["causal_forcing/long_video"], indirect=True)
def test_long_video_rotates_its_first_block_anew(load: Load, chunks: tuple[int, ...]) -> None:
    def make() -> Live:
        pipeline = built(load, "CausalInferencePipeline", "pipeline.rolling_forcing_inference", Size())
        for block in pipeline.generator.model.blocks:
            attention = block.self_attn
            attention.frame_length, attention.block_length = FRAME, 3 * FRAME
            attention.max_attention_size = 21 * FRAME
        return lived(load, pipeline, Size(), "inference_rolling_forcing")

    attachment = prove(make, chunks)
    report = attachment.report()
    assert report.tokens == 2 * FRAME * min(24, 3 * chunks[-1])
    assert attachment.caches[0].chunks[0].start == 0
    assert "basis" not in attachment.caches[0].chunks[0].keys.arrays
    assert "basis" in attachment.caches[0].chunks[-1].keys.arrays
