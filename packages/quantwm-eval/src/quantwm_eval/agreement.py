"""What a run measured beside what the paper states, and the difference.

The paper's models are not the demo world: where the hosts differ, signs and orders can be compared, sizes cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantwm_eval import named, paired, paper, summary
from quantwm_eval.estimate import Estimate, bootstrap
from quantwm_eval.metric import Quantity
from quantwm_eval.paper import Target
from quantwm_eval.results import Results

IMPROVED_ON = "qvg"
"""What the paper's improvements are over."""


@dataclass(frozen=True)
class Line:
    """A figure of the paper and its counterpart.

    Attributes:
        target: The paper's.
        what: What it is of, in words.
        quantity: How to show it.
        stated: Its value, of the improvement where the line is of one.
        measured: The counterpart over the run's scenes; no scene where there is none.
    """

    target: Target
    what: str
    quantity: Quantity
    stated: float
    measured: Estimate

    @property
    def difference(self) -> float:
        """Measured minus stated, NaN where nothing was measured."""
        return self.measured.mean - self.stated if self.measured.n else math.nan


HEADS = ("paper", "figure", "stated", "measured", "95 % interval", "n", "difference")


def title(results: Results) -> str:
    """What a table of :func:`rows` shows."""
    model = results.experiment.model
    return f"What the paper states, and what was measured on {model}"


def rows(results: Results) -> list[tuple[str, ...]]:
    """:func:`lines` as text, in the order of ``HEADS``."""
    return [_row(line) for line in lines(results)]


def lines(results: Results) -> list[Line]:
    """Every figure of the paper that belongs to a bundled experiment and that its run says something about.

    Empty for experiments of other names. A host that the paper measured is held against its own figures only.
    """
    experiment = results.experiment
    if experiment.name not in named.names():
        return []
    sources = named.get(experiment.name).sources
    targets = [target for target in paper.bundled() if target.source in sources]
    own = [target for target in targets if target.model == experiment.model]
    found = [line for target in own or targets for line in _lines(results, target)]
    return [line for line in found if line.measured.n]


def _lines(results: Results, target: Target) -> list[Line]:
    """The figure itself, and where the paper improves on something, the improvement."""
    kind = results.experiment.kinds[0]
    quantity = paper.quantities()[target.quantity]
    of = ", ".join(part for part in (target.model, target.setting) if part) or "over several models"
    what = f"{quantity.label} of {target.method} ({of})"
    measure = DERIVED.get(target.quantity, _plain)
    found = [Line(target, what, quantity, target.value, measure(results, kind, target))]
    if target.improved_on is not None:
        gain = paired.difference(results, kind, target.method, IMPROVED_ON, target.quantity)
        words = f"{quantity.label}, {target.method} minus {IMPROVED_ON} ({of})"
        found.append(Line(target, words, quantity, target.value - target.improved_on, gain))
    return found


def _row(line: Line) -> tuple[str, ...]:
    shown = summary.entry(line.quantity, line.measured, best=False)
    above = "> " if line.target.relation == "above" else ""
    stated, difference = summary.number(line.quantity, line.stated), summary.signed(line.quantity, line.difference)
    count = str(line.measured.n)
    return line.target.source, line.what, above + stated, shown.text, shown.interval, count, difference


def _plain(results: Results, kind: str, target: Target) -> Estimate:
    return summary.estimate(results, kind, target.method, target.quantity)


def _shift_reduction(results: Results, kind: str, _target: Target) -> Estimate:
    return paired.difference(results, kind, IMPROVED_ON, "quantwm", "selection_shift")


def _latency_increase(results: Results, kind: str, target: Target) -> Estimate:
    ours, plain = (summary.by_scene(results.cells, kind, label, "seconds") for label in (target.method, "bf16"))
    return bootstrap([ours[scene] / plain[scene] - 1 for scene in ours if scene in plain])


def _rank_increment(results: Results, kind: str, _target: Target) -> Estimate:
    return paired.difference(results, kind, "quantwm:rank=16", "quantwm:rank=8", "bits_per_element")


def _query_energy(results: Results, kind: str, _target: Target) -> Estimate:
    return summary.estimate(results, kind, "bf16", "query_energy")


DERIVED: Mapping[str, Callable[[Results, str, Target], Estimate]] = {
    "selection_shift_reduction": _shift_reduction,
    "latency_increase": _latency_increase,
    "bits_per_element_increase": _rank_increment,
    "query_energy": _query_energy,
}
"""Figures of the paper that are no method's own."""
