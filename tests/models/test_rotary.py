"""Queries as keys see them that are rotated only on reads."""

import pytest
import torch

from quantwm_kernels.statistics import QueryMoment
from quantwm_models.rotary import before_rotation, turned

GENERATOR = torch.Generator().manual_seed(0)
ANGLES = torch.rand(29, 8, generator=GENERATOR) * 7


def matrix(angles: torch.Tensor) -> torch.Tensor:
    """Rotation of neighbouring channels, written out."""
    return torch.block_diag(*(torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]]) for a in angles))


def moment() -> QueryMoment:
    queries = torch.randn(2, 3, 50, 16, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 17)
    return QueryMoment(queries.mT @ queries / 50, 50)


def test_turning_is_the_rotation_and_turning_back_its_inverse() -> None:
    vectors = torch.randn(2, 3, 29, 16, generator=GENERATOR)
    expected = torch.stack([vectors[:, :, n] @ matrix(angles).T for n, angles in enumerate(ANGLES)], dim=2)
    assert torch.allclose(turned(vectors, ANGLES), expected, atol=1e-5)
    assert torch.allclose(turned(turned(vectors, ANGLES), -ANGLES), vectors, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 29])
def test_the_moment_is_the_mean_over_tokens(tokens: int) -> None:
    known = moment()
    rotations = [matrix(angles) for angles in ANGLES[:tokens]]
    expected = torch.stack([rotation.T @ known.mean @ rotation for rotation in rotations]).mean(0)
    got = before_rotation(known, ANGLES[:tokens])
    assert got.queries == known.queries
    assert torch.allclose(got.mean, expected, atol=1e-5 * float(known.mean.abs().max()))


def test_it_weighs_an_error_as_the_logits_do() -> None:
    known, error = moment(), torch.randn(16, generator=GENERATOR)
    logits = torch.stack([(matrix(angles) @ error) @ known.mean @ (matrix(angles) @ error) for angles in ANGLES])
    weighed = error @ before_rotation(known, ANGLES).mean @ error
    assert torch.allclose(logits.mean(0), weighed, rtol=1e-4)


def test_nothing_is_turned_by_nothing() -> None:
    known = moment()
    assert torch.allclose(before_rotation(known, torch.zeros(4, 8)).mean, known.mean)
