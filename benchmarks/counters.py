"""Hardware counters of one read or one seal, kernel by kernel, by Nsight Compute (``ncu``).

    python -m benchmarks.counters read --shape longcat --method quantwm
    python -m benchmarks.counters seal --shape longcat --iterations 2

All that is printed but the milliseconds is in percent: how much of what the memory, the second-level cache, the first-level cache and the
matrix units can do is done, how often a scheduler finds an instruction to issue, how many of the warps that a processor can hold it holds,
and in which part of their time these wait for a load. Clocks are left as they are. A line of JSON per kernel goes to
``benchmarks/results/counters.jsonl``.
"""

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import decode, needs
from quantwm_kernels.reading import Piece, ReadPlan

RESULTS = decode.RESULTS.with_name("counters.jsonl")
SECTIONS = [
    word
    for name in (
        "SpeedOfLight",
        "ComputeWorkloadAnalysis",
        "SchedulerStats",
        "WarpStateStats",
        "Occupancy",
        "SourceCounters",
    )
    for word in ("--section", name)
]
Line = dict[str, str | float | None]
STALLED = re.compile(r"smsp__pcsamp_warps_issue_stalled_(\w+?)(_not_issued)?")
# What each figure is read off: the first column that matches.
COLUMNS: Mapping[str, str] = {
    "memory": r"(gpu__dram|dram_)_throughput\.avg\.pct_of_peak_sustained_elapsed",
    "l2": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "l1": r"l1tex__throughput\.avg\.pct_of_peak_sustained_active",
    "matrix": r"sm__pipe_tensor\w*_cycles_active\.avg\.pct_of_peak_sustained_(active|elapsed)|sm__inst_executed_pipe_tensor\w*\.avg\.pct.*",
    "issue": r"(smsp|sm)__(issue_active|inst_issued)\.avg\.pct_of_peak_sustained_active",
    "warps": r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
}


def number(text: str) -> float:
    """A figure as ncu writes it."""
    return float(text.replace(",", ""))


def waiting(row: Mapping[str, str]) -> float | None:
    """Percent of the samples of warps in which one waited for a load from memory.

    >>> name = "smsp__pcsamp_warps_issue_stalled_{}".format
    >>> waiting({name("long_scoreboard"): "30", name("long_scoreboard_not_issued"): "9", name("wait"): "70"})
    30.0
    """
    found = {match[1]: number(row[name]) for name in row if (match := STALLED.fullmatch(name)) and not match[2]}
    total = sum(found.values())
    return 100 * found.get("long_scoreboard", 0.0) / total if total else None


def figures(report: str) -> list[Line]:
    r"""Figures of every kernel of a report, which is ncu's raw page as CSV: names, units, then a row a kernel.

    >>> report = '"Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed"\n"","ns","%"\n"read","1,500","50"'
    >>> [(line["kernel"], line["ms"], line["memory"]) for line in figures(report)]
    [('read', 0.0015, 50.0)]
    """
    rows = list(csv.DictReader(io.StringIO(report)))
    units = rows.pop(0) if rows and not rows[0]["Kernel Name"] else {}
    lines: list[Line] = []
    for row in rows:
        per_ms = {"ns": 1e6, "us": 1e3, "ms": 1.0, "s": 1e-3}[units.get("gpu__time_duration.sum", "ns")]
        line: Line = {
            "kernel": row["Kernel Name"],
            "ms": number(row["gpu__time_duration.sum"]) / per_ms,
        }
        for name, column in COLUMNS.items():
            known = next((each for each in row if re.fullmatch(column, each)), None)
            line[name] = None if known is None or not row[known] else number(row[known])
        lines.append(line | {"waiting": waiting(row)})
    return lines


def work(arguments: argparse.Namespace, device: torch.device) -> Callable[[], object]:
    """What is to be watched."""
    if arguments.what == "seal":
        from benchmarks.sealed_layer import Subject  # noqa: PLC0415 - needs Triton, which --help does not

        sealed = Subject(arguments.shape, device)
        return lambda: sealed.seal(arguments.iterations).wait()
    tokens, heads, channels = shape = decode.SHAPES[arguments.shape]
    chunk = decode.random_chunk(arguments.method, shape, 0, device)
    size = (1, tokens, heads, channels)
    keys, values = (torch.empty(size, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(2))
    plan = ReadPlan([Piece(chunk, 0, tokens, 0)])
    return lambda: plan.into(keys, values)


def watched(arguments: argparse.Namespace) -> None:
    """Do it, the last time between the marks that ncu looks for."""
    call = work(arguments, torch.device("cuda", torch.cuda.current_device()))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def measured(ncu: str, words: Sequence[str]) -> list[Line]:
    """Run this module under ncu, and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "counters.ncu-rep")
        watch = [ncu, "--profile-from-start", "off", *SECTIONS, "--clock-control", "none", "-o", report]
        subprocess.run([*watch, sys.executable, "-m", "benchmarks.counters", *words, "--watched"], check=True)  # noqa: S603 - this module
        show = [ncu, "--import", report, "--page", "raw", "--csv"]
        return figures(subprocess.run(show, check=True, capture_output=True, text=True).stdout)  # noqa: S603 - a fixed command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("read", "seal"))
    parser.add_argument("--shape", choices=decode.SHAPES, default="longcat")
    parser.add_argument("--method", choices=decode.METHODS, default="quantwm", help="of a read")
    parser.add_argument("--iterations", type=int, default=2, help="of a seal")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watched:
        watched(arguments)
        return
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("ncu is not on the PATH; it comes with CUDA's toolkit, as Nsight Compute")
    needs.triton(parser)
    known = decode.environment() | {"benchmark": "counters", "what": arguments.what, "shape": arguments.shape}
    known |= {"method": arguments.method} if arguments.what == "read" else {"iterations": arguments.iterations}
    print(f"{'kernel':24} {'ms':>8}" + "".join(f"{name:>9}" for name in (*COLUMNS, "waiting")))
    for line in measured(ncu, sys.argv[1:]):
        decode.keep(known | line, RESULTS)
        shown = (f"{line[name]:.1f}" if line[name] is not None else "-" for name in (*COLUMNS, "waiting"))
        print(f"{line['kernel']:24} {line['ms']:8.4f}" + "".join(f"{each:>9}" for each in shown))


if __name__ == "__main__":
    main()
