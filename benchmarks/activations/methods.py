"""Labels that are measured on each model: baselines, the paper's method, each option alone, and the preset without each.

The rank follows the head dimension: D / 16 directions for the paper's method, D / 8 for ``sharp``, as at D = 128.
"""

from __future__ import annotations

from quantwm_core import methods

BASELINES = ("rtn", "kivi:residual_length=0", "qvg", "qvg:quantizer=affine")
PAPER = "quantwm:rank={paper}"
SHARP = "quantwm:preset=sharp:rank={sharp}"
ALONE = (
    f"{PAPER}:metric=uniform:candidates=1",
    f"{PAPER}:scale_candidates=3",
    f"{PAPER}:rounding=feedback",
    f"{PAPER}:group_size=32",
    "quantwm:rank={sharp}:coefficient_bits=4",
    f"{PAPER}:centroid_bits=8:centroids={{few}}",
    f"{PAPER}:centroid_bits=4:centroids={{few}}",
    f"{PAPER}:warm_start=True",
)
ROUNDS = (
    f"{PAPER}:iterations=5",
    f"{PAPER}:iterations=5:relaxation=1.5",
    f"{SHARP}:iterations=5",
    f"{SHARP}:iterations=5:relaxation=1.5",
)
"""Half of the rounds of k-means, and half that go farther."""

WITHOUT = (
    f"{SHARP}:metric=diagonal:candidates=4",
    f"{SHARP}:scale_candidates=1",
    f"{SHARP}:rounding=nearest",
    f"{SHARP}:group_size=64",
    "quantwm:preset=sharp:rank={paper}:coefficient_bits=8",
    f"{SHARP}:centroid_bits=16:centroids={{few}}",
    f"{SHARP}:centroid_bits=8",
    f"{SHARP}:warm_start=True",
)
SMALLER = (
    f"{SHARP}:centroids={{few}}",
    "quantwm:preset=sharp:rank={paper}",
    "quantwm:preset=sharp:rank={paper}:centroids={few}",
)
SIZES = {
    "room": {"paper": 8, "sharp": 16, "few": 32},
    "whisper": {"paper": 4, "sharp": 8, "few": 8},
    "minilm": {"paper": 2, "sharp": 4, "few": 8},
}
"""Directions of either, and the paper's centroids for units of that model."""

TRANSFORMS = ("oscar", "kvtc:bits=2", "kvtc:bits=3", *(f"klt:bits={bits}" for bits in (1.5, 2, 2.5, 3)))
"""The transform code and its relatives, where they are installed."""

BASES = (
    "klt:bits=1",
    "klt:bits=1:allocation=layer",
    "klt:bits=1:level=0.0045",
    "klt:bits=2:allocation=layer",
    "klt:bits=2:level=0.00045",
    "klt:bits=2:lifetime=0",
    "kvtc:bits=2:lifetime=0",
    "klt:bits=2:chunks_per_seal=1",
    "klt:bits=2:chunks_per_seal=1:lifetime=0",
    "klt:bits=2:chunks_per_seal=1:lifetime=1000",
)
"""How long a basis serves, in units of two chunks and of one."""

AHEAD = tuple(
    f"{method}:frames_ahead={frames}"
    for method, choices in (
        (PAPER, (12,)), (SHARP, (12,)), ("oscar", (12,)), ("klt:bits=1", (4, 12, 28)), ("klt:bits=1.5", (12,)), ("klt:bits=2", (12,)),
    )
    for frames in choices
)  # fmt: skip
"""Statistics turned to frames to come: the 12 that judge a unit, fewer and more. Only the demo world has a rotary embedding."""


LONG = tuple(
    f"{method}:chunks_per_seal=11"
    for method in (
        "quantwm:preset=paper", "oscar", "kvtc:bits=1.25", "klt:bits=1.25", "klt:bits=1.25:lifetime=0", "klt:bits=1.25:frames_ahead=28",
        "klt:bits=1.125:value_bits=1.5:allocation=layer:frames_ahead=28",
        "klt:value_bits=1.5:level=0.008:allocation=layer:frames_ahead=28",
    )
)  # fmt: skip
"""Units of eleven chunks: what does a basis cost there, and what is a total of a tenth worth?"""


def labels(model: str) -> tuple[str, ...]:
    """What is measured on a model: every ablation and every basis on the demo world, the preset's three main ablations elsewhere."""
    if model == "long":
        return LONG
    ablations = (*ALONE, *WITHOUT) if model == "room" else WITHOUT[:3]
    codes = (*TRANSFORMS, *BASES, *AHEAD) if model == "room" else TRANSFORMS
    transforms = tuple(label for label in codes if label.partition(":")[0] in methods.names())
    wanted = (*BASELINES, PAPER, SHARP, *SMALLER, *ablations, *ROUNDS, *transforms)
    return tuple(dict.fromkeys(label.format(**SIZES[model]) for label in wanted))
