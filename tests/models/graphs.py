"""What a compiler makes of a host's modules."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def compiled(modules: Iterable[nn.Module]) -> Iterator[list[str]]:
    """Compile modules to graphs that run as they were traced; the graphs' code is listed as they are made."""
    graphs: list[str] = []

    def record(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    torch._dynamo.reset()
    for module in modules:
        module.compile(backend=record)
    try:
        yield graphs
    finally:
        torch._dynamo.reset()
