import numpy as np
import pytest

from quantwm_core import methods
from quantwm_core.domain import BF16
from quantwm_core.method import decode_tensor
from tests.core import scalar, strategies


@pytest.mark.parametrize(("granularity", "channels", "size"), [("group", 80, 40), ("group", 32, 32), ("token", 96, 96)])
def test_groups_of_channels_are_the_scalar_code(granularity: str, channels: int, size: int) -> None:
    unit = strategies.unit(("channels", "normal"), 0, 9, channels)
    decoded = decode_tensor(methods.get("rtn", granularity=granularity).seal("keys", unit))
    for head in range(2):
        *_, want = scalar.affine(unit[0, head].astype(float).tolist(), size)
        np.testing.assert_array_equal(decoded[0, head], np.array(want, np.float32).astype(BF16))


@pytest.mark.parametrize(("tokens", "size"), [(12, 4), (13, 4), (3, 8), (1, 64)])
def test_groups_of_tokens_are_the_scalar_code(tokens: int, size: int) -> None:
    unit = strategies.unit(("channels",), 0, tokens, 32)
    decoded = decode_tensor(methods.get("rtn", granularity="channel", group_size=size).seal("keys", unit))
    by_channel = unit[0, 0].astype(np.float32).T
    padded = np.zeros((32, -(-tokens // size) * size), np.float32)
    padded[:, :tokens] = by_channel
    *_, want = scalar.affine(padded.tolist(), size)
    np.testing.assert_array_equal(decoded[0, 0], np.array(want, np.float32)[:, :tokens].T.astype(BF16))


def test_groups_of_tokens_need_no_multiple_of_four_channels() -> None:
    unit = strategies.unit(("normal",), 0, 20, 32)[..., :30]
    sealed = methods.get("rtn", granularity="channel").seal("keys", unit)
    assert sealed.nbytes == methods.get("rtn", granularity="channel").nbytes("keys", unit.shape, first=True)
    assert decode_tensor(sealed, 3, 9).shape == (1, 1, 6, 30)
