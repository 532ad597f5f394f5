"""Several processes that share heads, tokens and weights: each seals its own, and nothing more is exchanged."""

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantwm_core.method import scheme
from tests.models import ranks
from tests.models.chunks import bits

GPUS = 1 << max(0, torch.cuda.device_count().bit_length() - 1)


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    different = [name for name in expected if bits(ours[name]) != bits(expected[name].cpu())]
    assert not different


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What all ranks hold, heads behind one another."""
    axes = {name: 0 if "coefficients" in name else 1 for name in parts[0]}  # those lie stream behind stream
    return {name: torch.cat([part[name] for part in parts], dim=axis) for name, axis in axes.items()}


def test_ratios_of_shares_are_the_formulas() -> None:
    plan, page = scheme("quantwm"), Path(__file__).parents[2] / "docs" / "ranks.md"
    rows = re.findall(r"^\| (\d) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page.read_text(), re.MULTILINE)

    def ratio(heads: int, tokens: int) -> str:
        shape = (1, heads, tokens, 128)
        stored = plan.keys.nbytes("keys", shape, False) + plan.values.nbytes("values", shape, False)
        return f"{4 * math.prod(shape) / stored:.2f}"

    assert rows == [
        (str(count), str(29640 // count), ratio(32, 29640 // count), ratio(32 // count, 29640))
        for count in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize(
    ("count", "device", "tokens"),
    [
        pytest.param(2, "cpu", 48, id="gloo"),
        pytest.param(
            GPUS,
            "cuda",
            2048,
            id="nccl",
            marks=[pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")],
        ),
    ],
)
def test_ranks_seal_their_own_as_one_process_would_and_exchange_nothing_more(
    count: int, device: str, tokens: int, tmp_path: Path
) -> None:
    ranks.launch(ranks.share, count, device, tmp_path, tokens)
    whole = ranks.stream(ranks.OWN_HEADS * count, tokens, torch.device(device))
    alone = ranks.held(whole)
    assert not any("sparse" in name for name in alone)
    assert_same(joined([load_file(tmp_path / f"heads-{rank}") for rank in range(count)]), alone)
    for rank in range(count):
        own = ranks.held([[each.chunk(count, dim=2)[rank] for each in chunk] for chunk in whole])
        assert_same(load_file(tmp_path / f"tokens-{rank}"), own)
