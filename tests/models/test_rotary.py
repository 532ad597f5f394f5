"""Queries as keys see them that are rotated only on reads, and as they will be asked in frames to come."""

import numpy as np
import pytest
import torch

from quantwm_core import archive, decode
from quantwm_core import rotary as core
from quantwm_core.errors import ParameterError, ShapeError, StateError
from quantwm_core.rotary import Turning
from quantwm_core.statistics import QueryMoment as CoreMoment
from quantwm_kernels.bridge import to_numpy
from quantwm_kernels.statistics import QueryMoment
from quantwm_models import LayerCache
from quantwm_models.rotary import before_rotation, coming_moment, still_moment, turned, turning_of
from tests.models.chunks import bits, chunk, normal, snapshot

GENERATOR = torch.Generator().manual_seed(0)
ANGLES = torch.rand(29, 8, generator=GENERATOR) * 7


def matrix(angles: torch.Tensor) -> torch.Tensor:
    """Rotation of neighbouring channels, written out."""
    return torch.block_diag(*(torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]]) for a in angles))


def moment() -> QueryMoment:
    queries = torch.randn(2, 3, 50, 16, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 17)
    return QueryMoment(queries.mT @ queries / 50, 50)


def test_turning_is_the_rotation_and_turning_back_its_inverse() -> None:
    vectors = torch.randn(2, 3, 29, 16, generator=GENERATOR)
    expected = torch.stack([vectors[:, :, n] @ matrix(angles).T for n, angles in enumerate(ANGLES)], dim=2)
    assert torch.allclose(turned(vectors, ANGLES), expected, atol=1e-5)
    assert torch.allclose(turned(turned(vectors, ANGLES), -ANGLES), vectors, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 29])
def test_the_moment_is_the_mean_over_tokens(tokens: int) -> None:
    known = moment()
    rotations = [matrix(angles) for angles in ANGLES[:tokens]]
    expected = torch.stack([rotation.T @ known.mean @ rotation for rotation in rotations]).mean(0)
    got = before_rotation(known, ANGLES[:tokens])
    assert got.queries == known.queries
    assert torch.allclose(got.mean, expected, atol=1e-5 * float(known.mean.abs().max()))


def test_it_weighs_an_error_as_the_logits_do() -> None:
    known, error = moment(), torch.randn(16, generator=GENERATOR)
    logits = torch.stack([(matrix(angles) @ error) @ known.mean @ (matrix(angles) @ error) for angles in ANGLES])
    weighed = error @ before_rotation(known, ANGLES).mean @ error
    assert torch.allclose(logits.mean(0), weighed, rtol=1e-4)


def test_nothing_is_turned_by_nothing() -> None:
    known = moment()
    assert torch.allclose(before_rotation(known, torch.zeros(4, 8)).mean, known.mean)


