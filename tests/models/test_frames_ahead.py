"""Statistics turned to coming frames under hosts: who says how positions turn queries, and who cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.errors import ParameterError
from quantwm_models import attach
from tests.models import causal_forcing_host, hy_world_host, lingbot_world_host, longcat_host, matrix_game_host
from tests.models.wan_host import CHANNELS, FRAME, noise

PAIRS = CHANNELS // 2
TABLE = torch.polar(torch.ones(64, PAIRS), torch.arange(64.0)[:, None] * 0.7 ** torch.arange(PAIRS))


def told(host: Any, model: Any) -> Any:
    """A host with the table that the real ones have."""
    model.freqs = TABLE
    return host


def causal_forcing(window: int = 9) -> Any:
    host = causal_forcing_host.CausalInferencePipeline(window, 3 if window > 0 else 0)
    return told(host, host.generator.model)


def matrix_game() -> Any:
    host = matrix_game_host.CausalInferencePipeline(9)
    return told(host, host.generator.model)


def lingbot(window: int = 9) -> Any:
    host = lingbot_world_host.WanI2VCausal(window, 3 if window > 0 else 0, 3)
    return told(host, host.model)


def inferred(host: Any) -> Tensor:
    video: Tensor = host.inference(noise(0, 15))
    return video


def generated(host: Any) -> Tensor:
    video: Tensor = host.generate(noise(0, 15))
    return video


HOSTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "causal_forcing": (causal_forcing, inferred),
    "matrix_game": (matrix_game, inferred),
    "lingbot_world": (lingbot, generated),
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_rolling_host_says_how_time_turns(name: str) -> None:
    make, video = HOSTS[name]
    made = {}
    for ahead in (0, 6):
        host = make()
        with attach(host, "klt", frames_ahead=ahead) as attachment:
            made[ahead] = video(host)
        turnings = [cache.turning for cache in attachment.caches]
        assert len(turnings) >= 2
        if ahead == 0:
            assert turnings == [None] * len(turnings)
            continue
        for turning in turnings:
            assert turning is not None
            assert turning.frame_tokens == FRAME
            assert torch.allclose(torch.tensor(turning.rates[: PAIRS // 2]), 0.7 ** torch.arange(PAIRS // 2))
            assert turning.rates[PAIRS // 2 :] == (0.0,) * (PAIRS // 2)
    assert not torch.equal(made[0], made[6])


def rolling() -> Any:
    host = causal_forcing_host.RollingInferencePipeline()
    return told(host, host.generator.model)


UNKNOWN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "no table": (causal_forcing_host.CausalInferencePipeline, inferred),
    "several chunks ask at once": (rolling, lambda host: host.inference_rolling_forcing(noise(0, 15))),
    "no window to tell frames by": (lambda: lingbot(-1), generated),
    "rebuilt by LongCat": (longcat_host.LongCatVideoPipeline, lambda _: None),
    "rebuilt by HY-World": (hy_world_host.WanPipeline, lambda host: host(2)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_host_that_does_not_is_refused_before_anything_is_cached(name: str) -> None:
    make, run = UNKNOWN[name]
    host = make()
    refusal = r"layer 0: frames_ahead 6: the adapter in \S+ does not tell how .* host's queries; leave it at 0$"
    with pytest.raises(ParameterError, match=refusal), attach(host, "klt", frames_ahead=6):
        run(host)
    with attach(host, "klt"):  # nothing of it is left
        pass
