"""Attention from the packed cache against reading the cache and torch's attention: ratio of times, peak memory.

    python -m benchmarks.attention                    all shapes and query counts, parity first
    python -m benchmarks.attention --shape longcat --queries 1024
    python -m benchmarks.attention --sweep            other launch parameters too; the best of each shape last

A sealed unit of random bytes, as in ``benchmarks/decode.py``, and an active chunk of as many plain tokens as there are
queries, at most 4680. A ratio above 1 says that the packed cache is faster. Peak memory counts what a call allocates beside
its input: the workspace of a read, or what attention from the packed cache needs instead. A line of JSON per
measurement goes to ``benchmarks/results/attention.jsonl``.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import decode, needs
from quantwm_kernels.launch import LAUNCHES, Launch
from quantwm_kernels.packed_attention import WIDE_CHANNELS, attend_packed, checked_sizes, run
from quantwm_kernels.reading import Piece, ReadPlan

QUERIES = (64, 256, 1024, 4680, 8192)
RESULTS = decode.RESULTS.with_name("attention.jsonl")
MOST_ACTIVE = 4680
REPEATS = 5


class Subject:
    """A sealed unit, an active chunk and queries of a shape."""

    def __init__(self, shape: tuple[int, int, int], queries: int, device: torch.device) -> None:
        tokens, heads, channels = shape
        generator = torch.Generator(device).manual_seed(0)

        def normal(count: int) -> Tensor:
            drawn = torch.randn((1, count, heads, channels), device=device, generator=generator)
            return drawn.bfloat16().transpose(1, 2)

        self.chunk = decode.random_chunk("quantwm", shape, 0, device)
        self.plan = ReadPlan([Piece(self.chunk, 0, tokens, 0)])
        self.queries = normal(queries)
        self.active = (normal(min(queries, MOST_ACTIVE)), normal(min(queries, MOST_ACTIVE)))
        self.tokens = tokens + self.active[0].shape[2]
        self.workspace: tuple[Tensor, Tensor] | None = None

    def decoded(self) -> Tensor:
        """Read into a workspace and attend to it, as a cache does."""
        _, heads, _, channels = self.queries.shape
        if self.workspace is None:
            size = (1, heads, self.tokens, channels)
            self.workspace = (self.queries.new_empty(size), self.queries.new_empty(size))
        sealed = self.chunk.tokens
        self.plan.into(*self.workspace)
        for out, plain in zip(self.workspace, self.active, strict=True):
            out[:, :, sealed:].copy_(plain)
        return scaled_dot_product_attention(self.queries, *self.workspace)

    def packed(self, launch: Launch | None = None) -> Tensor:
        """Attend to the packed cache."""
        if launch is None:
            return attend_packed(self.queries, self.plan, [self.active]).output
        sizes = checked_sizes(self.queries, self.plan, [self.active])
        return run(self.queries, self.plan, [self.active], sizes, self.queries.shape[3] ** -0.5, launch).output

    def check_parity(self, launch: Launch | None = None) -> None:
        """Hold a few queries of two heads against FP32 attention over what is read, which has its own parity.

        Raises:
            AssertionError: A number lies farther off than BF16 explains.
        """
        self.decoded()
        assert self.workspace is not None
        heads, rows = [0, self.queries.shape[1] - 1], slice(None, None, max(1, self.queries.shape[2] // 64))
        keys, values = (each[:, heads].float() for each in self.workspace)
        weights = (self.queries[:, heads, rows].float() @ keys.transpose(2, 3) * keys.shape[3] ** -0.5).softmax(-1)
        off = (self.packed(launch)[:, heads, rows].float() - weights @ values).abs()
        assert (off <= 2.0**-7 * (weights @ values.abs()) + 1e-6).all(), f"off by {off.max()}"


def peak_nbytes(call: Callable[[], object]) -> int:
    """Bytes that a call allocates at most beside what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def seconds(call: Callable[[], object]) -> float:
    """Median device time of a call."""
    call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[REPEATS // 2]


def launches(channels: int) -> Iterator[Launch]:
    """Launch parameters worth a try."""
    shapes = ((64, 16, 4), (64, 32, 4), (64, 64, 8), (64, 32, 8), (64, 16, 8), (128, 32, 8), (128, 64, 8))
    name = "attend_wide" if channels > WIDE_CHANNELS else "attend"
    for (rows, tokens, warps), stages in itertools.product(shapes, (1, 2)):
        blocks = {"BLOCK_QUERIES": rows, "BLOCK_TOKENS": tokens}
        yield replace(LAUNCHES[name], warps=warps, stages=stages, blocks=blocks)


def measured(name: str, queries: int, device: torch.device, *, sweep: bool) -> list[dict[str, Any]]:
    """Lines for a shape and a number of queries; the fastest launch last."""
    shape = decode.SHAPES[name]
    subject = Subject(shape, queries, device)
    lines = []
    for launch in launches(shape[2]) if sweep else (None,):
        try:
            subject.check_parity(launch)
        except RuntimeError as error:  # more shared memory than a processor has
            print(f"{name} {launch}: {str(error).splitlines()[0]}")
            continue
        packed_nbytes = peak_nbytes(lambda launch=launch: subject.packed(launch))  # type: ignore[misc]  # a default binds the loop's value
        subject.workspace = None
        decoded_nbytes = peak_nbytes(subject.decoded)
        packed, decoded = seconds(lambda launch=launch: subject.packed(launch)), seconds(subject.decoded)  # type: ignore[misc]  # as above
        chosen = launch or LAUNCHES["attend_wide" if shape[2] > WIDE_CHANNELS else "attend"]
        lines.append(
            {"shape": name, "queries": queries, "tokens": subject.tokens, "ratio": decoded / packed}
            | {"packed_seconds": packed, "decoded_seconds": decoded, "sealed_nbytes": subject.chunk.nbytes}
            | {"packed_peak_nbytes": packed_nbytes, "decoded_peak_nbytes": decoded_nbytes}
            | {"launch": {"warps": chosen.warps, "stages": chosen.stages, **chosen.blocks}}
        )
    return sorted(lines, key=lambda line: line["ratio"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=decode.SHAPES, action="append")
    parser.add_argument("--queries", type=int, action="append")
    parser.add_argument("--sweep", action="store_true", help="try other launch parameters")
    arguments = parser.parse_args()
    device = needs.cuda(parser)
    known = decode.environment() | {"benchmark": "attention"}
    for name, queries in itertools.product(arguments.shape or decode.SHAPES, arguments.queries or QUERIES):
        for line in measured(name, queries, device, sweep=arguments.sweep):
            decode.keep(known | line, RESULTS)
            launch = " ".join(f"{key}={value}" for key, value in line["launch"].items())
            print(
                f"{name:17} {queries:5} queries, {line['tokens']:5} tokens: packed {1e3 * line['packed_seconds']:8.3f} ms, "
                f"{line['ratio']:5.2f} times as fast; peak {line['packed_peak_nbytes'] / 2**20:7.1f} MiB "
                f"for {line['decoded_peak_nbytes'] / 2**20:7.1f}  {launch}",
                flush=True,
            )


if __name__ == "__main__":
    main()
