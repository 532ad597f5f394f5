"""Bytes of the cache, counted from what is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quantwm_eval.evidence import CacheBytes, Evidence
from quantwm_eval.metric import Measurement, Metric, Quantity


def memory(moments: Sequence[CacheBytes]) -> dict[str, float]:
    """Bits per element, compression ratios and bytes of one video's cache.

    Counted after every chunk and summed over these moments. ``bits_per_element = 16 · sealed / sealed_as_bf16``: every
    stored byte of the sealed units, scales, codebooks and all, over their elements; range 0 to infinity, lower is better,
    in bits. It is the sum of ``own_bits_per_element``, which a longer video has in every unit, and of
    ``shared_bits_per_element``: arrays that units share, such as a basis, each counted once.
    ``compression`` is 16 over the sum; higher is better, no unit. ``compression_in_use`` is what a plain cache would
    take over what this one takes: the BF16 active chunk counts in both, tokens of a unit that the window has left behind
    count as ballast. ``cache_bytes`` is the most that the cache ever held, ``state_bytes`` the most that was kept beside
    it to compress with; lower is better, in bytes. NaN where nothing was sealed. Source: counted from storage.

    >>> moment = CacheBytes(sealed=2, sealed_as_bf16=16, active=8, live_as_bf16=24, state=0)
    >>> memory([moment])["bits_per_element"], memory([moment])["compression_in_use"]
    (2.0, 2.4)
    """
    sealed, exact, active, plain, shared = (
        sum(getattr(moment, part) for moment in moments)
        for part in ("sealed", "sealed_as_bf16", "active", "live_as_bf16", "shared")
    )
    return {
        "bits_per_element": 16 * sealed / exact if exact else math.nan,
        "own_bits_per_element": 16 * (sealed - shared) / exact if exact else math.nan,
        "shared_bits_per_element": 16 * shared / exact if exact else math.nan,
        "compression": exact / sealed if sealed else math.nan,
        "compression_in_use": plain / (sealed + active) if sealed + active else math.nan,
        "cache_bytes": float(max(moment.sealed + moment.active for moment in moments)),
        "state_bytes": float(max(moment.state for moment in moments)),
    }


def _measure(evidence: Evidence) -> Measurement:
    moments: tuple[CacheBytes, ...] = evidence.need("cache")
    curve = np.array([moment.sealed + moment.active for moment in moments], np.float64)
    return Measurement(memory(moments), {"cache_bytes": curve})


METRIC = Metric(
    "memory",
    (
        Quantity("bits_per_element", "Bits per element", "bits", "lower", digits=2),
        Quantity("own_bits_per_element", "Of these, the units' own", "bits", "lower", digits=2),
        Quantity("shared_bits_per_element", "Of these, shared by units", "bits", "lower", digits=2),
        Quantity("compression", "Compression", "×", "higher"),
        Quantity("compression_in_use", "Compression, whole cache", "×", "higher"),
        Quantity("cache_bytes", "Cache, largest", "B", "lower"),
        Quantity("state_bytes", "State beside it", "B", "lower"),
    ),
    ("cache",),
    _measure,
)
