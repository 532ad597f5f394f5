"""Learned perceptual distance from the BF16 video, by VGG16, whose weights are the user's."""

from __future__ import annotations

import os
from pathlib import Path

from quantwm_core.errors import FormatError, StateError
from quantwm_eval.evidence import Curve, Frames
from quantwm_eval.lpips import Network, load
from quantwm_eval.metric import Quantity, Walk, mean_of_frames, walking
from quantwm_eval.metrics.lpips import lpips

VARIABLE = "QUANTWM_LPIPS_VGG"


def network() -> Network:
    """VGG16 from the file that the environment variable ``QUANTWM_LPIPS_VGG`` names.

    Raises:
        StateError: The variable is not set, or names no file.
        FormatError: The file holds something else.
    """
    path = Path(os.environ.get(VARIABLE, ""))
    if not path.is_file():
        raise StateError(f"{VARIABLE}={path}: need the file that scripts/convert_lpips.py --network vgg16 writes")
    found = load(path)
    if found.name != "vgg16":
        raise FormatError(f"{path}: holds {found.name}, need vgg16")
    return found


def lpips_vgg(video: Frames, reference: Frames) -> Curve:
    """LPIPS of each frame by VGG16, as :func:`quantwm_eval.metrics.lpips.lpips` says.

    Range 0 to infinity, lower is better, no unit. Its weights (58 MB) are not bundled: the metric is there once the environment
    variable ``QUANTWM_LPIPS_VGG`` names a file of them. Source: as LPIPS.

    Args:
        video: uint8 ``[T, H, W, 3]``.
        reference: The same shape.

    Raises:
        DtypeError, ShapeError: The videos cannot be compared.
        StateError, FormatError: The weights are not there.
    """
    return lpips(video, reference, network())


METRIC = walking(
    "lpips_vgg",
    (Quantity("lpips_vgg", "LPIPS, VGG", "", "lower", digits=4),),
    ("reference",),
    Walk(lpips_vgg, 0, mean_of_frames("lpips_vgg")),
    variable=VARIABLE,
)
