"""How far attention logits are off."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence, Recording
from quantwm_eval.metric import Measurement, Metric, Quantity
from quantwm_eval.recorder import share


def logit_error(recording: Recording) -> float:
    """Relative logit error of one video.

    Squared error of the logits over their variance, both centred per query over the sealed tokens, because a shift of all
    of a query's logits changes no attention weight; sums run over sampled queries of all layers and heads before the
    division. Range 0 to infinity, lower is better, no unit; 1 is as bad as no keys at all. Source: this project; the same
    definition as :func:`quantwm_core.attention.logit_error`.

    Returns:
        The ratio; NaN where no query met a sealed token.

    >>> import numpy as np
    >>> import numpy as np
    >>> one = np.ones((1, 1, 1))
    >>> logit_error(Recording(queries=one, shifted=one, error_energy=one, logit_energy=8 * one))
    0.125
    """
    return float(share(recording.error_energy, recording.logit_energy))


def _measure(evidence: Evidence) -> Measurement:
    recording: Recording = evidence.need("recording")
    return Measurement(
        {"logit_error": logit_error(recording)},
        {"logit_error": share(recording.error_energy, recording.logit_energy, axis=(0, 1))},
        {"logit_error": share(recording.error_energy, recording.logit_energy, axis=2)},
    )


METRIC = Metric(
    "logit_error",
    (Quantity("logit_error", "Logit error", "", "lower", digits=4),),
    ("recording",),
    _measure,
)
