"""The peer: QVG as its authors published it, timed on the same tensors in the same process.

``pip install --no-deps quant-videogen==0.1.0 loguru termcolor`` brings it; without it, benchmarks say nothing of it.
Its residual is symmetric INT2 in blocks of 64 behind one stage of 256 centroids, which is what its paper calls QVG.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

CENTROIDS, GROUP, BITS = 256, 64, 2


def available() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("quant_videogen") is not None


def sealer(keys: Tensor, values: Tensor, iterations: int) -> Callable[[], list[dict[str, Any]]]:
    """A call that seals BF16 ``[B, H, N, D]`` keys and values of a layer."""
    from quant_videogen.functions import triton_prq_quantize_tensor  # type: ignore[import-not-found]  # noqa: PLC0415

    quantize = partial(
        triton_prq_quantize_tensor,
        num_stages=1,
        num_clusters=CENTROIDS,
        block_size=GROUP,
        max_iters=iterations,
        quantize_fn=lambda _: BITS,
    )
    return lambda: [quantize(keys), quantize(values)]


def reader(sealed: list[dict[str, Any]]) -> Callable[[], list[Tensor]]:
    """A call that reconstructs what :func:`sealer` sealed, once."""
    from quant_videogen.functions import triton_prq_dequantize_tensor  # noqa: PLC0415

    return lambda: [triton_prq_dequantize_tensor(state, GROUP, BITS) for state in sealed]
