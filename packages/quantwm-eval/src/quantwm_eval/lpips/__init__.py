"""LPIPS networks: AlexNet, whose weights are bundled, and VGG16 from a file of the user's.

Convolutions, ReLU and pooling up to the last layer that is tapped, and one linear layer on each tap. Where the bundled
weights come from and under which licences, says ``weights/NOTICE``; ``scripts/convert_lpips.py`` of the repository makes
such files.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantwm_core.errors import FormatError, lookup

FORMAT = "quantwm-lpips/1"
BUNDLED = "alexnet.safetensors"
# LPIPS's own normalisation of colours in [-1, 1].
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)


@dataclass(frozen=True)
class Convolution:
    """A layer: pooling before it, where there is any, and what it does; ReLU follows.

    Attributes:
        stride: Of the convolution.
        padding: Of the convolution.
        pool: Side of the maximum that is taken before it, every two pixels; 0 for none.
        tap: Whether LPIPS compares what comes out.
    """

    stride: int = 1
    padding: int = 1
    pool: int = 0
    tap: bool = True


NETWORKS: dict[str, tuple[Convolution, ...]] = {
    "alexnet": (
        Convolution(4, 2),
        Convolution(1, 2, pool=3),
        Convolution(pool=3),
        Convolution(),
        Convolution(),
    ),
    "vgg16": tuple(
        Convolution(pool=2 if layer == 0 and stage else 0, tap=layer == layers - 1)
        for stage, layers in enumerate((2, 2, 3, 3, 3))
        for layer in range(layers)
    ),
}
SMALLEST = {"alexnet": 31, "vgg16": 16}
"""Side of a frame below which a layer would have no pixel left."""


@dataclass(frozen=True)
class Network:
    """A backbone with LPIPS's linear layers.

    Attributes:
        name: ``"alexnet"`` or ``"vgg16"``.
        convolutions: Weight ``[out, in, height, width]`` and bias ``[out]`` of each layer, FP32.
        linear: Weight of each channel of each tap, FP32 ``[channels]``.
    """

    name: str
    convolutions: tuple[tuple[Tensor, Tensor], ...]
    linear: tuple[Tensor, ...]

    @property
    def smallest(self) -> int:
        """Least height and width of a frame."""
        return SMALLEST[self.name]

    def distances(
        self, video: UInt8[Tensor, "frames height width 3"], reference: UInt8[Tensor, "frames height width 3"]
    ) -> Float[Tensor, " frames"]:
        """LPIPS of each pair of frames, FP32."""
        total = torch.zeros(len(video))
        for index, pair in enumerate(zip(self._taps(video), self._taps(reference), strict=True)):
            ours, theirs = (tap / (tap.square().sum(1, keepdim=True).sqrt() + 1e-10) for tap in pair)
            total += torch.einsum("tchw,c->thw", (ours - theirs).square(), self.linear[index]).mean((1, 2))
        return total

    def _taps(self, frames: Tensor) -> list[Tensor]:
        x = (frames.movedim(-1, 1).float() / 127.5 - 1 - _colours(SHIFT)) / _colours(SCALE)
        taps = []
        for layer, (weight, bias) in zip(NETWORKS[self.name], self.convolutions, strict=True):
            if layer.pool:
                x = F.max_pool2d(x, layer.pool, 2)
            x = F.relu(F.conv2d(x, weight, bias, layer.stride, layer.padding))
            if layer.tap:
                taps.append(x)
        return taps


@functools.cache
def bundled() -> Network:
    """AlexNet with the bundled weights.

    >>> bundled().name
    'alexnet'
    """
    with resources.as_file(resources.files("quantwm_eval.lpips") / "weights" / BUNDLED) as path:
        return load(path)


@functools.cache
def load(path: Path) -> Network:
    """Read a file that ``scripts/convert_lpips.py`` wrote.

    Raises:
        FormatError: The file is another one, or lacks a tensor.
        OSError: It cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise FormatError(f"{path}: not LPIPS weights, its metadata names no format {FORMAT!r}")
            name = lookup("LPIPS network", metadata.get("network", ""), NETWORKS)
            taps = sum(layer.tap for layer in NETWORKS[name])
            convolutions = tuple(
                (
                    file.get_tensor(f"convolution.{index}.weight").float(),
                    file.get_tensor(f"convolution.{index}.bias").float(),
                )
                for index in range(len(NETWORKS[name]))
            )
            return Network(name, convolutions, tuple(file.get_tensor(f"linear.{i}").float() for i in range(taps)))
    except SafetensorError as error:
        raise FormatError(f"{path}: not LPIPS weights: {error}") from error


def _colours(numbers: tuple[float, float, float]) -> Tensor:
    return torch.tensor(numbers).view(1, 3, 1, 1)
