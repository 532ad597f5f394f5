"""How far attention logits are off."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence, Recording
from quantwm_eval.metric import Measurement, Metric, Quantity, of_tallies


def _measure(evidence: Evidence) -> Measurement:
    """Relative logit error of one video.

    Squared error of the logits over their variance, both centred per query over the sealed tokens, because a shift of all
    of a query's logits changes no attention weight; sums run over sampled queries of all layers and heads before the
    division, by age over the tokens of that age. Range 0 to infinity, lower is better, no unit; 1 is as bad as no keys at
    all, NaN where no query met a sealed token. Source: this project; the same definition as
    :func:`quantwm_core.attention.logit_error`.
    """
    recording: Recording = evidence.need("recording")
    return of_tallies({"logit_error": recording.logits})


METRIC = Metric(
    "logit_error",
    (Quantity("logit_error", "Logit error", "", "lower", digits=4),),
    ("recording",),
    _measure,
)
