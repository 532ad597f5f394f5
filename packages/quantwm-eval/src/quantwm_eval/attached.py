"""A cache under a live host, as experiments look at it."""

from __future__ import annotations

from dataclasses import dataclass

from quantwm_eval.evidence import CacheBytes
from quantwm_eval.host import CacheUse
from quantwm_models.attach import Attachment


@dataclass(frozen=True)
class AttachedCache:
    """What an attachment of :func:`quantwm_models.attach` costs."""

    attachment: Attachment

    def use(self) -> CacheUse:
        """What it cost so far."""
        report = self.attachment.report()
        units = sum(chunk.bf16_nbytes for cache in self.attachment.caches for chunk in cache.chunks)
        active, sealed_part = report.active_nbytes, report.sealed_bf16_nbytes
        live = sealed_part + active
        stored = CacheBytes(report.sealed_nbytes, units, active, live, report.state_nbytes, report.shared_nbytes)
        return CacheUse(stored, report.seal_seconds, report.decode_seconds)
