"""How far the attention's output is off."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence, Recording
from quantwm_eval.metric import Measurement, Metric, Quantity, of_tallies


def _measure(evidence: Evidence) -> Measurement:
    """Relative output error of the attention of one video.

    ``sum |õ - o|² / sum |o|²`` over sampled queries of all layers and heads, where ``o`` is the output of a head over all
    tokens of a read with exact keys and values, and ``õ`` with reconstructed ones. It is what keys and values do together,
    before the output projection; it does not split by age. Range 0 to infinity, lower is better, no unit; NaN where no
    query met a sealed token. Source: this project; outputs as :func:`quantwm_core.attention.attend` gives them.
    """
    recording: Recording = evidence.need("recording")
    return of_tallies({"output_error": recording.output})


METRIC = Metric(
    "output_error",
    (Quantity("output_error", "Output error", "", "lower", digits=4),),
    ("recording",),
    _measure,
)
