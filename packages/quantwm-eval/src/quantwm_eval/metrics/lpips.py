"""Learned perceptual distance from the BF16 video, by AlexNet."""

from __future__ import annotations

import numpy as np
import torch

from quantwm_core.errors import ShapeError
from quantwm_eval.evidence import Curve, Frames, check_pair
from quantwm_eval.lpips import Network, bundled
from quantwm_eval.metric import Quantity, Walk, mean_of_frames, walking

BLOCK = 8
"""Frames that go through the network together."""


def lpips(video: Frames, reference: Frames, network: Network | None = None) -> Curve:
    """Learned perceptual image patch similarity of each frame; despite its name a distance.

    Frames, scaled to [-1, 1], go through the network; features of five layers are normalised over channels, and their
    squared differences weighted by LPIPS's linear layers (version 0.1), averaged over pixels and summed over layers. Range 0
    to infinity, most often below 1, lower is better, no unit; 0 for equal frames. Source: Zhang et al., The Unreasonable
    Effectiveness of Deep Features as a Perceptual Metric, 2018; the QuantWM paper, against the BF16 rollout. Weights are
    stored in FP16, which moves the figure by less than 0.001.

    Args:
        video: uint8 ``[T, H, W, 3]``.
        reference: The same shape.
        network: AlexNet with the bundled weights, unless another one is given.

    Returns:
        float64 ``[T]``.

    Raises:
        DtypeError: A video is not uint8.
        ShapeError: The videos differ in length or size, or are too small for the network.

    >>> frames = np.zeros((1, 32, 32, 3), np.uint8)
    >>> lpips(frames, frames)
    array([0.])
    """
    check_pair(video, reference)
    chosen = bundled() if network is None else network
    if min(video.shape[1:3]) < chosen.smallest:
        raise ShapeError(
            f"video: got frames of {video.shape[1]} x {video.shape[2]}, "
            f"LPIPS by {chosen.name} needs {chosen.smallest} x {chosen.smallest}"
        )
    ours, theirs = (torch.from_numpy(np.ascontiguousarray(frames)) for frames in (video, reference))
    with torch.inference_mode():
        blocks = [chosen.distances(*pair) for pair in zip(ours.split(BLOCK), theirs.split(BLOCK), strict=True)]
    return torch.cat(blocks).double().numpy()


METRIC = walking(
    "lpips",
    (Quantity("lpips", "LPIPS", "", "lower", digits=4),),
    ("reference",),
    Walk(lpips, 0, mean_of_frames("lpips")),
)
