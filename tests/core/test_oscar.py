from dataclasses import replace

import numpy as np
import pytest

from quantwm_core import basis, methods
from quantwm_core.basis import Basis
from quantwm_core.method import decode_tensor
from quantwm_core.methods.oscar import SHARED_PARTS, hadamard
from quantwm_core.statistics import QueryMoment
from tests.core import strategies
from tests.core.compare import assert_arrays, assert_within


@pytest.mark.parametrize("channels", [8, 32, 80, 96, 128])
def test_the_hadamard_matrix_is_orthogonal_and_flat(channels: int) -> None:
    matrix = hadamard(channels)
    assert_within("H H^T", matrix @ matrix.T, np.eye(channels), 1e-12)
    magnitudes = np.unique(np.abs(matrix).round(9))
    assert len(magnitudes) == (1 if channels & (channels - 1) == 0 else 2)


def test_the_rotation_is_orthogonal_up_to_its_rounding() -> None:
    unit, moment = strategies.unit(("normal",), 0, 40, 64), strategies.moment(0, 1, 64)
    sealed = methods.get("oscar").seal("keys", unit, moment)
    rows = basis.wide(*Basis.of(sealed.arrays).streams()[0])
    assert_within("R R^T", rows @ rows.T, np.eye(64), 0.02)
    energies = np.einsum("id,de,ie->i", rows, moment.mean[0, 0].astype(float), rows)
    assert energies.max() < 1.1 * energies.min()  # every coordinate matters alike


def test_a_rotation_waits_for_queries_and_is_kept_then() -> None:
    unit, moment = strategies.unit(("normal", "channels"), 0, 40, 32), strategies.moment(0, 2, 32)
    oscar = methods.get("oscar")
    first = oscar.seal("keys", unit)
    again = oscar.seal("keys", unit, None, first)
    assert again.arrays["shared_basis"] is first.arrays["shared_basis"]
    assert np.unique(np.abs(first.arrays["shared_basis"])).tolist() == [127]
    fitted = oscar.seal("keys", unit, moment, again)
    assert fitted.arrays["shared_basis"] is not first.arrays["shared_basis"]
    later = oscar.seal("keys", unit, strategies.moment(1, 2, 32), fitted)
    assert later.arrays["shared_basis"] is fitted.arrays["shared_basis"]
    half = QueryMoment(moment.mean * np.array([1, 0], np.float32)[None, :, None, None], 5)
    assert oscar.seal("keys", unit, half, first).arrays["shared_fitted"].tolist() == [[1, 0]]


@pytest.mark.parametrize("part", SHARED_PARTS)
def test_a_rotation_that_is_not_whole_is_not_kept(part: str) -> None:
    unit, oscar = strategies.unit(("normal",), 0, 40, 32), methods.get("oscar")
    first = oscar.seal("values", unit)
    damaged = replace(first, arrays={name: array for name, array in first.arrays.items() if name != part})
    assert_arrays("fitted anew", dict(oscar.seal("values", unit, None, damaged).arrays), dict(first.arrays))


def test_bits_of_an_element_are_those_of_the_paper() -> None:
    unit = strategies.unit(("normal",), 0, 64, 128)
    sealed = methods.get("oscar").seal("values", unit)
    assert 8 * (sealed.nbytes - sealed.shared_nbytes) / unit.size == 2.25


def test_an_outlier_channel_is_spread_over_all_coordinates() -> None:
    rng = np.random.default_rng(0)
    unit = rng.standard_normal((1, 1, 200, 64))
    unit[..., 3] *= 8
    exact = unit.astype("bfloat16")
    errors = {
        name: np.square(decode_tensor(methods.get(name, **parameters).seal("keys", exact)).astype(float) - unit).mean()
        for name, parameters in (("oscar", {}), ("rtn", {"granularity": "token"}))
    }
    assert errors["oscar"] < 0.75 * errors["rtn"]
