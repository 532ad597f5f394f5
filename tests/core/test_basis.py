import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import basis
from quantwm_core.basis import Basis
from quantwm_core.errors import ShapeError
from tests.core.compare import assert_within

SEEDS = st.integers(0, 2**32 - 1)


def _definite(seed: int, channels: int, floor: float = 0.1) -> np.ndarray:
    """A positive definite matrix of mean 1 with eigenvalues over three powers of ten."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((channels, channels)) * np.exp(rng.standard_normal(channels))
    whole = mix @ mix.T
    return np.asarray(whole / np.trace(whole) * channels + floor * np.eye(channels))


@given(seed=SEEDS, channels=st.sampled_from([8, 16, 32]))
def test_the_rows_whiten_the_metric_and_decorrelate_the_covariance(seed: int, channels: int) -> None:
    covariance, metric = _definite(seed, channels), _definite(seed + 1, channels)
    rows = basis.fit(covariance, metric)
    assert_within("rows G rows^T", rows @ metric @ rows.T, np.eye(channels), 1e-8)
    forward = basis.projector(rows, metric)
    spread = forward @ covariance @ forward.T
    assert_within("decorrelated", spread, np.diag(spread.diagonal()), 1e-6 * spread.max())
    assert (np.diff(spread.diagonal()) <= 1e-9 * spread.max()).all()


def test_a_metric_that_rounds_to_an_indefinite_one_is_whitened_where_it_is_known() -> None:
    metric = np.diag([4.0, 1.0, *[-1e-9] * 6])
    rows = basis.fit(_definite(0, 8), metric)
    assert np.isfinite(rows).all()
    whitened = rows @ np.maximum(metric, 4.0 * basis.RIDGE * np.eye(8)) @ rows.T
    assert_within("rows G rows^T", whitened, np.eye(8), 1e-6)


@given(seed=SEEDS)
def test_no_other_directions_hold_more_energy(seed: int) -> None:
    covariance, metric = _definite(seed, 16), _definite(seed + 1, 16)
    best = basis.fit(covariance, metric)[:8]
    others = (np.random.default_rng(seed).standard_normal((8, 16)), basis.fit(covariance, np.eye(16))[:8])
    energies = [
        np.einsum("id,de,ei->", basis.projector(rows, metric), covariance, metric @ rows.T) for rows in (best, *others)
    ]
    assert energies[0] >= max(energies[1:]) * (1 - 1e-6)


@given(seed=SEEDS)
def test_coefficients_leave_an_error_that_no_row_could_take_up(seed: int) -> None:
    metric = _definite(seed, 16)
    rng = np.random.default_rng(seed)
    rows, vector = rng.standard_normal((8, 16)), rng.standard_normal(16)
    error = vector - (basis.projector(rows, metric) @ vector) @ rows
    size = np.linalg.norm(rows @ metric, axis=1) * np.linalg.norm(vector)
    assert_within("rows G error", rows @ metric @ error, np.zeros(8), 1e-5 * size)


@given(seed=SEEDS)
def test_a_row_is_stored_within_half_a_step(seed: int) -> None:
    rows = basis.fit(_definite(seed, 16), _definite(seed + 1, 16))
    stored = basis.store([rows[:8], rows], (1, 2))
    assert stored.nbytes == 24 * 16 + 24 * 2 + 2
    assert stored.blocks.tolist() == [[1, 2]]
    for want, part in zip((rows[:8], rows), stored.streams(), strict=True):
        step = part[1].astype(float)[:, None]
        # A scale that is rounded down clips the largest component by half a unit of BF16 more.
        assert_within("rows", basis.wide(*part), want, step / 2 + np.abs(want) * 2.0**-8)


def test_a_basis_that_lacks_rows_is_refused() -> None:
    stored = basis.store([np.eye(8)], (1, 1))
    with pytest.raises(ShapeError, match="a basis of 7 rows"):
        Basis(stored.rows[:7], stored.scales[:7], stored.blocks).streams()


def test_rows_of_zeros_stay_zeros() -> None:
    stored = basis.store([np.zeros((8, 8))], (1, 1))
    assert not basis.wide(*stored.streams()[0]).any()