CUDA = torch.cuda.is_available()
TURNING = Turning(5, (0.9, 0.7, 0.5, 0.3, 0.1, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")])],
)
@pytest.mark.parametrize(("start", "tokens"), [(0, 5), (3, 14), (7, 1)])
def test_a_still_moment_is_the_reference_s(start: int, tokens: int, device: str) -> None:
    queries = torch.randn(2, 4, tokens, 16, generator=GENERATOR).bfloat16()
    got = still_moment(queries.to(device), 2, start, TURNING)
    want = core.still_moment(to_numpy(queries), 2, start, TURNING)
    assert got.mean.device.type == device
    coming, expected = coming_moment(got, 12, 3, TURNING), core.coming_moment(want, 12, 3, TURNING)
    assert torch.allclose(coming.mean.cpu(), torch.from_numpy(expected.mean), atol=1e-5 * float(want.mean.max()))
    assert got.queries == want.count == 2 * tokens
    assert torch.allclose(got.mean.cpu(), torch.from_numpy(want.mean), rtol=1e-5, atol=1e-5 * float(want.mean.max()))


@pytest.mark.parametrize(("stop", "frames"), [(5, 1), (12, 7)])
def test_a_coming_moment_is_the_reference_s(stop: int, frames: int) -> None:
    known = moment()
    got = coming_moment(known, stop, frames, TURNING)
    want = core.coming_moment(CoreMoment(known.mean.numpy(), known.queries), stop, frames, TURNING)
    assert got.queries == known.queries
    assert got.mean.dtype == torch.float32
    assert torch.allclose(got.mean, torch.from_numpy(want.mean), atol=1e-5 * float(want.mean.max()))


def test_rates_that_were_first_used_in_inference_mode_serve_outside_of_it() -> None:
    other = Turning(5, (0.8, *TURNING.rates[1:]))
    queries = torch.randn(1, 2, 5, 16, generator=GENERATOR).bfloat16()
    with torch.inference_mode():
        still_moment(queries, 2, 0, other)
    assert still_moment(queries, 2, 0, other).mean.isfinite().all()


def test_a_host_s_table_says_how_time_turns() -> None:
    pairs = 8
    table = torch.polar(torch.ones(4, pairs), torch.arange(4.0)[:, None] * torch.linspace(1, 0.1, pairs))
    known = turning_of(table, 60)
    assert known is not None
    assert known.frame_tokens == 60
    assert known.rates[4:] == (0.0,) * 4
    assert torch.allclose(torch.tensor(known.rates[:4]), torch.linspace(1, 0.1, pairs)[:4])
    assert turning_of(table.real, 60) is None
    assert turning_of(table[:1], 60) is None
    assert turning_of(None, 60) is None


def seen(cache: LayerCache) -> list[bytes]:
    """Chunks of a frame each, sealed with what was asked before."""
    for number in range(6):
        cache.append(*chunk(number, 5))
        cache.observe(normal(1, 4, 5, 16, seed=50 + number))
    cache.seal()
    return [bits(array) for unit in cache.chunks for array in unit.keys.arrays.values()]


@pytest.mark.parametrize("method", ["klt", "quantwm"])
def test_a_cache_seals_as_a_recording_is_compressed(method: str) -> None:
    cache = LayerCache(method, frames_ahead=3, turning=TURNING)
    seen(cache)
    keys, values = (torch.cat([chunk(number, 5)[kind] for number in range(6)], dim=2) for kind in (0, 1))
    queries = torch.cat([normal(1, 4, 5, 16, seed=50 + number) for number in range(6)], dim=2)
    dump = archive.Dump(*(to_numpy(each) for each in (keys, values, queries)))
    for ours, theirs in zip(cache.chunks, archive.compress(dump, cache.scheme, 5, turning=TURNING), strict=True):
        got, _ = decode(ours.to_core())
        want, _ = decode(theirs)
        assert np.allclose(got.astype(np.float32), want.astype(np.float32), atol=0.02)


def test_looking_ahead_changes_what_is_sealed_and_a_turning_alone_does_not() -> None:
    plain = seen(LayerCache("klt"))
    assert seen(LayerCache("klt", turning=TURNING)) == plain
    assert seen(LayerCache("klt", frames_ahead=3, turning=TURNING)) != plain


def test_a_cache_that_cannot_look_ahead_says_so() -> None:
    with pytest.raises(ParameterError, match=r"layer 3: frames_ahead 2: nothing is known here of how positions"):
        LayerCache("klt", layer=3, frames_ahead=2)
    assert LayerCache("rtn", frames_ahead=2).tokens == 0  # which asks no queries
    cache = LayerCache("klt", frames_ahead=2, turning=TURNING)
    with pytest.raises(StateError, match="have no position"):
        cache.foresee(normal(1, 2, 5, 16))
    cache.append(*chunk(0, 5))
    before = snapshot(cache)
    with pytest.raises(ShapeError, match="queries of 6 tokens after 5 came"):
        cache.observe(normal(1, 4, 6, 16))
    assert snapshot(cache) == before
