"""Differences of methods over the same scenes."""

from __future__ import annotations

from dataclasses import dataclass

from quantwm_core.errors import lookup
from quantwm_eval import summary
from quantwm_eval.estimate import Estimate, bootstrap
from quantwm_eval.metric import Quantity
from quantwm_eval.results import Results

FEWEST = 6
"""Scenes whose interval says anything: that of five misses the mean in one of six cases, see :func:`bootstrap`."""


@dataclass(frozen=True)
class Row:
    """A method's mean, and how far it is from another method's on the same scenes.

    Attributes:
        label: The method.
        found: Its mean over scenes.
        difference: Mean over scenes of its value minus the other's; no scene for the other method itself.
    """

    label: str
    found: Estimate
    difference: Estimate


def opponent(results: Results, wanted: str | None) -> str | None:
    """The method to compare with: the one asked for, else the first that compresses if another one does; or None.

    Raises:
        UnknownNameError: The experiment has no such method.
    """
    labels = [method.label for method in results.experiment.methods]
    if wanted is not None:
        return lookup("method of these results", wanted, labels)
    return results.experiment.compressed[0] if len(results.experiment.compressed) > 1 else None


def difference(results: Results, kind: str, method: str, against: str, quantity: str) -> Estimate:
    """Mean difference over the scenes that both have, with the bootstrap interval of the differences."""
    ours, theirs = (summary.by_scene(results.cells, kind, label, quantity) for label in (method, against))
    return bootstrap([ours[scene] - theirs[scene] for scene in ours if scene in theirs])


def rows(results: Results, quantity: Quantity, kind: str, against: str | None) -> list[Row]:
    """All methods on one quantity."""
    return [
        Row(
            label,
            summary.estimate(results, kind, label, quantity.name),
            bootstrap([])
            if against in (None, label)
            else difference(results, kind, label, str(against), quantity.name),
        )
        for label in (method.label for method in results.experiment.methods)
    ]


def certain(found: Estimate) -> bool:
    """Whether the interval of a difference of at least :data:`FEWEST` scenes leaves zero out.

    >>> six = [1.0, 2.0, 1.5, 1.0, 2.0, 1.5]
    >>> certain(bootstrap(six)), certain(bootstrap(six[:5])), certain(bootstrap([*six, -20.0]))
    (True, False, False)
    """
    return found.n >= FEWEST and (found.low > 0 or found.high < 0)
