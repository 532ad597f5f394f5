"""Heads that several ranks share: each seals, bit for bit, what one device makes of its heads among all of them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.method import scheme
from quantwm_kernels.bridge import to_numpy
from quantwm_kernels.launch import LAUNCHES, one_of, ranks
from quantwm_kernels.sealing import Asked
from quantwm_kernels.statistics import QueryMoment
from tests.core.compare import assert_bits

sealing = pytest.importorskip("quantwm_kernels.triton.sealing", exc_type=ImportError)
layer = pytest.importorskip("quantwm_kernels.triton.layer", exc_type=ImportError)
statistics = pytest.importorskip("quantwm_kernels.triton.statistics", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

HEADS, TOKENS, CHANNELS = 2, 96, 16


@pytest.fixture
def few(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device with so few processors that the pieces of a sum depend on how many streams there are."""
    for module in (layer, statistics):
        monkeypatch.setattr(
            module, "processors", lambda _: 2 * HEADS
        )  # as many as there are streams of keys and values
    return device


def normal(seed: int) -> Tensor:
    """BF16 ``[1, HEADS, TOKENS, CHANNELS]``."""
    return torch.randn(1, HEADS, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed)).bfloat16()


def sealed(heads: slice, device: torch.device, method: str) -> dict[str, Tensor]:
    """All arrays of keys and values of some of the heads, and the moment of their queries."""
    keys, values, queries = (normal(seed)[:, heads].to(device) for seed in range(3))
    chosen = scheme(method, iterations=1, centroids=4)
    moment: QueryMoment = statistics.second_moment(queries, keys.shape[1])
    jobs = [Asked(chosen.keys, "keys", keys, "keys"), Asked(chosen.values, "values", values, "values")]
    arrays: dict[str, Tensor] = {"moment": moment.mean}
    for kind, tensor in zip(("keys", "values"), sealing.seal(jobs, moment).wait(), strict=True):
        arrays |= {f"{kind} {name}": array for name, array in tensor.arrays.items()}
    return arrays


def joined(parts: Sequence[Tensor], whole: Tensor) -> Tensor:
    """What the ranks have, along the axis of their heads."""
    axis = next(axis for axis, size in enumerate(whole.shape) if parts[0].shape[axis] != size)
    return torch.cat(list(parts), dim=axis)


@pytest.mark.parametrize("method", ["quantwm", "qvg"])
def test_ranks_seal_what_one_device_makes_of_all_heads(few: torch.device, method: str) -> None:
    whole = sealed(slice(0, HEADS), few, method)
    with one_of(HEADS):
        ours = [sealed(slice(head, head + 1), few, method) for head in range(HEADS)]
    assert "keys sparse_values" not in whole  # streams follow one another in every array
    for name, array in whole.items():
        assert_bits(name, to_numpy(joined([each[name] for each in ours], array).cpu()), to_numpy(array.cpu()))


def test_pieces_are_those_of_all_ranks_together(few: torch.device) -> None:
    parts: list[Any] = []
    for heads, among in ((HEADS, nullcontext()), (HEADS // 2, one_of(2)), (HEADS // 2, nullcontext())):
        with among:
            tensors = layer.Layer.of(*torch.zeros(2, 1, heads, TOKENS, CHANNELS, device=few))
            parts.append(tensors.split(LAUNCHES["sum_members"], tensors.streams * ranks()))
    assert parts[0] == parts[1] != parts[2]
    assert ranks() == 1
