"""How often a query's winning past token is another one."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence, Recording
from quantwm_eval.metric import Measurement, Metric, Quantity, of_tallies


def _measure(evidence: Evidence) -> Measurement:
    """Selection-shift ratio of one video.

    Share of sampled (layer, head, query) for which the sealed token of the largest logit differs between exact BF16 and
    reconstructed keys; the lowest index wins ties. Real queries of the rollout, sealed tokens only: what is still BF16
    cannot shift and would dilute the figure. By age and position it is told for the token that should have won.
    ``selection_shift_top8`` is the mean share of a query's eight largest logits that are not among its eight largest
    reconstructed ones, in whatever order; fewer where fewer tokens are sealed. Range 0 to 1, lower is better, no unit; NaN
    where no query met a sealed token. Source: the QuantWM paper, top-1 selection shift; the same definitions as
    :func:`quantwm_core.attention.selection_shift` with ``top`` 1 and 8.
    """
    recording: Recording = evidence.need("recording")
    return of_tallies({"selection_shift": recording.selection, "selection_shift_top8": recording.top})


METRIC = Metric(
    "selection_shift",
    (
        Quantity("selection_shift", "Selection shift", "share", "lower", 0.0, 1.0, 1),
        Quantity("selection_shift_top8", "Selection shift, top 8", "share", "lower", 0.0, 1.0, 1),
    ),
    ("recording",),
    _measure,
)
