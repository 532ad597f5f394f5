"""How far reconstructed keys and values are off."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence, Recording
from quantwm_eval.metric import Measurement, Metric, Quantity, of_tallies


def _measure(evidence: Evidence) -> Measurement:
    """Relative reconstruction error of keys and of values of one video.

    ``key_error = sum |k̃ - k|² / sum |k|²`` over the sealed tokens of every read, each read of a chunk counted once, and
    over all layers and heads; ``value_error`` likewise. Keys are compared as the cache holds them, in the frame of
    reference (before or after RoPE) that the host stores. Range 0 to infinity, lower is better, no unit; 1 is as bad as
    zeros, NaN where nothing was sealed. Source: the QuantWM paper compares the reconstruction error of K and V; the
    normalisation is this project's.
    """
    recording: Recording = evidence.need("recording")
    return of_tallies({"key_error": recording.keys, "value_error": recording.values})


METRIC = Metric(
    "reconstruction_error",
    (
        Quantity("key_error", "Key error", "", "lower", digits=4),
        Quantity("value_error", "Value error", "", "lower", digits=4),
    ),
    ("recording",),
    _measure,
)
