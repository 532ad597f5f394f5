"""Muon: momentum whose matrix is replaced by the nearest orthogonal one before it is applied.

For weight matrices inside transformer blocks; everything else goes to AdamW. Method: K. Jordan et al., "Muon: an
optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

# The quintic iteration of the paper: drives singular values from (0, 1] to about 1 in five rounds.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Singular vectors kept, singular values brought to about 1 (0.7 to 1.2), in BF16.

    Args:
        matrices: ``[count, rows, columns]``.
        rounds: Newton-Schulz iterations.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = (x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    a, b, c = _QUINTIC
    for _ in range(rounds):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.transpose(1, 2) if tall else x
    return result


class Muon:
    """Momentum with Nesterov's correction, orthogonalized, scaled by ``sqrt(max(1, rows / columns))``.

    Args:
        parameters: matrices ``[rows, columns]``; those with ``rows == 3 * columns`` are queries, keys and values
            stacked, and are orthogonalized one by one.
        momentum: decay of the momentum.
        weight_decay: times the learning rate, per step.
    """

    def __init__(self, parameters: Iterable[Parameter], momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.groups: dict[tuple[int, ...], list[Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[tuple(parameter.shape)].append(parameter)
        self.state = {shape: torch.zeros(len(g), *shape, device=g[0].device) for shape, g in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at a learning rate; gradients are left as they are."""
        for shape, group in self.groups.items():
            gradients = torch.stack([p.grad for p in group if p.grad is not None])
            state = self.state[shape]
            state.lerp_(gradients, 1 - self.momentum)
            update = gradients.lerp(state, self.momentum)
            if shape[0] == 3 * shape[1]:
                update = update.view(-1, shape[1], shape[1])
            direction = orthogonalize(update) * max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for parameter, change in zip(group, direction.reshape(-1, *shape), strict=True):
                parameter.mul_(1 - rate * self.weight_decay).add_(change, alpha=-rate)
