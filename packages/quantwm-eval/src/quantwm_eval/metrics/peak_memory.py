"""The most that a rollout needs at once."""

from __future__ import annotations

from quantwm_eval.evidence import Evidence
from quantwm_eval.metric import Measurement, Metric, Quantity


def _measure(evidence: Evidence) -> Measurement:
    """Peak memory of the rollout that one video was made in.

    ``peak_bytes`` is the most that the device's allocator held at once for tensors, weights, caches, workspaces and activations
    alike, over the whole rollout; a batch of scenes has one peak, which all its videos bear. Range 0 to infinity, lower is
    better, in bytes. On a GPU only: PyTorch counts no memory of the CPU. Where queries are scored, exact copies of what was
    sealed are part of it: measure it with ``samples = 0``. Source: ``torch.cuda.max_memory_allocated``.
    """
    peak: float = evidence.need("peak_bytes")
    return Measurement({"peak_bytes": peak})


METRIC = Metric(
    "peak_memory",
    (Quantity("peak_bytes", "Peak memory", "B", "lower"),),
    ("peak_bytes",),
    _measure,
)
