"""encode_scales and decode_scales, against the reference and bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from quantwm_core import scales as core
from quantwm_core.domain import E4M3
from quantwm_core.errors import DtypeError, ShapeError
from quantwm_kernels.bridge import to_torch
from tests.core import strategies
from tests.parity.gate import assert_equal
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.scales", exc_type=ImportError)

OPERATORS = ("encode_scales", "decode_scales")

FINITE = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
POSITIVE = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)


def check_encode(device: torch.device, steps: np.ndarray) -> None:
    stored, super_scale = kernels.encode(torch.from_numpy(steps).to(device))
    expected = [to_torch(array) for array in map(np.array, core.encode(steps))]
    assert_equal("super-scale", super_scale, expected[1])
    assert_equal("scales", stored, expected[0])
    again = kernels.decode(stored, super_scale)
    assert_equal("steps", again, to_torch(core.decode(*core.encode(steps))))


@settings(EXAMPLES)
@given(steps=strategies.steps())
def test_encode_scales(device: torch.device, steps: np.ndarray) -> None:
    check_encode(device, steps)


def around(numbers: np.ndarray) -> np.ndarray:
    """FP32 numbers, and the five before and behind each."""
    bits = numbers.astype(np.float32).view(np.int32)[:, None] + np.arange(-5, 6, dtype=np.int32)
    return np.abs(np.where(bits < 0, 0, bits).astype(np.int32).view(np.float32)).ravel()


@pytest.mark.parametrize("super_scale", [1.0, 3.0, 2.0**-130, 2.0**-126, 2.0**100])
def test_every_code_every_tie_and_their_neighbours(device: torch.device, super_scale: float) -> None:
    ties = (POSITIVE[:-1] + POSITIVE[1:]) / 2
    numbers = np.concatenate([around(POSITIVE), around(ties), np.geomspace(2.0**-30, 448, 2000, dtype=np.float32)])
    largest = np.float32(core.E4M3_MAX) * np.float32(super_scale)
    steps = np.append(np.minimum(numbers * np.float32(super_scale), largest), largest)
    check_encode(device, steps.astype(np.float32)[None, None])


def test_a_positive_step_never_becomes_zero_and_zero_stays(device: torch.device) -> None:
    steps = np.array([[[448.0, 2.0**-10, 2.0**-40, 2.0**-149, 0.0]], [[0.0] * 5]], np.float32)
    stored, super_scale = kernels.encode(torch.from_numpy(steps).to(device))
    assert stored.view(torch.uint8)[0, 0].tolist() == [126, 1, 1, 1, 0]
    assert not stored[1].view(torch.uint8).any()
    assert (super_scale > 0).all()
    check_encode(device, steps)


def test_decode_scales(device: torch.device) -> None:
    stored = np.broadcast_to(FINITE.view(E4M3), (4, 2, FINITE.size)).copy()
    super_scale = np.array([1.0, 0.3, 2.0**-126, 2.0**60], np.float32)
    result = kernels.decode(to_torch(stored).to(device), torch.from_numpy(super_scale).to(device))
    assert_equal("steps", result, to_torch(core.decode(stored, super_scale)))


def test_streams_keep_apart_and_strides_do_not_matter(device: torch.device) -> None:
    steps = np.random.default_rng(0).random((2, 3, 7, 5), np.float32)
    check_encode(device, steps)
    turned = torch.from_numpy(steps).to(device).transpose(2, 3)
    stored, super_scale = kernels.encode(turned)
    straight, same = kernels.encode(turned.contiguous())
    assert_equal("scales", stored, straight)
    assert_equal("super-scale", super_scale, same)
    assert_equal(
        "steps", kernels.decode(stored.transpose(2, 3), super_scale).transpose(2, 3), kernels.decode(stored, same)
    )


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    steps = torch.ones(2, 3, 4, device=device)
    stored, super_scale = kernels.encode(steps)
    for bad in (steps[0, 0], steps[:, :0]):
        with pytest.raises(ShapeError, match="at least one step"):
            kernels.encode(bad)
    with pytest.raises(DtypeError, match="bfloat16"):
        kernels.encode(steps.bfloat16())
    with pytest.raises(ShapeError, match="super-scale"):
        kernels.decode(stored, super_scale[:1])
    with pytest.raises(DtypeError, match="uint8"):
        kernels.decode(stored.view(torch.uint8), super_scale)


def test_no_scale_decodes_to_no_step(device: torch.device) -> None:
    stored = torch.zeros(2, 0, 4, dtype=torch.float8_e4m3fn, device=device)
    assert kernels.decode(stored, torch.ones(2, device=device)).shape == (2, 0, 4)
