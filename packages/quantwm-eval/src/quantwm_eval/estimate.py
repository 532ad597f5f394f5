"""A mean with how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 20260926


@dataclass(frozen=True)
class Estimate:
    """A mean over scenes.

    Attributes:
        mean: NaN where nothing was measured, infinite where any scene is.
        low: Lower end of the 95 % interval.
        high: Upper end.
        n: Scenes.
    """

    mean: float
    low: float
    high: float
    n: int


def bootstrap(values: Sequence[float]) -> Estimate:
    """Mean with the percentile interval of 10 000 resamples of scenes.

    The generator is made here from a fixed seed: the same values give the same interval, and nobody else's random numbers
    change. One scene, or equal ones, give an interval without width; NaN are left out; one infinite value makes all infinite.

    With few scenes the interval is too narrow. Where scenes are normally distributed, it held their true mean in 48 % of 2000
    draws of 2, 75 % of 3, 79 % of 4, 86 % of 6, 87 % of 8, 91 % of 12, and 92 % of 16 and of 32.

    >>> bootstrap([1.0, 1.0, 1.0])
    Estimate(mean=1.0, low=1.0, high=1.0, n=3)
    """
    known = np.array([value for value in values if not math.isnan(value)], np.float64)
    if known.size == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(known.mean())
    if math.isinf(mean):
        return Estimate(mean, mean, mean, known.size)
    drawn = np.random.default_rng(SEED).integers(known.size, size=(RESAMPLES, known.size))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(known[drawn].mean(axis=1), [tail, 100 - tail])
    return Estimate(mean, float(low), float(high), known.size)


def proportion(values: Sequence[float]) -> Estimate:
    """Share of ones with Wilson's 95 % interval, which keeps its width at 0 of n and n of n, where resampling has none.

    >>> proportion([1.0, 1.0]).low < 0.4
    True
    """
    known = [value for value in values if not math.isnan(value)]
    n = len(known)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    z = 1.959963984540054  # normal quantile of CONFIDENCE, two-sided
    share = sum(known) / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Estimate(share, max(0.0, centre - reach), min(1.0, centre + reach), n)
