"""The adapter of LongCat-Video under a miniature of its pipeline."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantwm_core.errors import StateError
from quantwm_models import CacheObserver, LayerCache, adapters, attach
from quantwm_models.adapters import longcat_video
from quantwm_models.adapters.longcat_video import LongCatVideo
from quantwm_models.errors import HostError
from quantwm_models.rebuilt import Sealed
from quantwm_models.rotary import before_rotation
from tests.models.asked import Asked
from tests.models.chunks import bits, compensated
from tests.models.longcat_host import CHANNELS, HEADS, TOKENS, LongCatVideoPipeline

FRAMES, NBYTES = 4, 2 * 2 * HEADS * CHANNELS

HOSTS: dict[str, Callable[[], LongCatVideoPipeline]] = {
    "guided": LongCatVideoPipeline,
    "not guided": lambda: LongCatVideoPipeline(guided=False),
    "moved away": lambda: LongCatVideoPipeline(offload=True),
}


def state(host: LongCatVideoPipeline) -> dict[Any, Any]:
    modules = list(host.dit.modules())
    hooks = [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in modules]
    return {"hooks": hooks, **vars(host), "names": [sorted(vars(each)) for each in modules]}


@pytest.mark.parametrize("name", HOSTS)
def test_bf16_is_bit_identical_and_leaves_no_trace(name: str) -> None:
    expected = [bits(HOSTS[name]().video(seed, count)) for seed, count in ((0, 3), (1, 2))]
    fresh, ran = HOSTS[name](), HOSTS[name]()
    ran.video(5, 1)
    for host in (fresh, ran):
        before = state(host)
        with attach(host, "bf16"):
            assert [bits(host.video(seed, count)) for seed, count in ((0, 3), (1, 2))] == expected
        assert state(host) == before
        assert bits(host.video(0, 3)) == expected[0]


@pytest.mark.parametrize("name", HOSTS)
def test_quantwm_seals_the_whole_history(name: str) -> None:
    host = HOSTS[name]()
    expected = host.video(0, 3)
    with attach(host, "quantwm", iterations=2, chunks_per_seal=2) as attachment:
        quantized = host.video(0, 3)
    assert quantized.isfinite().all()
    assert not torch.equal(quantized, expected)
    report = attachment.report()
    assert report.tokens == report.sealed_tokens == 2 * FRAMES * TOKENS
    assert report.active_nbytes == 0
    assert report.workspace_nbytes == NBYTES * FRAMES * TOKENS
    assert report.chunks_sealed == 2


def test_a_history_that_the_host_moves_away_is_in_host_memory_packed() -> None:
    host, reports, videos = LongCatVideoPipeline(), [], []
    with attach(host, "quantwm", iterations=2) as attachment:
        for offload in (False, True, False):
            host.offload = offload
            videos.append(host.video(0, 2))
            reports.append(attachment.report())
            for cache in attachment.caches:
                cache.clear()
    assert len({bits(video) for video in videos}) == 1
    assert [report.host_nbytes for report in reports] == [0, reports[0].sealed_nbytes, 0]
    assert [report.staging_nbytes > 0 for report in reports] == [False, True, False]


@pytest.mark.parametrize(("units", "frames"), [(1, [4]), (2, [2, 2]), (3, [2, 1, 1]), (9, [1] * 4)])
def test_statistics_serve_from_the_second_unit_of_the_first_segment(units: int, frames: list[int]) -> None:
    host, seen = LongCatVideoPipeline(layers=1), []
    with attach(host, "quantwm", adapter=LongCatVideo(units), iterations=2) as attachment:
        for segment in range(2):
            host.video(segment, 1)
            seen.append([(chunk.tokens, compensated(chunk)) for chunk in attachment.caches[0].chunks])
    assert seen[0] == [(TOKENS * count, number > 0) for number, count in enumerate(frames)]
    assert seen[1] == [(FRAMES * TOKENS, True)]


def test_every_query_counts_once() -> None:
    host = LongCatVideoPipeline(layers=1)
    with attach(host, "quantwm", iterations=2) as attachment:
        host.video(0, 3)
    past = attachment.caches[0].queries.folded().past
    assert past is not None
    # A history, then two steps of two prompts, thrice.
    assert past.queries == 3 * FRAMES * TOKENS * (1 + 2 * 2)


class Frames(CacheObserver):
    """Keeps what a unit was sealed from."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def sealed(self, cache: LayerCache, chunk: Any, keys: Tensor, values: Tensor) -> None:
        self.keys.append(keys.clone())


