from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import archive, methods, rotary, second_moment
from quantwm_core.archive import Dump
from quantwm_core.errors import DomainError, ParameterError, ShapeError
from quantwm_core.method import MOST_FRAMES_AHEAD, scheme
from quantwm_core.rotary import Turning, coming_moment, still_moment, turned_moment
from quantwm_core.statistics import QueryMoment, check_moment

CHANNELS, FRAME = 16, 8
TURNING = Turning(FRAME, (1.0, 0.6, 0.3, 0.1, 0.0, 0.0, 0.0, 0.0))


def rotation(angles: np.ndarray) -> np.ndarray:
    """Of neighbouring channels, written out."""
    matrix = np.zeros((2 * len(angles),) * 2)
    for pair, angle in enumerate(angles):
        place = slice(2 * pair, 2 * pair + 2)
        matrix[place, place] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return matrix


def asked(seed: int, frames: int, first: int = 0, heads: int = 2, size: int = FRAME) -> np.ndarray:
    """FP32 queries of whole frames: what they ask is of one law, what they are turned by is of their frame."""
    rng = np.random.default_rng(seed)
    still = rng.standard_normal((1, heads, frames * size, CHANNELS)) * np.tile(
        [4.0, 0.5], CHANNELS // 2
    )  # a direction in each plane
    for frame in range(frames):
        own = np.s_[:, :, frame * size : (frame + 1) * size]
        still[own] = still[own] @ rotation(TURNING.angles(first + frame, first + frame + 1)[0]).T
    return still.astype(np.float32)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(-3, 40))
def test_the_mean_over_rotations_is_that_of_matrices_written_out(seed: int, frames: int, first: int) -> None:
    moment = second_moment(asked(seed, 2), 2)
    angles = TURNING.angles(first, first + frames)
    want = np.mean([rotation(each) @ moment.mean.astype(float) @ rotation(each).T for each in angles], axis=0)
    assert np.allclose(turned_moment(moment.mean, angles), want, rtol=1e-6, atol=1e-5 * np.abs(want).max())


@given(st.integers(0, 2**32 - 1), st.integers(-40, 40), st.integers(-40, 40))
def test_turning_twice_is_turning_by_the_sum_and_keeps_what_is_symmetric(seed: int, one: int, other: int) -> None:
    mean = second_moment(asked(seed, 1), 2).mean
    twice = turned_moment(turned_moment(mean, TURNING.angles(one, one + 1)), TURNING.angles(other, other + 1))
    once = turned_moment(mean, TURNING.angles(one + other, one + other + 1))
    assert np.allclose(twice, once, atol=1e-4 * np.abs(mean).max())
    assert np.allclose(once, np.swapaxes(once, -1, -2), atol=1e-5 * np.abs(mean).max())
    assert np.allclose(np.trace(once, axis1=-2, axis2=-1), np.trace(mean, axis1=-2, axis2=-1), rtol=1e-5)


