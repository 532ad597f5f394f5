"""How few directions hold the queries: what a low-rank compensation can live on."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from quantwm_eval.evidence import Evidence, Recording
from quantwm_eval.metric import Measurement, Metric, Quantity

DIRECTIONS = 8
"""Leading directions that the figure is of: the paper's default rank."""


def cumulative_energy(
    spectrum: Float64[np.ndarray, "*heads channels"],
) -> Float64[np.ndarray, "*heads channels"]:
    """Share of the energy that the leading 1, 2, ... directions hold.

    Args:
        spectrum: Eigenvalues of second moments, descending.

    Returns:
        float64, the last entry 1; NaN for a head without queries or whose queries are all zero.

    >>> cumulative_energy(np.array([3.0, 1.0, 0.0]))
    array([0.75, 1.  , 1.  ])
    """
    total = spectrum.sum(-1, keepdims=True)
    return np.where(total > 0, np.cumsum(spectrum, -1) / np.where(total > 0, total, 1), np.nan)


def _measure(evidence: Evidence) -> Measurement:
    """Query energy of one video.

    ``query_energy = sum of the 8 largest eigenvalues of E[q qᵀ] / sum of all``, per layer and KV head (queries of a
    grouped head are pooled, uncentred, all calls of the rollout count alike), then the mean over layers and heads. The
    curve has the same share for 1, 2, ... all directions. Range 0 to 1, no unit; it describes the model, and no direction is better.
    Source: the QuantWM paper, Fig. 8 (more than 60 % in the top 8).
    """
    recording: Recording = evidence.need("recording")
    shares = cumulative_energy(recording.spectrum)
    leading = shares[..., min(DIRECTIONS, shares.shape[-1]) - 1]
    return Measurement(
        {"query_energy": float(leading.mean())},
        {"query_energy": shares.mean((0, 1))},
        {"query_energy": leading},
    )


METRIC = Metric(
    "query_energy",
    (Quantity("query_energy", "Query energy, 8 directions", "share", "neither", 0.0, 1.0, 1),),
    ("recording",),
    _measure,
)
