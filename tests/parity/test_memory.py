"""Memory that sealing and reading need beside their input, on a GPU: no more than the formula of the sealing module says."""

from collections.abc import Callable

import pytest
import torch

from quantwm_core.codebook import default_size
from quantwm_core.method import scheme
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.launch import LAUNCHES, ceil_div, processors
from quantwm_kernels.methods import begin_chunk
from quantwm_kernels.reading import Piece, ReadPlan
from quantwm_kernels.statistics import QueryMoment, second_moment

RANK, CANDIDATES = 8, 4
OVER = 1.03


def peak_nbytes(call: Callable[[], object]) -> int:
    """Bytes that a call has allocated at most beside what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def workspace_nbytes(heads: int, tokens: int, channels: int, device: torch.device) -> int:
    """Formula of :mod:`quantwm_kernels.triton.sealing`: the larger of what k-means and what comes after it needs."""
    streams, rows = 2 * heads, default_size(tokens)
    tables = 8 * streams * rows * channels
    launch = LAUNCHES["sum_members" if channels <= 128 else "sum_members_wide"]
    blocks = ceil_div(rows, launch.blocks["BLOCK_C"]) * ceil_div(channels, launch.blocks["BLOCK_K"])
    programs = launch.programs * processors(device) // (streams * blocks)
    pieces = max(1, min(ceil_div(tokens, launch.blocks["TILE"]), programs))
    rounds = 4 * streams * rows * (channels + 1) * pieces + streams * tokens
    peaks = ceil_div(tokens, LAUNCHES["encode_groups"].blocks["TILE"])
    after = streams * tokens * CANDIDATES + 2 * streams * RANK * (tokens + peaks)
    return tables + max(rounds, after)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "tokens", "channels"), [(12, 4680, 128), (32, 7800, 128), (24, 7040, 256)])
def test_sealing_needs_what_it_stores_and_the_workspace_of_a_layer(
    gpu: torch.device, heads: int, tokens: int, channels: int
) -> None:
    keys, values, queries = (torch.randn(1, heads, tokens, channels, device=gpu).bfloat16() for _ in range(3))
    moment: QueryMoment = second_moment(queries, heads)
    method = scheme("quantwm")

    def seal() -> SealedChunk:
        return begin_chunk(method, keys, values, moment).wait()

    seal()
    stored = seal().nbytes  # and what is compiled, recorded and kept between calls is there from now on
    peak = peak_nbytes(seal)
    allowed = stored + workspace_nbytes(heads, tokens, channels, gpu)
    assert stored <= peak <= OVER * allowed, f"{peak} for {allowed}, of which {stored} are stored"


@pytest.mark.gpu
def test_reading_needs_its_output_alone(gpu: torch.device) -> None:
    keys, values = (torch.randn(1, 12, 4680, 128, device=gpu).bfloat16() for _ in range(2))
    plan = ReadPlan([Piece(begin_chunk(scheme("quantwm"), keys, values).wait(), 0, 4680, 0)])
    plan.into(keys, values)
    assert peak_nbytes(lambda: plan.into(keys, values)) == 0
