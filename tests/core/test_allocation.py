import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import allocation
from quantwm_core.allocation import BLOCK, CODED_WIDTHS, DISTORTION
from quantwm_core.errors import ParameterError
from tests.core import tolerances


def _energies(blocks: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    """Energies of blocks in descending order, over twelve powers of ten, with ties and zeros."""
    numbers = st.one_of(st.integers(0, 3).map(float), st.floats(-6, 6).map(lambda power: 10.0**power))
    return blocks.flatmap(lambda count: st.lists(numbers, min_size=count, max_size=count)).map(
        lambda drawn: np.array(sorted(drawn, reverse=True))
    )


def _exhaustive(energies: np.ndarray, nbytes: int) -> float:
    """Least distortion of all allocations."""
    widths = (0, *CODED_WIDTHS)
    return min(
        sum(energy * DISTORTION[width] for energy, width in zip(energies, choice, strict=True))
        for choice in itertools.product(widths, repeat=len(energies))
        if sum(choice) <= nbytes
    )


def _widths(counts: np.ndarray, blocks: int) -> list[int]:
    """Bits of every block, those without any included."""
    coded = allocation.widths(counts)[::BLOCK].tolist()
    return coded + [0] * (blocks - len(coded))


def _last_rise(energies: np.ndarray, counts: np.ndarray) -> tuple[float, int]:
    """What the rise that was worth least took off the distortion by the byte, and its bytes."""
    lower = {8: 4, 4: 2, 2: 0}
    rises = [
        (energy * (DISTORTION[lower[width]] - DISTORTION[width]) / (width - lower[width]), width - lower[width])
        for energy, width in zip(energies, _widths(counts, len(energies)), strict=True)
        if width
    ]
    return min(rises)


@given(energies=_energies(st.integers(1, 5)), half=st.integers(0, 20))
def test_dynamic_programming_finds_the_best_of_all(energies: np.ndarray, half: int) -> None:
    counts = allocation.dynamic(energies, 2 * half)
    assert allocation.token_bytes(counts) <= 2 * half
    got = allocation.distortion(energies, counts)
    assert got <= _exhaustive(energies, 2 * half) * (1 + tolerances.FP32_ROUNDING) + 1e-300


@given(energies=_energies(st.integers(1, 5)), half=st.integers(0, 20))
def test_water_filling_loses_no_more_than_one_rise_to_the_best(energies: np.ndarray, half: int) -> None:
    (counts,) = allocation.water_fill([energies], 2 * half)
    got = allocation.distortion(energies, counts)
    # It is optimal at the rates that it stops at by itself; the one rise that no longer fits is of four bytes at most.
    assert got <= _exhaustive(energies, max(0, 2 * half - 4)) * (1 + tolerances.FP32_ROUNDING) + 1e-300


@given(energies=st.lists(_energies(st.just(4)), min_size=1, max_size=3), half=st.integers(0, 40))
def test_all_bytes_are_spent(energies: list[np.ndarray], half: int) -> None:
    counts = allocation.water_fill(energies, 2 * half)
    spent = sum(allocation.token_bytes(each) for each in counts)
    assert spent <= 2 * half
    most = sum(8 * len(each) for each in energies)
    # Two bytes may be left where every block has four bits or eight.
    assert spent == min(2 * half, most) or (spent == 2 * half - 2 and not counts[:, 2].any())


@given(
    energies=st.lists(_energies(st.just(4)), min_size=1, max_size=3),
    share=st.floats(1e-6, 1.0),
    half=st.integers(0, 40),
)
def test_more_energy_gets_no_fewer(energies: list[np.ndarray], share: float, half: int) -> None:
    quiet = [each * share for each in energies]
    counts = allocation.water_fill([*quiet, *energies], 2 * half)  # a tie would go to the quiet ones
    widths = np.array([_widths(own, 4) for own in counts]).reshape(2, len(energies), 4)
    assert (widths[1] >= widths[0])[np.array(energies) > np.array(quiet)].all()


@given(energies=_energies(st.integers(1, 6)), power=st.integers(-300, 300))
def test_the_scale_of_energies_does_not_matter(energies: np.ndarray, power: int) -> None:
    scaled = np.ldexp(energies, power)
    assert allocation.water_fill([scaled], 12).tolist() == allocation.water_fill([energies], 12).tolist()


@given(energies=_energies(st.integers(1, 6)), tolerance=st.floats(1e-4, 0.9))
def test_a_tolerance_is_kept_with_the_fewest_rises(energies: np.ndarray, tolerance: float) -> None:
    (counts,) = allocation.water_fill([energies], 8 * len(energies), tolerance)
    allowed = tolerance * float(energies.sum())
    left = allocation.distortion(energies, counts)
    assert left <= allowed * (1 + 1e-9)  # eight bits leave less than the smallest tolerance
    if allocation.token_bytes(counts) > 2:  # one block has bits in any case
        worth, size = _last_rise(energies, counts)
        assert left + worth * size > allowed * (1 - 1e-9)


@given(energies=st.lists(_energies(st.just(4)), min_size=1, max_size=3), power=st.integers(-30, 30))
def test_streams_with_a_level_in_common_need_not_know_of_each_other(energies: list[np.ndarray], power: int) -> None:
    least = np.ldexp(1.0, power)
    together = allocation.water_fill(energies, 8 * 4 * len(energies), least=least)
    alone = [allocation.water_fill([each], 8 * 4, least=least)[0] for each in energies]
    for own, joint, blocks in zip(alone, together, energies, strict=True):
        if allocation.token_bytes(joint):  # a stream alone has a block in any case
            assert own.tolist() == joint.tolist()
        if allocation.token_bytes(own) > 2:
            worth, _ = _last_rise(blocks, own)
            assert worth >= least * (1 - 1e-9)


def test_heads_that_share_bytes_give_them_to_the_loud_one() -> None:
    counts = allocation.water_fill([np.array([1e6, 1e5]), np.array([1.0, 0.1])], 8)
    assert allocation.token_bytes(counts[0]) == 8
    assert allocation.token_bytes(counts[1]) == 0


def test_widths_stand_in_the_order_of_the_codes() -> None:
    assert allocation.widths((1, 2, 1)).tolist() == [8] * BLOCK + [4] * 2 * BLOCK + [2] * BLOCK


@pytest.mark.parametrize(("bits", "channels", "nbytes"), [(2.0, 128, 32), (1.25, 128, 20), (0.5, 32, 2), (8.0, 80, 80)])
def test_a_budget_is_an_even_number_of_bytes(bits: float, channels: int, nbytes: int) -> None:
    assert allocation.budget(bits, channels) == nbytes


@pytest.mark.parametrize(("bits", "channels", "least"), [(0.5, 16, 1.0), (1.9, 8, 2.0), (0.5, 24, 2 / 3)])
def test_a_budget_without_a_block_is_refused(bits: float, channels: int, least: float) -> None:
    with pytest.raises(ParameterError, match=f"{bits} bits an element of head dimension {channels}: need {least}"):
        allocation.budget(bits, channels)
    assert allocation.budget(least + 1e-9, channels) == 2


@pytest.mark.parametrize("bits", [float("nan"), float("inf"), -2.0, -0.1])
def test_a_budget_that_is_none_is_refused(bits: float) -> None:
    with pytest.raises(ParameterError, match=f"^{bits} bits an element of head dimension 128: need 0.125"):
        allocation.budget(bits, 128)


@pytest.mark.parametrize("width", CODED_WIDTHS)
def test_the_table_of_distortions_is_that_of_a_normal_variable(width: int) -> None:
    from quantwm_core import directions

    grid = np.linspace(-8, 8, 200_001, dtype=np.float32)[:, None]
    weight = np.exp(-np.square(grid[:, 0].astype(np.float64)) / 2)
    step = np.array([directions.BEST_STEPS[width]], np.float32).astype("bfloat16")
    widths = np.array([width])
    coded = directions.levels(directions.quantize(grid, widths, step), widths) * step.astype(np.float32)
    error = np.square(grid - coded)[:, 0].astype(np.float64)
    assert error @ weight / weight.sum() == pytest.approx(DISTORTION[width], rel=0.02)
