"""What a metric is: named figures, computed from the evidence that one generated video leaves behind.

A metric is one file in ``metrics/`` that binds ``METRIC``. It states which parts of the evidence it needs; whoever holds
two videos and nothing else gets the metrics that need nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from quantwm_eval.evidence import Curve, Evidence, Map


@dataclass(frozen=True)
class Quantity:
    """One figure that a metric reports.

    Attributes:
        name: Its name in results.
        label: Its name in tables.
        unit: ``"dB"``, ``"bits"``, ``"B"``, ``"s"``, ... or ``""`` where it has none; ``"share"`` is shown in percent.
        better: Which direction is better; ``"neither"`` for figures that only describe.
        low: Smallest value that it can take.
        high: Largest value that it can take.
        digits: Decimals in tables.
    """

    name: str
    label: str
    unit: str
    better: Literal["higher", "lower", "neither"]
    low: float = 0.0
    high: float = math.inf
    digits: int = 2


@dataclass(frozen=True)
class Measurement:
    """What a metric found in one video.

    Attributes:
        values: Figure by quantity name; NaN where the video gave nothing to measure.
        curves: Over frames or reads, by quantity name.
        maps: Over layers and heads, by quantity name.
    """

    values: Mapping[str, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    maps: Mapping[str, Map] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """A member of ``quantwm_eval.metrics``.

    Attributes:
        name: Its public name, which is the name of its file.
        quantities: What it reports, most important first.
        needs: Parts of the evidence without which it says nothing.
        measure: Evidence to measurement.
    """

    name: str
    quantities: tuple[Quantity, ...]
    needs: tuple[str, ...]
    measure: Callable[[Evidence], Measurement]

    def applies(self, evidence: Evidence) -> bool:
        """Whether everything that the metric needs is at hand."""
        return all(getattr(evidence, part) is not None for part in self.needs)
