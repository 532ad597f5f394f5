"""The shape annotations of the package are checked while tests/core runs."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from quantwm_core import packing, psac, scales
from quantwm_core.errors import DtypeError


def test_a_wrong_dtype_is_refused_by_the_annotation() -> None:
    with pytest.raises(DtypeError) as caught:
        scales.encode(np.ones((1, 2, 3), np.float64))
    assert isinstance(caught.value.__cause__, TypeCheckError)


def test_axes_of_two_arguments_must_agree() -> None:
    error, basis = np.ones((1, 2, 8), np.float32), np.ones((1, 4, 3), "bfloat16")
    with pytest.raises(TypeCheckError):
        psac.project(error, basis)


def test_what_fits_passes() -> None:
    assert packing.pack(np.zeros((2, 8), np.uint8)).shape == (2, 2)