def test_keys_are_weighed_before_their_rotation() -> None:
    host: Any = LongCatVideoPipeline(layers=1)
    frames = Frames()
    with attach(host, "quantwm", iterations=2, observers=[frames]) as attachment:
        made = host.video(0, 2)
        cache = attachment.caches[0]
        moment = cache.queries.past
    assert cache.key_frame is not None
    assert moment is not None
    (unit,) = cache.stream.units
    angles = host.dit.blocks[0].attn.rope_3d.freqs_dict[FRAMES, 2, TOKENS // 2][:, ::2]
    turned = cache.key_frame(moment, unit)
    assert torch.equal(turned.mean, before_rotation(moment, angles).mean)
    assert not torch.allclose(turned.mean, moment.mean, rtol=0.05)
    # The history of the second segment is the first, shown as attention sees it.
    _, before, _ = host.dit.blocks[0].attn._project(made[:, : FRAMES * TOKENS])
    _, after = host.dit.blocks[0].attn.rope_3d(before, before, (FRAMES, 2, TOKENS // 2))
    assert torch.equal(frames.keys[-1], after)


@pytest.mark.parametrize("guided", [False, True])
def test_observers_see_what_each_prompt_asks_of_a_history(guided: bool) -> None:
    host, exact, rough = LongCatVideoPipeline(layers=1, guided=guided), Asked(), Asked()
    for method, asked in (("bf16", exact), ("rtn", rough)):
        with attach(host, method, observers=[asked]):
            host.video(0, 2)
    assert len(exact.same) == len(rough.same) == 2 * 2 * (1 + guided)  # segments, steps, prompts
    assert all(exact.same)
    assert not any(rough.same)
    assert not torch.equal(exact.logits[0], rough.logits[0])


def test_without_a_cache_the_host_is_left_alone() -> None:
    host = LongCatVideoPipeline(cached=False)
    plain = bits(host.video(0, 2))
    with attach(host, "quantwm") as attachment:
        assert bits(host.video(0, 2)) == plain
    assert attachment.report().tokens == 0


def test_a_failing_host_is_usable_afterwards() -> None:
    host = LongCatVideoPipeline()
    with attach(host, "quantwm", iterations=2):
        expected = bits(host.video(0, 1))
    with attach(host, "quantwm", iterations=2):
        with pytest.raises(RuntimeError):
            host.generate_vc(torch.zeros(1, TOKENS, 3), torch.zeros(1, TOKENS, 3))
        assert bits(host.video(0, 1)) == expected


def test_a_transformer_alone_is_a_host() -> None:
    host = LongCatVideoPipeline()
    expected = bits(host.video(0, 2))
    with attach(host.dit, "bf16") as attachment:
        assert bits(host.video(0, 2)) == expected
        assert isinstance(host.kv_cache_dict[0][0], Sealed)
    assert attachment.report().tokens == 2 * FRAMES * TOKENS


def test_a_host_that_rotates_otherwise_is_refused() -> None:
    host: Any = LongCatVideoPipeline()

    def backwards(x: Tensor) -> Tensor:
        return -torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)

    for block in host.dit.blocks:
        block.attn.rope_3d.quarter = backwards
    with attach(host, "rtn"):
        host.video(0, 1)
    with attach(host, "quantwm"), pytest.raises(HostError, match="layer 0: the host rotates keys in another way"):
        host.video(0, 1)


class Asking(TorchDispatchMode):
    """Counts operations; on a GPU, the answer to one may have to be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_angles_are_made_and_looked_at_once_for_all_layers_and_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    host: Any = LongCatVideoPipeline(layers=3)
    made, asked, original = [], [], longcat_video._Layer._angles

    def counted(*args: Any) -> Tensor:
        with Asking() as asking:
            made.append(original(*args))
        asked.append(asking.operations)
        return made[-1]

    monkeypatch.setattr(longcat_video._Layer, "_angles", counted)
    with attach(host, "quantwm", iterations=1):
        host.video(0, 2)
        assert all(each is made[0] for each in made)
        assert [count > 0 for count in asked] == [True] * 3 + [False] * 3, "the second history asks nothing"
        tables = [block.attn.rope_3d.freqs_dict for block in host.dit.blocks]
        grid = (FRAMES, 2, TOKENS // 2)
        tables[0][grid].mul_(0.5)  # changed in place, replaced by another, left
        tables[1][grid] = 0.25 * tables[1][grid]
        host.video(0, 1)
    assert [count > 0 for count in asked[6:]] == [True, True, False]
    for angles, table in zip(made[6:], tables, strict=True):
        assert torch.equal(angles, table[grid][:, ::2])


@torch.inference_mode()
def test_angles_whose_changes_cannot_be_told_are_looked_at_each_time() -> None:
    host: Any = LongCatVideoPipeline(layers=1)
    with attach(host, "quantwm", iterations=1):
        host.video(0, 1)
        rotation = host.dit.blocks[0].attn.rope_3d
        assert rotation.freqs_dict[FRAMES, 2, TOKENS // 2].is_inference()
        rotation.quarter = lambda x: -torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        with pytest.raises(HostError, match="layer 0: the host rotates keys in another way"):
            host.video(0, 1)


def test_what_is_no_host_is_refused_before_anything_changes() -> None:
    host: Any = LongCatVideoPipeline()
    assert adapters.find(host).matches(host.dit)
    assert not adapters.get("longcat_video").matches(object())
    with attach(host), pytest.raises(StateError, match="attached already"):
        attach(host.dit)
    del host.dit.blocks[1].attn.rope_3d.freqs_dict
    with pytest.raises(HostError, match=r"LongCatVideoPipeline: need \.blocks of .*freqs_dict"):
        attach(host)
    assert not any(each._forward_hooks for each in host.dit.modules())
