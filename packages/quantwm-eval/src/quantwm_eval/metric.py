"""What a metric is: named figures, computed from the evidence that one generated video leaves behind.

A metric is one file in ``metrics/`` that binds ``METRIC``. It states which parts of the evidence it needs; whoever holds
two videos and nothing else gets the metrics that need nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from quantwm_eval.evidence import Curve, Evidence, Frames, Map
from quantwm_eval.tally import Tally

LACKING = {
    "reference": "no reference video",
    "look_away": "no look-away test",
    "recording": "no query was sampled",
    "cache": "no cache was followed",
    "seconds": "no time was taken",
    "truth": "no true video",
    "peak_bytes": "no GPU",
}
"""Why a metric says nothing where a part of the evidence is not at hand, in words."""

BLANK = {"recording": "nothing sealed was read", "cache": "nothing was sealed", "reference": "no two frames to compare"}
"""Why it found nothing where the part is at hand."""


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
        curves: Over frames or reads, by quantity name; what lies along it where a quantity has another axis, its metric
            says.
        maps: Over layers and heads, by quantity name.
        ages: Over ages of the token that was read, in chunks, by quantity name.
        positions: Over positions of the token that was read, in chunks from the beginning, by quantity name.
    """

    values: Mapping[str, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    maps: Mapping[str, Map] = field(default_factory=dict)
    ages: Mapping[str, Curve] = field(default_factory=dict)
    positions: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Walk:
    """How a metric of pictures walks along a pair of videos, so that long ones need not be held whole.

    Attributes:
        curve: Video and reference to one number per frame (or pair of consecutive frames); a metric that needs no
            reference is given the video twice. The curve of a video is the joined curves of its parts.
        overlap: Frames that consecutive parts share: 0 where the numbers belong to frames, 1 where to pairs of frames.
        conclude: Whole curve to figures.
    """

    curve: Callable[[Frames, Frames], Curve]
    overlap: int
    conclude: Callable[[Curve], Measurement]


@dataclass(frozen=True)
class Metric:
    """A member of ``quantwm_eval.metrics``.

    Attributes:
        name: Its public name, which is the name of its file.
        quantities: What it reports, most important first.
        needs: Parts of the evidence without which it says nothing.
        measure: Evidence to measurement.
        walk: The same for videos that come in parts; None where the metric wants whole ones, or more than pictures.
        module: Optional module without which it measures nothing, or None.
        variable: Environment variable that must name a file for it to measure anything, or None.
    """

    name: str
    quantities: tuple[Quantity, ...]
    needs: tuple[str, ...]
    measure: Callable[[Evidence], Measurement]
    walk: Walk | None = None
    module: str | None = None
    variable: str | None = None

    @property
    def lacks(self) -> str:
        """What must be there first, in words; empty where nothing is missing."""
        if self.module is not None and find_spec(self.module) is None:
            return f"the module {self.module}"
        if self.variable is not None and self.variable not in os.environ:
            return f"the environment variable {self.variable}"
        return ""

    @property
    def installed(self) -> bool:
        """Whether what it needs beside evidence is there."""
        return not self.lacks

    @property
    def lacking(self) -> str:
        """Why it says nothing where the evidence is not at hand, in words."""
        return ", ".join(LACKING.get(part, f"no {part}") for part in self.needs)

    @property
    def blank(self) -> str:
        """Why its figures are NaN, where they are, in words."""
        return next((BLANK[part] for part in self.needs if part in BLANK), "nothing to measure")

    @property
    def pictorial(self) -> bool:
        """Whether two videos are all that it needs."""
        return set(self.needs) <= {"reference"}

    def applies(self, evidence: Evidence) -> bool:
        """Whether everything that the metric needs is at hand."""
        return self.installed and all(getattr(evidence, part) is not None for part in self.needs)


def of_tallies(tallies: Mapping[str, Tally]) -> Measurement:
    """Figures of tallies by quantity name: over all, by read, by layer and head, and by token where they split."""
    split = {name: tally for name, tally in tallies.items() if tally.whole_by_age.size}
    return Measurement(
        {name: tally.ratio() for name, tally in tallies.items()},
        {name: tally.over_reads() for name, tally in tallies.items()},
        {name: tally.over_heads() for name, tally in tallies.items()},
        {name: tally.over_ages() for name, tally in split.items()},
        {name: tally.over_positions() for name, tally in split.items()},
    )


def walking(
    name: str,
    quantities: tuple[Quantity, ...],
    needs: tuple[str, ...],
    walk: Walk,
    module: str | None = None,
    variable: str | None = None,
) -> Metric:
    """A metric of pictures, from its walk.

    Args:
        name: Public name.
        quantities: What it reports.
        needs: ``("reference",)``, or nothing.
        walk: How it measures.
        module: Optional module that it needs.
        variable: Environment variable that it needs.
    """

    def measure(evidence: Evidence) -> Measurement:
        reference = evidence.need("reference") if needs else evidence.video
        return walk.conclude(walk.curve(evidence.video, reference))

    return Metric(name, quantities, needs, measure, walk, module, variable)


def mean_of_frames(name: str) -> Callable[[Curve], Measurement]:
    """Conclusion of a walk whose figure is the mean of its curve."""
    return lambda curve: Measurement({name: float(curve.mean())}, {name: curve})
