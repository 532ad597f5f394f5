"""How much of the attention goes elsewhere."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence, Recording
from quantwm_eval.metric import Measurement, Metric, Quantity, of_tallies


def _measure(evidence: Evidence) -> Measurement:
    """Divergence of the attention of one video.

    ``sum_n p_n (log p_n - log p̃_n)``, the Kullback-Leibler divergence of the attention weights with reconstructed keys
    from those with exact ones, over all tokens of a read, the active chunk included, as the model weighs them; mean over
    sampled queries of all layers and heads. It does not split by age. Range 0 to infinity, lower is better, in nats; NaN
    where no query met a sealed token. Source: Kullback and Leibler, On Information and Sufficiency, 1951; the same
    definition as :func:`quantwm_core.attention.attention_kl`.
    """
    recording: Recording = evidence.need("recording")
    return of_tallies({"attention_kl": recording.attention})


METRIC = Metric(
    "attention_kl",
    (Quantity("attention_kl", "Attention KL", "nats", "lower", digits=4),),
    ("recording",),
    _measure,
)
