"""What the paper states, to be held against what is measured; the figures stand in ``paper-targets.toml``."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from quantwm_core import methods
from quantwm_core.errors import FormatError, QuantWMError, lookup
from quantwm_eval import metrics
from quantwm_eval.metric import Quantity

OTHERS = (
    Quantity("bits_per_element_increase", "Bits per element that are added", "bits", "lower", digits=4),
    Quantity("cache_gib", "Sealed cache", "GiB", "lower", digits=3),
    Quantity("latency_increase", "Time above BF16", "share", "lower", -1.0, digits=2),
    Quantity("selection_shift_reduction", "Reduction of selection shift", "share", "higher", -1.0, 1.0, 2),
    Quantity("vbench", "VBench, mean over the reported dimensions", "", "higher", 0.0, 1.0, 4),
)
"""Quantities that the paper states and that no metric of this package reports under that name."""
RELATIONS = ("equal", "above")


@dataclass(frozen=True)
class Target:
    """One figure of the paper.

    Attributes:
        source: Table, figure or section.
        quantity: Name of a metric's quantity, or one of ``OTHERS``.
        method: Whose figure it is.
        value: As printed; percentages as shares.
        model: Host, empty where the figure is over several.
        setting: What tells it from the model's other figures.
        relation: ``"equal"`` or ``"above"``.
        improved_on: What the paper improves on, None where it names nothing.
    """

    source: str
    quantity: str
    method: str
    value: float
    model: str = ""
    setting: str = ""
    relation: str = "equal"
    improved_on: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a figure is of; no two targets share it."""
        return self.model, self.setting, self.quantity, self.method

    def difference(self, measured: float) -> float:
        """Measured minus stated.

        >>> Target("Table 9", "bits_per_element_increase", "quantwm", 0.25).difference(0.5)
        0.25
        """
        return measured - self.value


def quantities() -> dict[str, Quantity]:
    """Everything that a target can be of: what metrics report, and ``OTHERS``."""
    known = [quantity for metric in metrics.loaded().values() for quantity in metric.quantities]
    return {quantity.name: quantity for quantity in (*known, *OTHERS)}


@functools.cache
def bundled() -> tuple[Target, ...]:
    """The targets that come with the package.

    >>> any(target.source == "Table 4" for target in bundled())
    True
    """
    with resources.as_file(resources.files("quantwm_eval") / "paper-targets.toml") as path:
        return load(path)


def load(path: Path) -> tuple[Target, ...]:
    """Read the targets.

    Raises:
        FormatError: The file is not TOML, or a target is incomplete, of an unknown name, or there twice; the message says
            which.
        OSError: It cannot be read.
    """
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: not TOML: {error}") from error
    listed = plain.get("target")
    if set(plain) != {"target"} or not isinstance(listed, list):
        raise FormatError(f"{path}: need a list of [[target]] and nothing else, got {', '.join(plain) or 'nothing'}")
    found: dict[tuple[str, str, str, str], Target] = {}
    for number, entry in enumerate(listed, 1):
        try:
            target = _target(entry)
        except QuantWMError as error:
            raise FormatError(f"{path}: target {number}: {error}") from error
        if target.key in found:
            raise FormatError(f"{path}: target {number} states {' '.join(target.key)} a second time")
        found[target.key] = target
    return tuple(found.values())


def _target(entry: dict[str, Any]) -> Target:
    given = {"improved_on" if key == "from" else key: value for key, value in entry.items()}
    for key in given:
        lookup("key", key, [field.name for field in fields(Target)])
    lacking = [field.name for field in fields(Target) if field.default is MISSING and field.name not in given]
    if lacking:
        raise FormatError(f"names no {' and no '.join(lacking)}")
    for key in ("value", "improved_on"):
        if key in given and (isinstance(given[key], bool) or not isinstance(given[key], (int, float))):
            raise FormatError(f"{key} = {given[key]!r}: need a number")
    lookup("quantity", given["quantity"], list(quantities()))
    lookup("method", given["method"], methods.names())
    lookup("relation", given.get("relation", RELATIONS[0]), RELATIONS)
    return Target(**given)
