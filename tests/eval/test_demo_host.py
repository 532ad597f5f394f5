"""The bundled world as a host: exact control, equal noise, held-out scenes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quantwm_core.errors import ParameterError
from quantwm_core.method import scheme
from quantwm_eval.demo_host import DemoHost
from quantwm_eval.evidence import Frames
from quantwm_eval.host import Episode
from quantwm_eval.metrics.object_permanence import object_permanence


@pytest.fixture(scope="module")
def host() -> Iterator[DemoHost]:
    threads = torch.get_num_threads()
    yield DemoHost()
    torch.set_num_threads(threads)


def generate(host: DemoHost, episodes: tuple[Episode, ...], seed: int = 0) -> list[Frames]:
    return host.generate(episodes, [seed] * len(episodes), lambda: None)


def test_a_walk_goes_on_from_its_first_frames(host: DemoHost) -> None:
    (short,), (long,) = host.episodes("walk", [3], 8, 100), host.episodes("walk", [3], 16, 100)
    assert short.first_frames.shape == (4, 64, 64, 3)
    assert short.truth is not None
    assert long.truth is not None
    assert short.truth.shape == (8, 64, 64, 3)
    np.testing.assert_array_equal(short.truth, long.truth[:8])
    np.testing.assert_array_equal(short.actions, long.actions[:8])
    assert short.look_away is None


def test_a_look_away_ends_where_it_began(host: DemoHost) -> None:
    (episode,) = host.episodes("look-away", [2], 64, 40)
    known = episode.look_away
    assert known is not None
    assert episode.truth is not None
    assert len(episode.actions) == len(episode.truth) == 16
    np.testing.assert_array_equal(episode.truth[-1], episode.first_frames[-1])
    np.testing.assert_array_equal(known.truth, episode.truth)
    assert not known.region[:-4].any()
    assert known.region[-1].any()
    assert object_permanence(known.truth, known)[0]
    assert not object_permanence(known.absent, known)[0]


def test_the_control_is_exact_and_the_host_is_put_back(host: DemoHost) -> None:
    episodes = host.episodes("walk", [0, 1], 12, 100)
    reference = generate(host, episodes)
    with host.attach(scheme("bf16", chunks_per_seal=2), []) as attached:
        control = generate(host, episodes)
        use = attached.use()
    assert use.stored.sealed == use.stored.sealed_as_bf16 > 0
    assert (
        use.stored.live_as_bf16 == 2 * 2 * 8 * 3 * 128 * 2 * 4 * 256
    )  # k and v, videos, layers, heads, channels, bytes, chunks, tokens
    for video, wanted in zip(control, reference, strict=True):
        np.testing.assert_array_equal(video, wanted)
    for video, wanted in zip(generate(host, episodes), reference, strict=True):
        np.testing.assert_array_equal(video, wanted)


def test_two_bits_are_seen_and_counted(host: DemoHost) -> None:
    episodes = host.episodes("walk", [0], 12, 100)
    (reference,) = generate(host, episodes)
    with host.attach(scheme("quantwm", chunks_per_seal=2), []) as attached:
        (video,) = generate(host, episodes)
        stored = attached.use().stored
    assert not np.array_equal(video, reference)
    assert 2 < 16 * stored.sealed / stored.sealed_as_bf16 < 5


def test_noise_depends_on_scene_and_seed_only(host: DemoHost) -> None:
    episodes = host.episodes("walk", [4, 5], 4, 100)
    together = generate(host, episodes)
    np.testing.assert_array_equal(generate(host, episodes[1:])[0], together[1])
    assert not np.array_equal(generate(host, episodes[1:], seed=1)[0], together[1])


@pytest.mark.parametrize(
    ("scenes", "frames", "degrees", "message"),
    [
        ([0], 6, 100, "frames 6"),
        ([0], 0, 100, "frames 0"),
        ([0], 4, 95, "degrees 95"),
        ([1000], 4, 100, "0 to 999"),
        ([-1], 4, 100, "-1"),
    ],
)
def test_what_the_world_cannot_do_is_refused(
    host: DemoHost, scenes: list[int], frames: int, degrees: int, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        host.episodes("walk", scenes, frames, degrees)


def test_a_short_window_forgets_the_ball_and_is_put_back(host: DemoHost) -> None:
    own = host.pipeline.local_attn_chunks
    (episode,) = host.episodes("look-away", [0], 4, 100)
    redrawn = {}
    for window in (1, None):
        with host.attach(scheme("bf16"), [], window):
            (video,) = generate(host, (episode,))
        assert episode.look_away is not None
        redrawn[window], _ = object_permanence(video, episode.look_away)
    assert redrawn == {1: False, None: True}
    with (
        pytest.raises(ParameterError, match="window 8: the demo world sees 1 to 7"),
        host.attach(scheme("bf16"), [], 8),
    ):
        pass
    assert host.pipeline.local_attn_chunks == own
