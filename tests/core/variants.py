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
    "klt": [
        {},
        {"bits": 1.25, "damp": 2.0, "lifetime": 0.0},
        {"bits": 3.0, "value_bits": 1.5, "allocation": "layer"},
        {"tolerance": 0.05, "lifetime": 1000.0},
        {"level": 0.01},
    ],
    "kvtc": [{}, {"bits": 2.5, "lifetime": 0.0}],
    "oscar": [{}, {"group_size": 12}],
    "quantwm": [
        {},
        {"rank": 0, "candidates": 1},
        {"rank": 0, "metric": "uniform", "candidates": 2},
        {"metric": "full", "rank": 3, "centroids": 5, "candidates": 256, "group_size": 16, "relaxation": 1.75},
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
    def shares(self) -> bool:
        """Whether a unit may be coded in the basis of the one before."""
        return self.name in ("klt", "kvtc", "oscar")

    @property
    def sized_by_content(self) -> bool:
        """Whether the formula states the largest size, because the content decides how many directions are stored."""
        return self.name in ("klt", "kvtc")

    @property
    def alone(self) -> bool:
        """Whether a stream does not depend on the others."""
        return self.parameters.get("allocation") != "layer"

    @property
    def constants(self) -> float:
        """Relative error that a constant unit may have."""
        # Without clusters a constant is the end of a range from zero, which the scale's rounding moves; a rotation makes
        # of it what is no constant.
        return {"rtn": 0.07, "oscar": 2.0}.get(self.name, 2.0**-8)

    @property
    def sparse(self) -> bool:
        """Whether the stored size depends on the content."""
        return bool(self.parameters.get("threshold"))

    @property
    def absolute(self) -> bool:
        """Whether a setting is in units of logits."""
        return self.sparse or bool(self.parameters.get("level"))

    @property
    def scales(self) -> bool:
        """Whether powers of two scale through: QVG's scale saturates, and some settings are in units of logits."""
        symmetric = self.name == "qvg" and self.parameters.get("quantizer") != "affine"
        return not symmetric and not self.absolute


def every() -> Iterator[Variant]:
    """All variants, by name."""
    for name, choices in PARAMETERS.items():
        for parameters in choices:
            yield Variant(name, parameters)
