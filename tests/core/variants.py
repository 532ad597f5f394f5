"""Every method in every form that stores or computes something else: what the contract tests loop over."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantwm_core import methods
from quantwm_core.method import PRESETS, Method

SHARP = {name: value for name, value in PRESETS["sharp"].items() if name != "chunks_per_seal"}
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "bf16": [{}],
    "kivi": [{}, {"group_size": 5, "residual_length": 0}],
    "quantwm": [
        {},
        {"rank": 0, "candidates": 1},
        {"rank": 0, "metric": "uniform", "candidates": 2},
        {"metric": "full", "rank": 3, "centroids": 5, "candidates": 256, "group_size": 16},
        {"metric": "uniform", "iterations": 0},
        {"threshold": 0.5, "warm_start": True},
        {"rounding": "feedback", "rank": 0, "metric": "uniform"},
        {"centroid_bits": 8, "scale_candidates": 4, "coefficient_bits": 4, "rank": 5, "warm_start": True},
        {**SHARP, "group_size": 16},  # fits every head dimension
    ],
    "qvg": [{}, {"quantizer": "affine", "centroids": 7}, {"stages": 3, "group_size": 16, "iterations": 2}],
    "rtn": [{}, {"granularity": "token"}, {"granularity": "channel", "group_size": 7}, {"group_size": 4}],
}


@dataclass(frozen=True)
class Variant:
    """A method with parameters; prints as ``qvg(stages=3)``."""

    name: str
    parameters: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.parameters.items())})"

    def make(self) -> Method:
        """The method."""
        return methods.get(self.name, **self.parameters)

    @property
    def sparse(self) -> bool:
        """Whether the stored size depends on the content."""
        return bool(self.parameters.get("threshold"))

    @property
    def scales(self) -> bool:
        """Whether powers of two scale through: QVG's scale saturates, and a threshold is in units of logits."""
        symmetric = self.name == "qvg" and self.parameters.get("quantizer") != "affine"
        return not symmetric and not self.sparse


def every() -> Iterator[Variant]:
    """All variants, by name."""
    for name, choices in PARAMETERS.items():
        for parameters in choices:
            yield Variant(name, parameters)
