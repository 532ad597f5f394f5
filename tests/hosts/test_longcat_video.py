"""``longcat_video`` under the classes of a checkout: github.com/meituan-longcat/LongCat-Video.

Run with ``nox -s hosts -- --checkout longcat_video=PATH``.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from quantwm_core.errors import StateError
from quantwm_models import adapters, attach
from quantwm_models.adapters.longcat_video import LongCatVideo
from quantwm_models.errors import HostError
from tests.hosts.checkout import checkouts
from tests.hosts.live import Live, footprint, prove, refuses_others
from tests.hosts.longcat_video import SMALL, Load, built, importing, lived
from tests.models.chunks import bits, compensated
from tests.models.ranks import Rank, launch, proved

pytestmark = pytest.mark.filterwarnings("ignore")  # the host has its own

FRAME, LAYERS = SMALL.frame, SMALL.layers
WIDTH = 2 * 2 * SMALL.heads * SMALL.head_dim  # BF16 bytes of a token's keys and values
COND = SMALL.history


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest) -> Path:
    found = checkouts(request.config).get("longcat_video")
    if found is None:
        pytest.skip("no checkout longcat_video was named")
    pytest.importorskip("diffusers.video_processor")
    pytest.importorskip("transformers")
    return found


@pytest.fixture(scope="module")
def load(root: Path) -> Iterator[Load]:
    with importing(root) as load:
        yield load


def one_of_two_ranks(rank: Rank, _: Path, root: Path) -> None:
    """What each process of the test below does."""
    with importing(root) as load:
        # The host's own setup asks for a GPU.
        group = load("longcat_video.context_parallel.context_parallel_util")
        group.cp_size, group.cp_rank, group.cp_group = rank.count, rank.number, dist.group.WORLD
        for split in ((1, 2), (2, 1)):
            size = replace(SMALL, split=split)
            live = lived(load, built(load, size), size)

            def video(seed: int, live: Live = live) -> Tensor:
                return live.video(seed, 2)

            for cache in proved(live.pipeline, video).caches:
                shapes = [unit.keys.shape for unit in cache.chunks]
                assert shapes == [(1, SMALL.heads, COND * FRAME // 2, SMALL.head_dim)]
                assert all(map(compensated, cache.chunks))


@pytest.mark.slow
def test_frames_that_two_ranks_share(root: Path, tmp_path: Path) -> None:
    launch(one_of_two_ranks, 2, "cpu", tmp_path, root)


def small(load: Load, **arguments: Any) -> Live:
    return lived(load, built(load, SMALL), SMALL, **arguments)


CASES: dict[str, dict[str, Any]] = {
    "guided": {},
    "not guided": {"scale": 1.0},
    "moved to the CPU between reads": {"offload_kv_cache": True},
}


@pytest.mark.parametrize("name", CASES)
def test_segments(load: Load, name: str) -> None:
    report = prove(lambda: small(load, **CASES[name]), (3, 2)).report()
    assert (report.tokens, report.sealed_tokens) == (LAYERS * COND * FRAME, LAYERS * COND * FRAME)
    assert report.active_nbytes == 0
    assert report.host_nbytes == (report.sealed_nbytes if "offload_kv_cache" in CASES[name] else 0)
    assert report.workspace_nbytes == WIDTH * COND * FRAME


@pytest.mark.parametrize(("units", "tokens"), [(1, [64]), (2, [32, 32]), (3, [32, 16, 16]), (9, [16] * 4)])
def test_statistics_serve_from_the_second_unit_of_the_first_segment(load: Load, units: int, tokens: list[int]) -> None:
    live = small(load)
    with attach(live.pipeline, "quantwm", adapter=LongCatVideo(first_units=units), iterations=2) as attachment:
        live.video(0, 1)
        first = [(chunk.tokens, compensated(chunk)) for chunk in attachment.caches[0].chunks]
        live.video(1, 1)
        later = [(chunk.tokens, compensated(chunk)) for chunk in attachment.caches[0].chunks]
    assert first == [(count, number > 0) for number, count in enumerate(tokens)]
    assert later == [(COND * FRAME, True)]


def test_chunks_per_seal_does_not_leave_a_history_unsealed(load: Load) -> None:
    live = small(load)
    with attach(live.pipeline, "quantwm", chunks_per_seal=2, iterations=2) as attachment:
        live.video(0, 2)
    assert attachment.report().sealed_tokens == LAYERS * COND * FRAME


def test_without_a_cache_the_host_is_left_alone(load: Load) -> None:
    live = small(load, use_kv_cache=False)
    plain = bits(live.video(0, 2))
    with attach(live.pipeline, "quantwm") as attachment:
        assert bits(live.video(0, 2)) == plain
    assert attachment.report().tokens == 0


def test_a_pipeline_of_another_shape_is_refused_before_anything_changes(load: Load) -> None:
    live = small(load)
    assert adapters.find(live.pipeline).matches(live.pipeline.dit)
    refuses_others()
    with attach(live.pipeline.dit), pytest.raises(StateError, match="attached already"):
        attach(live.pipeline)
    del live.pipeline.dit.blocks[1].attn.rope_3d.freqs_dict
    before = footprint(live)
    with pytest.raises(HostError, match=r"LongCatVideoPipeline: need \.blocks of \.attn or"):
        attach(live.pipeline)
    assert footprint(live) == before
