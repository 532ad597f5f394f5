"""The adapter of LingBot-World under a miniature of its pipeline."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_models import adapters, attach
from quantwm_models.errors import HostError
from tests.models import lingbot_world_host
from tests.models.chunks import bits
from tests.models.lingbot_world_host import LingBotWorld2CausalFastGenerationStage, WanI2VCausal
from tests.models.wan_host import CHANNELS, FRAME, HEADS, noise

FUNCTIONS = ("attention", "flash_attention")
ORIGINALS = [vars(lingbot_world_host)[name] for name in FUNCTIONS]
FRAME_NBYTES = 2 * 2 * FRAME * HEADS * CHANNELS  # keys and values of one layer

HOSTS: dict[str, Callable[[], WanI2VCausal]] = {
    "global": WanI2VCausal,
    "window 18, sink 6, chunk 4": lambda: WanI2VCausal(18, 6),
    "window 9, sink 0, chunk 3": lambda: WanI2VCausal(9, 0, 3),
    "parallel, global": lambda: WanI2VCausal(parallel=True),
    "parallel, window 18, sink 6": lambda: WanI2VCausal(18, 6, parallel=True),
    "sharded": lambda: WanI2VCausal(18, 6, sharded=True),
    "sharded and parallel": lambda: WanI2VCausal(18, 6, sharded=True, parallel=True),
    "guided": lambda: WanI2VCausal(guided=True),
    "FastVideo's stage": lambda: LingBotWorld2CausalFastGenerationStage(18, 6),
}
LENGTHS = (32, 12, 24)


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    yield
    assert [vars(lingbot_world_host)[name] for name in FUNCTIONS] == ORIGINALS


def videos(host: WanI2VCausal, limit: int | None = None) -> list[Tensor]:
    return [host.generate(noise(seed, frames), limit) for seed, frames in enumerate(LENGTHS)]


@pytest.mark.parametrize("name", HOSTS)
def test_bf16_is_bit_identical_and_leaves_no_trace(name: str) -> None:
    host = HOSTS[name]()
    for limit in (None, 15 * FRAME + 3):
        expected = [bits(each) for each in videos(HOSTS[name](), limit)]
        before = vars(host).copy()
        with attach(host, "bf16"):
            assert [bits(each) for each in videos(host, limit)] == expected
        assert vars(host) == before
        assert [bits(each) for each in videos(host, limit)] == expected


@pytest.mark.parametrize("name", HOSTS)
def test_quantwm_seals_what_is_complete(name: str) -> None:
    host = HOSTS[name]()
    expected = videos(host)
    with attach(host, "quantwm", iterations=2) as attachment:
        quantized = videos(host)
    assert all(each.isfinite().all() for each in quantized)
    assert not torch.equal(quantized[-1], expected[-1])
    report, branches = attachment.report(), 2 if host.guided else 1
    frames = min(LENGTHS[-1], host.local_attn_size) if host.local_attn_size > 0 else LENGTHS[-1]
    assert len(attachment.caches) == 2 * branches
    assert report.tokens == 2 * branches * frames * FRAME
    assert report.active_nbytes == 2 * branches * host.chunk * FRAME_NBYTES
    assert all(cache.queries.past is not None for cache in attachment.caches)


def test_a_chunk_of_which_the_sink_keeps_half() -> None:
    host = WanI2VCausal(18, 6)
    with attach(host, "quantwm", iterations=2) as attachment:
        host.generate(noise(0, 32))
    stream = attachment.caches[0].stream
    assert stream.live == ((0, 6 * FRAME), (20 * FRAME, 32 * FRAME))
    assert [(unit.start // FRAME, unit.stop // FRAME) for unit in stream.units] == [(0, 4), (4, 6), (20, 24), (24, 28)]


class Short(WanI2VCausal):
    """Runs out of memory at its second allocation."""

    allocations = 0

    def _cache(self, noise: Tensor) -> Any:
        self.allocations += 1
        if self.allocations == 2:
            raise torch.OutOfMemoryError
        return super()._cache(noise)


def test_a_failure_between_the_two_lists_does_not_confuse_them() -> None:
    host = Short(guided=True, layers=1)
    with attach(host, "rtn") as attachment:
        with pytest.raises(torch.OutOfMemoryError):
            host.generate(noise(0, 8))
        host.generate(noise(0, 8))
        first, second = (cache.read(0, FRAME)[0].clone() for cache in attachment.caches)
        assert not torch.equal(first, second)
        host.generate(noise(0, 8))
        assert len(attachment.caches) == 2
        again = [cache.read(0, FRAME)[0].clone() for cache in attachment.caches]
    assert [bits(each) for each in again] == [bits(first), bits(second)]


class Older(WanI2VCausal):
    """A version that cannot guide."""

    _generate_causal_pretrain = None  # type: ignore[assignment]  # the point of the class


def test_a_version_without_guidance_is_served() -> None:
    host = Older(9, 3, 3)
    expected = bits(host.generate(noise(0, 15)))
    with attach(host, "bf16"):
        assert bits(host.generate(noise(0, 15))) == expected
    assert "_generate_causal_pretrain" not in vars(host)


def test_what_is_no_host_is_told_apart_or_refused() -> None:
    adapter = adapters.get("lingbot_world")
    assert adapter.matches(Older())
    assert adapter.matches(LingBotWorld2CausalFastGenerationStage())
    assert not adapter.matches(object())
    host: Any = WanI2VCausal()
    before = vars(host).copy()
    del host.model.blocks[0].self_attn.sink_size
    with pytest.raises(HostError, match=r"WanI2VCausal: need \.model\.blocks .*no attribute 'sink_size'"):
        attach(host)
    del host.model.blocks[:]
    with pytest.raises(HostError, match=r"WanI2VCausal: need \.model\.blocks"):
        attach(host)
    assert vars(host) == before
