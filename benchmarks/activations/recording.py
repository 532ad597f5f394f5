"""What one layer's attention saw of one input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantwm_core.archive import Dump
from quantwm_core.rotary import Turning
from quantwm_kernels.bridge import to_numpy


@dataclass(frozen=True)
class Recording:
    """Queries, keys and values ``[1, H, T, D]`` of one layer, in the frame in which logits are taken.

    Attributes:
        model: Short name of the model.
        source: Which input: a window of text or speech, a scene.
        layer: Number of the layer.
        queries, keys, values: Any floating-point format.
        turning: How positions turn queries, where they do.
    """

    model: str
    source: str
    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    turning: Turning | None = None

    @property
    def dump(self) -> Dump:
        """The same as the cache takes it, BF16."""
        keys, values, queries = (to_numpy(part.bfloat16()) for part in (self.keys, self.values, self.queries))
        return Dump(keys, values, queries)


def heads_of(hidden: Tensor, heads: int) -> Tensor:
    """``[T, H * D]`` as ``[1, H, T, D]``."""
    return hidden.unflatten(-1, (heads, -1)).transpose(0, 1)[None]
