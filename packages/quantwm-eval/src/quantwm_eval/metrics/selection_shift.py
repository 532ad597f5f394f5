"""How often a query's winning past token is another one."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence, Recording
from quantwm_eval.metric import Measurement, Metric, Quantity
from quantwm_eval.recorder import share


def selection_shift(recording: Recording) -> float:
    """Selection-shift ratio of one video.

    Share of sampled (layer, head, query) for which the sealed token of the largest logit differs between exact BF16 and
    reconstructed keys; the lowest index wins ties. Real queries of the rollout, sealed tokens only: what is still BF16
    cannot shift and would dilute the figure. Range 0 to 1, lower is better, no unit. Source: the QuantWM paper, top-1
    selection shift; the same definition as :func:`quantwm_core.attention.selection_shift`.

    Returns:
        The ratio; NaN where no query met a sealed token.

    >>> import numpy as np
    >>> import numpy as np
    >>> one = np.ones((1, 1, 1))
    >>> selection_shift(Recording(queries=4 * one, shifted=one, error_energy=one, logit_energy=one))
    0.25
    """
    return float(share(recording.shifted, recording.queries))


def _measure(evidence: Evidence) -> Measurement:
    recording: Recording = evidence.need("recording")
    return Measurement(
        {"selection_shift": selection_shift(recording)},
        {"selection_shift": share(recording.shifted, recording.queries, axis=(0, 1))},
        {"selection_shift": share(recording.shifted, recording.queries, axis=2)},
    )


METRIC = Metric(
    "selection_shift",
    (Quantity("selection_shift", "Selection shift", "share", "lower", 0.0, 1.0, 1),),
    ("recording",),
    _measure,
)
