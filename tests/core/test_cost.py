from fractions import Fraction

import pytest

from quantwm_core import cost
from quantwm_core.errors import ParameterError
from tests.core import tolerances

HEAD_DIMENSIONS = (32, 64, 80, 96, 128, 256)


@pytest.mark.parametrize(("tokens", "ratio"), [(29_640, 6.13), (9360, 5.49), (6240, 5.10), (4680, 4.77)])
def test_documented_ratios(tokens: int, ratio: float) -> None:
    keys, values = cost.quantwm_nbytes(tokens, 128, group_size=64, centroids=256, rank=8)
    assert 2 * 2 * tokens * 128 / (keys + values) == pytest.approx(ratio, abs=tolerances.RATIO)


@pytest.mark.parametrize(("tokens", "channels", "increment"), [(9360, 128, 0.2569), (7040, 256, 0.1341)])
def test_the_papers_rank_increments(tokens: int, channels: int, increment: float) -> None:
    assert cost.rank_increment(tokens, channels, 8, 16) == pytest.approx(increment, abs=tolerances.INCREMENT)
    low, high = (sum(cost.quantwm_nbytes(tokens, channels, 64, 256, rank)) for rank in (8, 16))
    by_method = cost.bits_per_element(high - low, tokens, channels) / 2
    assert by_method == pytest.approx(increment, abs=tolerances.INCREMENT)


@pytest.mark.parametrize("tokens", [4680, 9360, 29_640])
def test_bits_of_an_element_by_the_documented_sum(tokens: int) -> None:
    keys, values = cost.quantwm_nbytes(tokens, 128, 64, 256, 8)
    shared = 2 + Fraction(1, 8) + Fraction(1, 32) + Fraction(1, 16) + Fraction(4096, tokens)
    own = Fraction(1, 2) + Fraction(128, tokens)
    super_scale, coefficient_scales = 4, 2 * 8  # bytes that the sum leaves out
    assert Fraction(8 * (values - super_scale), tokens * 128) == shared
    assert Fraction(8 * (keys - super_scale - coefficient_scales), tokens * 128) == shared + own


@pytest.mark.parametrize("channels", HEAD_DIMENSIONS)
@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 4680])
@pytest.mark.parametrize("rank", [0, 1, 8, 16])
def test_the_storage_table_row_by_row(tokens: int, channels: int, rank: int) -> None:
    group = max(size for size in range(4, 65, 4) if channels % size == 0)
    centroids = min(256, max((2**k for k in range(9) if 2**k * 16 <= tokens), default=1))
    codes, scales = tokens * channels // 4, tokens * channels // group
    zero_points = -(-tokens * channels // group // 4)
    value_bytes = codes + scales + zero_points + tokens + 2 * min(centroids, tokens) * channels + 4
    key_bytes = value_bytes + (2 * channels * rank + tokens * rank + 2 * rank if rank else 0)
    assert cost.quantwm_nbytes(tokens, channels, rank=rank) == (key_bytes, value_bytes)


@pytest.mark.parametrize(("coefficient_bits", "centroid_bits"), [(8, 8), (4, 4), (4, 16)])
def test_the_storage_table_in_small_integers(coefficient_bits: int, centroid_bits: int) -> None:
    tokens, channels, rank = 512, 128, 15
    rows = 64 if centroid_bits < 16 else 32
    table = rows * channels * centroid_bits // 8 + (2 * channels if centroid_bits < 16 else 0)
    value_bytes = tokens * (32 + 4 + 1 + 1) + table + 4  # codes, scales, zero-points and index of a token
    coefficients = tokens * (15 if coefficient_bits == 8 else 8)
    key_bytes = value_bytes + 2 * channels * rank + coefficients + 2 * rank
    found = cost.quantwm_nbytes(tokens, channels, 32, None, rank, coefficient_bits, centroid_bits)
    assert found == (key_bytes, value_bytes)


def test_more_centroids_than_tokens_are_not_stored() -> None:
    assert cost.clustered_nbytes(10, 64, 64, 256) == cost.clustered_nbytes(10, 64, 64, 10)


def test_a_group_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ParameterError, match="group size 48"):
        cost.clustered_nbytes(10, 64, 48, 4)
