"""How many threads a process computes with."""

import torch
from threadpoolctl import threadpool_limits


def limit_threads(threads: int) -> None:
    """Let PyTorch, and the linear algebra of NumPy and SciPy, compute with so many threads from here on."""
    torch.set_num_threads(threads)
    threadpool_limits(threads)
