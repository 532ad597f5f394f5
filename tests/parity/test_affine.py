"""encode_affine and decode_affine, against the reference and bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import affine as core
from quantwm_core.errors import DtypeError, ParameterError, ShapeError
from quantwm_kernels.affine import AffineCode
from quantwm_kernels.bridge import to_torch
from tests.core import strategies
from tests.parity.gate import assert_equal
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.affine", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

OPERATORS = ("encode_affine", "decode_affine")

GROUPS = {32: (4, 32), 64: (8, 64), 80: (40, 20), 96: (48, 32), 128: (64, 128), 256: (64,)}


def check(device: torch.device, values: np.ndarray, group_size: int) -> AffineCode:
    ours = kernels.encode(torch.from_numpy(values).to(device), group_size)
    theirs = core.encode(values, group_size)
    for name in AffineCode._fields:
        assert_equal(name, getattr(ours, name), to_torch(np.array(getattr(theirs, name))))
    tokens = values.shape[-2]
    for start, stop in ((0, tokens), (tokens // 3, tokens - tokens // 4), (tokens, tokens)):
        assert_equal("values", kernels.decode(ours, start, stop), to_torch(core.decode(theirs, start, stop)))
    return ours


@settings(EXAMPLES)
@given(unit=strategies.units(), choice=st.integers(0, 1), stage=st.booleans())
def test_encode_affine(device: torch.device, unit: np.ndarray, choice: int, stage: bool) -> None:
    values = unit.astype(np.float32)
    if stage:  # what is no BF16 number
        values = values - np.float32(0.3) * np.roll(values, 1, axis=2)
    sizes = GROUPS[unit.shape[3]]
    check(device, values, sizes[choice % len(sizes)])


@settings(EXAMPLES)
@given(values=strategies.groups())
def test_decode_affine(device: torch.device, values: np.ndarray) -> None:
    check(device, values, 4)


def test_ties_round_to_even(device: torch.device) -> None:
    step = np.float32(1.0)
    row = np.array([0.5, 1.5, 2.5, 0.0, 3.0, -0.0, 1.0, 2.0], np.float32) * step
    shifted = np.array([-0.5, 0.5, 1.5, 2.5, -1.5, -0.25, 0.75, 1.25], np.float32) * step
    check(device, np.stack([row, -row, shifted, -shifted])[None], 8)


def test_streams_share_no_scale_and_pieces_no_byte(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 3, 131, 96), np.float32) * np.exp2(rng.integers(-20, 20, (2, 3, 1, 1)))
    check(device, values.astype(np.float32), 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_and_strided_input(device: torch.device, dtype: torch.dtype) -> None:
    values = torch.randn(1, 9, 2, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    turned = values.to(device).transpose(1, 2)
    expected = core.encode(values.transpose(1, 2).float().numpy(), 32)
    for part, want in zip(kernels.encode(turned, 32), vars(expected).values(), strict=True):
        assert_equal("code", part, to_torch(np.array(want)))


def test_the_same_bytes_twice(device: torch.device) -> None:
    values = torch.randn(1, 2, 300, 128, generator=torch.Generator().manual_seed(4)).to(device)
    for first, second in zip(kernels.encode(values, 64), kernels.encode(values, 64), strict=True):
        assert_equal("code", first, second)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    values = torch.ones(1, 3, 8, device=device)
    with pytest.raises(ParameterError, match="group size 6"):
        kernels.encode(values, 6)
    with pytest.raises(DtypeError, match="float64"):
        kernels.encode(values.double(), 4)
    with pytest.raises(ShapeError, match="not empty"):
        kernels.encode(values[:, :0], 4)
    code = kernels.encode(values, 4)
    with pytest.raises(DtypeError, match="uint8"):
        kernels.decode(code._replace(scales=code.scales.view(torch.uint8)))
