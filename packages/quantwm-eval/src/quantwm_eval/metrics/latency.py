"""Seconds that a video takes."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence, Seconds
from quantwm_eval.metric import Measurement, Metric, Quantity


def _measure(evidence: Evidence) -> Measurement:
    """Wall time of one video.

    ``seconds`` from first to last frame without the time spent on measuring; ``seal_seconds`` of it encode sealed units,
    ``decode_seconds`` reconstruct them. Range 0 to infinity, lower is better, in seconds. Source: a monotonic clock, and
    for the two parts on a GPU events in its stream, which do not count what was queued before.
    """
    seconds: Seconds = evidence.need("seconds")
    return Measurement(
        {"seconds": seconds.total, "seal_seconds": seconds.seal, "decode_seconds": seconds.decode},
    )


METRIC = Metric(
    "latency",
    (
        Quantity("seconds", "Time", "s", "lower", digits=1),
        Quantity("seal_seconds", "of it sealing", "s", "lower", digits=1),
        Quantity("decode_seconds", "of it decoding", "s", "lower", digits=1),
    ),
    ("seconds",),
    _measure,
)
