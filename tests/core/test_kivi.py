import numpy as np
import pytest

from quantwm_core import methods, packing
from quantwm_core.chunk import Kind
from quantwm_core.domain import BF16
from quantwm_core.method import decode_tensor, scheme
from tests.core import scalar, strategies
from tests.core.compare import assert_bits

# Tokens and channels that do and do not fill groups.
CASES = [(40, 32, 32), (33, 80, 32), (1, 36, 32), (70, 32, 5), (7, 32, 100)]


@pytest.mark.parametrize(("tokens", "channels", "group_size"), CASES)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_it_is_the_scalar_code_with_ragged_groups(tokens: int, channels: int, group_size: int, kind: Kind) -> None:
    unit = strategies.unit(("channels",), 0, tokens, channels)
    sealed = methods.get("kivi", group_size=group_size).seal(kind, unit)
    matrix = unit[0, 0].astype(np.float32)
    rows = matrix.T if kind == "keys" else matrix
    coded = [scalar.minmax(row.tolist(), group_size) for row in rows]
    codes = np.array([row[0] for row in coded], np.uint8)
    scales, minima = ("channel_scales", "channel_minima") if kind == "keys" else ("scales", "minima")
    got = packing.unpack(sealed.arrays["codes"], channels)[0, 0]
    np.testing.assert_array_equal(got, codes.T if kind == "keys" else codes)
    assert_bits("scales", sealed.arrays[scales][0, 0], np.array([row[1] for row in coded], BF16))
    assert_bits("minima", sealed.arrays[minima][0, 0], np.array([row[2] for row in coded], BF16))
    decoded = np.array([row[3] for row in coded], np.float32).astype(BF16)
    np.testing.assert_array_equal(decode_tensor(sealed)[0, 0], decoded.T if kind == "keys" else decoded)


def test_a_group_never_reaches_over_the_end_of_the_unit() -> None:
    unit = strategies.unit(("normal",), 0, 40, 32)
    unit[0, 0, 32:] = 100  # the ragged group of eight tokens is constant and exact
    decoded = decode_tensor(methods.get("kivi").seal("keys", unit))
    assert_bits("last group", decoded[:, :, 32:], unit[:, :, 32:])


def test_an_outlier_channel_of_keys_keeps_its_error_to_itself() -> None:
    unit = strategies.unit(("normal",), 0, 64, 32)
    loud = unit.copy()
    loud[..., 3] = (1000 * unit[..., 3].astype(np.float32)).astype(BF16)
    quiet = [channel for channel in range(32) if channel != 3]
    got, want = (decode_tensor(methods.get("kivi").seal("keys", each)) for each in (loud, unit))
    assert_bits("others", got[..., quiet], want[..., quiet])


def test_the_newest_tokens_are_asked_to_stay() -> None:
    assert methods.get("kivi").recent_tokens == 128
    assert scheme("kivi", residual_length=7).recent_tokens == 7
    assert scheme("quantwm", values="kivi").recent_tokens == 128
    assert scheme("quantwm").recent_tokens == 0


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_no_multiple_of_four_channels_is_needed(kind: Kind) -> None:
    unit = strategies.unit(("normal",), 0, 20, 32)[..., :30]
    sealed = methods.get("kivi").seal(kind, unit)
    assert sealed.nbytes == methods.get("kivi").nbytes(kind, unit.shape, first=True)
    assert decode_tensor(sealed, 3, 9).shape == (1, 1, 6, 30)
