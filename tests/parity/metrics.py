"""Metrics and codebooks that k-means and QSAC are held against the reference with."""

import numpy as np

from quantwm_core import codebook, statistics
from quantwm_core.codebook import Metric
from tests.core import strategies

METRICS = ("uniform", "diagonal", "full")
# The smallest BF16 numbers are left out: the interpreter loads subnormal BF16 wrongly.
KINDS = tuple(kind for kind in strategies.KINDS if kind != "denormal")


def weights_of(name: str, heads: int, channels: int) -> tuple[np.ndarray, Metric]:
    """Sensitivity ``[1, heads, channels]`` and metric of a few queries."""
    mean = strategies.moment(3, heads, channels).mean
    if name == "uniform":
        return np.ones((1, heads, channels), np.float32), None
    weights = statistics.sensitivity(mean)
    return weights, weights if name == "diagonal" else statistics.normalised(mean)


def fitted(unit: np.ndarray, size: int, metric: Metric) -> np.ndarray:
    """A codebook of the reference after two rounds."""
    return codebook.fit(unit, size, metric, 2)
