"""Attention to packed units on the CPU, and in graphs that torch compiles."""

import pytest
import torch

from quantwm_core import attention as core
from quantwm_core.method import scheme
from quantwm_kernels.attention_passes import shared
from quantwm_kernels.bridge import to_numpy
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.methods import seal_chunk
from quantwm_kernels.packed_attention import attend_packed
from quantwm_kernels.reading import Piece, ReadPlan
from tests.kernels.operators import normal

BF16 = torch.bfloat16


def unit(seed: int, tokens: int = 12, method: str = "rtn") -> SealedChunk:
    return seal_chunk(scheme(method), normal(1, 2, tokens, 8, seed=seed), normal(1, 2, tokens, 8, seed=seed + 1))


def test_it_is_attention_over_what_a_read_gives() -> None:
    plan = ReadPlan([Piece(unit(0), 2, 11, 0), Piece(unit(5, method="quantwm"), 0, 12, 9)])
    keys, values = (torch.empty(1, 2, 24, 8, dtype=BF16) for _ in range(2))
    plan.into(keys[:, :, :21], values[:, :, :21])
    active = normal(1, 2, 3, 8, seed=7, dtype=BF16), normal(1, 2, 3, 8, seed=8, dtype=BF16)
    keys[:, :, 21:], values[:, :, 21:] = active
    queries = normal(1, 4, 5, 8, seed=9, dtype=BF16)
    output, logarithm = attend_packed(queries, plan, [active])
    expected = core.attend(*map(to_numpy, (queries, keys, values)))
    assert torch.equal(output, torch.from_numpy(expected).to(BF16))
    scores = torch.from_numpy(core.logits(to_numpy(queries), to_numpy(keys)))
    assert torch.allclose(logarithm, scores.logsumexp(-1), atol=1e-6)


def test_a_scale_is_a_factor_of_the_logits() -> None:
    plan, queries = ReadPlan([Piece(unit(0), 0, 12, 0)]), normal(1, 2, 5, 8, dtype=BF16)
    assert torch.equal(attend_packed(queries, plan, scale=8**-0.5).output, attend_packed(queries, plan).output)
    doubled = attend_packed(2 * queries, plan, scale=0.1)
    assert torch.allclose(attend_packed(queries, plan, scale=0.2).log_sum_exp, doubled.log_sum_exp, atol=1e-6)


@pytest.mark.parametrize("token_major", [True, False])
def test_it_compiles_into_a_graph_without_a_break(token_major: bool) -> None:
    plan, other = (ReadPlan([Piece(unit(seed), 1, 12, 0), Piece(unit(seed + 2), 0, 7, 0)]) for seed in (0, 30))
    active = normal(1, 2, 3, 8, seed=7, dtype=BF16), normal(1, 2, 3, 8, seed=8, dtype=BF16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def doubled(queries: torch.Tensor, plan: ReadPlan) -> torch.Tensor:
        return attend_packed(queries, plan, [active]).output * 2

    queries = normal(1, 5, 4, 8, dtype=BF16).transpose(1, 2) if token_major else normal(1, 4, 5, 8, dtype=BF16)
    for each in (plan, other, plan):
        expected = attend_packed(queries, each, [active]).output * 2
        result = doubled(queries, each)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()


@pytest.mark.parametrize("lengths", [[], [0], [1], [40, 0, 3], [7, 8, 9, 100]])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_every_token_is_dealt_out_once_and_evenly(lengths: list[int], parts: int) -> None:
    shares = shared(lengths, parts, block=8)
    flat = [(item, token) for share in shares for item, first, stop in share for token in range(first, stop)]
    assert flat == [(item, token) for item, length in enumerate(lengths) for token in range(length)]
    tiles = [sum(-(-(stop - first) // 8) for _, first, stop in share) for share in shares]
    assert max(tiles) - min(tiles) <= 1