@given(st.integers(0, 200), st.integers(0, 90))
def test_frames_divide_a_range_of_tokens(start: int, tokens: int) -> None:
    parts = list(TURNING.frames(start, tokens))
    assert [n for _, own in parts for n in range(own.start, own.stop)] == list(range(tokens))
    assert all((start + n) // FRAME == frame for frame, own in parts for n in range(own.start, own.stop))


@pytest.mark.parametrize(("start", "tokens"), [(0, FRAME), (3, 30), (5, 2), (64, 1)])
def test_a_still_moment_is_that_of_queries_turned_back_one_by_one(start: int, tokens: int) -> None:
    queries = asked(start, 5)[:, :, :tokens]
    back = np.stack(
        [queries[:, :, n] @ rotation(TURNING.angles((start + n) // FRAME, (start + n) // FRAME + 1)[0]) for n in range(tokens)],
        axis=2,
    )  # fmt: skip
    want = np.swapaxes(back, -1, -2) @ back / tokens
    got = still_moment(queries, 2, start, TURNING)
    assert got.count == tokens
    assert np.allclose(got.mean, want, atol=0.01 * np.abs(want).max())  # queries are rounded to BF16


def test_what_is_asked_alike_in_every_frame_is_foreseen() -> None:
    turning = Turning(500, TURNING.rates)
    past, future = asked(0, 8, size=500), second_moment(asked(1, 2, first=8, size=500), 2).mean
    foreseen = coming_moment(still_moment(past, 2, 0, turning), 8 * 500, 2, turning).mean

    def off(mean: np.ndarray) -> float:
        return float(np.linalg.norm(mean - future) / np.linalg.norm(future))

    assert off(foreseen) < 0.2
    assert off(second_moment(past, 2).mean) > 0.5


def test_the_first_coming_frame_is_the_one_behind_the_unit() -> None:
    still = QueryMoment(second_moment(asked(0, 1), 2).mean, 8)
    for stop, frame in ((2 * FRAME, 2), (2 * FRAME + 1, 3), (3 * FRAME - 1, 3)):
        got = coming_moment(still, stop, 1, TURNING)
        assert np.array_equal(got.mean, turned_moment(still.mean, TURNING.angles(frame, frame + 1)))
        assert got.count == 8


def dump(spoiled: int | None = None) -> Dump:
    """Six frames, a chunk of one frame each; the queries of one of them are others."""
    queries = asked(0, 6)
    if spoiled is not None:
        queries[:, :, spoiled * FRAME : (spoiled + 1) * FRAME] += 1
    keys = np.random.default_rng(9).standard_normal((1, 2, 6 * FRAME, CHANNELS)).astype(np.float32)
    return Dump(keys, keys, queries)


@pytest.mark.parametrize("method", ["quantwm", "klt"])
@pytest.mark.parametrize("spoiled", range(6))
def test_only_queries_of_before_a_unit_reach_it(method: str, spoiled: int) -> None:
    looking = scheme(method, frames_ahead=2)
    plain, other = (archive.compress(dump(each), looking, FRAME, turning=TURNING) for each in (None, spoiled))
    changed = {
        one.start // FRAME
        for one, two in zip(plain, other, strict=True)
        if any(not np.array_equal(array, two.keys.arrays[name]) for name, array in one.keys.arrays.items())
    }
    assert changed <= set(range(spoiled + 1, 6))
    assert changed or spoiled == 5


def test_a_unit_is_sealed_with_the_moment_of_the_frames_to_come() -> None:
    whole = dump()
    looking, plain = scheme("klt", frames_ahead=3), methods.get("klt")
    sealed = archive.compress(whole, looking, FRAME, turning=TURNING)
    assert whole.queries is not None
    first = still_moment(whole.queries[:, :, :FRAME], 2, 0, TURNING)
    coming = coming_moment(first, 2 * FRAME, 3, TURNING)
    exact = whole.keys[:, :, FRAME : 2 * FRAME].astype("bfloat16")
    want = plain.seal("keys", exact, coming, sealed[0].keys)
    for name, array in want.arrays.items():
        assert np.array_equal(sealed[1].keys.arrays[name], array), name


def test_looking_ahead_needs_to_know_how() -> None:
    with pytest.raises(ParameterError, match="frames_ahead 3: nothing is known here of how positions turn queries"):
        archive.compress(dump(), scheme("klt", frames_ahead=3), FRAME)
    assert archive.compress(dump(), scheme("kvtc", frames_ahead=3), FRAME)  # which asks no queries
    with pytest.raises(ShapeError, match="turning by 4 rates for queries of 16 channels"):
        still_moment(asked(0, 1), 2, 0, Turning(FRAME, (1.0,) * 4))
    with pytest.raises(ShapeError, match="need at least one"):
        still_moment(asked(0, 1)[:, :, :0], 2, 0, TURNING)


@pytest.mark.parametrize("ahead", [0, 3])
def test_what_is_no_turning_is_refused(ahead: int, unchecked: None) -> None:
    with pytest.raises(ParameterError, match=r"turning 'x': need a quantwm_core\.rotary\.Turning, or None"):
        archive.compress(dump(), scheme("klt", frames_ahead=ahead), FRAME, turning="x")  # type: ignore[arg-type]  # so it is


@pytest.mark.parametrize("frame", [0, -1, 1.5, True, None, "4", (4,)])
def test_what_is_no_frame_is_refused(frame: Any, unchecked: None) -> None:
    with pytest.raises(ParameterError, match=r"frame_tokens .*need a whole number of at least 1"):
        Turning(frame, (1.0,))


RATES = [(), (np.nan,), [np.inf], None, 1.0, "x", ["1"], [True], [None], [[1.0]], [1.0, [2.0]], {1.0}, 1j, [10**400]]


@pytest.mark.parametrize("rates", RATES)
def test_what_are_no_rates_is_refused(rates: Any, unchecked: None) -> None:
    with pytest.raises(ParameterError, match=r"rates .*need finite numbers, one for each two channels"):
        Turning(4, rates)


@pytest.mark.parametrize("kind", [list, tuple, np.float32, np.array, lambda rates: np.array(rates)[::-1][::-1]])
def test_rates_may_come_as_any_sequence_and_are_a_tuple(kind: Callable[[Any], Any], unchecked: None) -> None:
    turning = Turning(np.int64(4), kind([1.0, 0.5]))  # type: ignore[arg-type]  # a whole number, too
    assert turning == Turning(4, (1, 0.5))
    assert hash(turning) == hash(Turning(4, (1.0, 0.5)))
    assert type(turning.rates) is tuple
    assert [type(each) for each in turning.rates] == [float, float]


@pytest.mark.parametrize("ahead", [-1, 1.5, True, "3", MOST_FRAMES_AHEAD + 1, 10**9])
def test_what_is_no_number_of_frames_is_refused(ahead: object, unchecked: None) -> None:
    with pytest.raises(ParameterError, match=r"frames_ahead .*need a whole number from 0 to 4096"):
        scheme("klt", frames_ahead=ahead)  # type: ignore[arg-type]  # the point of the test


def test_as_far_ahead_as_is_allowed_can_be_looked() -> None:
    assert archive.compress(dump(), scheme("klt", frames_ahead=MOST_FRAMES_AHEAD), FRAME, turning=TURNING)


def test_without_looking_ahead_a_turning_changes_nothing() -> None:
    plain, given_one = (archive.compress(dump(), scheme("klt"), FRAME, turning=each) for each in (None, TURNING))
    for one, two in zip(plain, given_one, strict=True):
        assert all(np.array_equal(array, two.keys.arrays[name]) for name, array in one.keys.arrays.items())
    assert rotary.still_moment(asked(0, 1), 2, 0, TURNING).count == FRAME


def test_what_cancels_when_a_moment_is_turned_is_no_bad_moment() -> None:
    query = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    mean = (query[:, :, None] * query[:, None, :])[:, None]
    turned = [
        turned_moment(mean[number : number + 1], np.arctan2([[x]], [[y]]).astype(np.float64))
        for number, (x, y) in enumerate(query)
    ]
    assert min(np.diagonal(each, axis1=-2, axis2=-1).min() for each in turned) < 0
    for each in turned:
        check_moment(each)
        with pytest.raises(DomainError, match="on the diagonal"):
            check_moment(each - np.float32(1e-3) * np.trace(each[0, 0]) * np.eye(2, dtype=np.float32))
