"""The ways in which a layer attends: from its packed cache, or to what a read made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantwm_kernels.launch import packed_attention_pays
from quantwm_kernels.packed_attention import attend_packed
from quantwm_kernels.reading import ReadPlan
from quantwm_models.geometry import Geometry

AttentionPath = Literal["auto", "packed", "rotated", "decoded"]
"""How :meth:`quantwm_models.LayerCache.attend` attends: from the packed cache (in two ways), after reading it, or as is faster."""


def pays(queries: Tensor, known: Geometry) -> bool:
    """Whether attention of ``[B, Hq, T, D]`` from the packed cache is faster than after a read; it serves BF16 on a GPU.

    >>> pays(torch.ones(1, 2, 3, 64), Geometry(1, 2, 64, 64, torch.device("cpu")))
    False
    """
    if not queries.is_cuda or queries.dtype is not torch.bfloat16:
        return False
    rows = queries[0, :, :, 0].numel() // known.heads
    return packed_attention_pays(rows, max(known.key_channels, known.value_channels))


def attend_sealed(
    queries: Tensor, plan: ReadPlan, exact: Sequence[tuple[Tensor, Tensor]], known: Geometry, *, rotated: bool
) -> Tensor:
    """Attention to planned units, and to BF16 keys and values ``[B, H, n, D]``, in the queries' number format."""
    if not plan.pieces and not exact:  # an empty range, of which nothing else tells the sizes
        shapes = [(known.batch, known.heads, 0, count) for count in (known.key_channels, known.value_channels)]
        keys, values = (torch.empty(shape, dtype=torch.bfloat16, device=known.device) for shape in shapes)
        exact = [(keys, values)]
    return attend_packed(queries, plan, exact, rotated=rotated).output.to(queries.dtype)


def attend_decoded(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """PyTorch's attention to keys and values that were read, grouped where there are fewer heads of them.

    >>> attend_decoded(torch.ones(1, 4, 3, 8), torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 6)).shape
    torch.Size([1, 4, 3, 6])
    """
    grouped = queries.shape[1] != keys.shape[1]
    output: Tensor = scaled_dot_product_attention(
        queries, keys.to(queries.dtype), values.to(queries.dtype), enable_gqa=grouped
    )
    return output
