from typing import Any

import numpy as np
import pytest

from quantwm_core import attention, methods, rotated_queries
from quantwm_core.chunk import SealedTensor
from quantwm_core.errors import ShapeError
from quantwm_core.method import decode_tensor
from tests.core import strategies


def sealed(name: str = "klt", channels: int = 64, tokens: int = 70, **parameters: Any) -> SealedTensor:
    unit = strategies.unit(("normal", "clusters", "offset"), 0, tokens, channels, batch=2)
    moment = strategies.moment(0, 3, channels, batch=2)
    return methods.get(name, **parameters).seal("keys", unit, moment)


def asked(heads: int, count: int, channels: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, heads, count, channels)).astype(np.float32)


def rotated(queries: np.ndarray, keys: SealedTensor, start: int = 0, stop: int | None = None) -> np.ndarray:
    return rotated_queries.logits(queries, keys.arrays, keys.shape, start, keys.shape[2] if stop is None else stop)


@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize(
    ("name", "channels", "parameters"),
    [("klt", 64, {}), ("klt", 80, {"bits": 1.25}), ("kvtc", 32, {}), ("klt", 64, {"bits": 0.5, "allocation": "layer"})],
)
def test_logits_are_those_of_the_decoded_keys(name: str, channels: int, parameters: dict[str, Any], heads: int) -> None:
    keys = sealed(name, channels, **parameters)
    queries = asked(heads, 9, channels)
    decoded = decode_tensor(keys)
    want = attention.logits(queries, decoded)
    # All that differs is the rounding of a key to BF16, half a step of each channel.
    most = attention.logits(np.abs(queries), np.abs(decoded)) * 2.0**-8 + 1e-5
    assert (np.abs(rotated(queries, keys) - want) <= most).all()


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 65), (69, 70), (5, 5)])
def test_a_range_is_part_of_the_whole(start: int, stop: int) -> None:
    keys, queries = sealed(), asked(3, 4, 64)
    part, whole = rotated(queries, keys, start, stop), rotated(queries, keys)
    assert part.shape == (2, 3, 4, stop - start)
    assert np.allclose(part, whole[..., start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 4, 32), (1, 3, 4, 64), (2, 4, 4, 64)])
def test_queries_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"need \[B, Hq, T, D\] with Hq a multiple of H"):
        rotated(np.zeros(shape, np.float32), sealed())
