"""``quantwm bench``: what caches of the five models' true size take, on random weights."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quantwm_core import methods
from quantwm_core.errors import ParameterError, QuantWMError
from quantwm_eval import output, provenance
from quantwm_eval.commands.answer import BAD_OPTIONS, DONE, FAILED, Answer, Tell
from quantwm_eval.commands.arguments import check_device, method_list, positive
from quantwm_eval.experiment import MethodChoice
from quantwm_eval.text_table import grid
from quantwm_eval.true_shapes import budget_table, shape, table
from quantwm_eval.true_shapes.measure import run as measure
from quantwm_eval.true_shapes.plan import Plan

METHODS = ("quantwm", "qvg", "kivi")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add its options."""
    one = commands.add_parser(
        "bench",
        help="memory and time at the models' true shapes, with random weights",
        description="Measures caches of the five models' true size. Weights are random: nothing is said about quality.",
    )
    kinds = one.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    _add_true_shapes(kinds)
    _add_budget(kinds)


def _add_true_shapes(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = """\
        Builds a model's attention stack at its true depth, width and schedule, with random weights and its host's cache
        protocol, makes a video with the host's own BF16 cache, then with each method's under it, and prints bytes at rest
        and at the peak, seconds a chunk, and the shares of sealing and of reading."""
    one = kinds.add_parser(
        "true-shapes",
        description=textwrap.fill(textwrap.dedent(told), 100),
        epilog="On a CPU there is a dash for the peak: only a GPU's allocator tells it.",
        help="run a model's stack",
    )
    one.add_argument("model", choices=shape.names(), metavar="MODEL", help=", ".join(shape.names()))
    one.add_argument(
        "--resolution", metavar="R", help="480p or 720p, where the host supports it (default: its smallest)"
    )
    one.add_argument("--frames", type=positive, default=93, metavar="N", help="of the video (default: %(default)s)")
    one.add_argument(
        "--methods",
        type=method_list,
        default=tuple(map(MethodChoice.parse, METHODS)),
        metavar="A,B,...",
        help=f"caches put under the host (default: {','.join(METHODS)}); bf16: ours without compression",
    )
    one.add_argument("--layers", type=positive, metavar="N", help="run only so many, and extrapolate (default: all)")
    one.add_argument("--steps", type=positive, metavar="N", help="denoising steps of a chunk to run, and extrapolate")
    one.add_argument(
        "--window", type=positive, metavar="N", help="latent frames that the cache holds, for hosts with a window"
    )
    one.add_argument(
        "--offload", action="store_true", help="keep the cache in host memory, as LongCat-Video can itself"
    )
    one.add_argument("--once", action="store_true", help="store HY-World's keys and values before its two encodings")
    one.add_argument("--alone", action="store_true", help="leave the untouched host out")
    one.add_argument(
        "--memory", type=positive, metavar="GIB", help="allocate no more of a GPU, as if its card had no more"
    )
    one.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    one.add_argument("--tiny", action="store_true", help="a stack in small, to try the command without a GPU")
    one.add_argument(
        "--out", type=Path, metavar="FILE.jsonl", help="write a line of JSON for each cache, as it is measured"
    )
    one.add_argument("--overwrite", action="store_true", help="replace FILE.jsonl if it exists")
    one.set_defaults(run=run)


def _add_budget(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = """\
        Computes, without running anything, what a whole process needs: weights, cache, a pass or the decoder of the VAE,
        and CUDA itself; which cards that fits into; and the longest video whose whole history fits, where the model
        attends to all of it. "tight", and the second number of a range: only if PyTorch's allocator loses less than 3 GiB
        in pieces, see docs/true-shapes.md."""
    one = kinds.add_parser(
        "budget", description=textwrap.fill(textwrap.dedent(told), 100), help="what fits into a card"
    )
    one.add_argument("model", nargs="*", metavar="MODEL", help=f"{', '.join(shape.names())} (default: all)")
    one.set_defaults(run=run_budget)


def run_budget(options: argparse.Namespace, _given: Sequence[str], _tell: Tell) -> Answer:
    """Do it."""
    names = tuple(dict.fromkeys(options.model)) or shape.names()
    try:
        tables = {
            budget_table.FITTING: budget_table.fitting(names),
            budget_table.LENGTHS: budget_table.lengths(names),
        }
    except QuantWMError as error:
        return Answer("", f"quantwm bench: {error}", BAD_OPTIONS)
    return Answer("\n\n".join(f"{caption}\n\n{grid(table, left=2)}" for caption, table in tables.items()))


def run(options: argparse.Namespace, given: Sequence[str], tell: Tell) -> Answer:
    """Do it."""
    plan = Plan(
        options.model,
        options.resolution,
        options.frames,
        options.layers,
        options.steps,
        options.window,
        options.device,
        options.offload,
        options.once,
        options.alone,
        options.tiny,
    )
    try:
        check_device(options.device)
        plan.check()
        _check_methods(options.methods)
        _limit(options.memory, options.device)
        if options.out is not None:
            output.check_file(options.out, (), options.overwrite)
    except QuantWMError as error:
        return Answer("", f"quantwm bench: {error}", BAD_OPTIONS)
    registered = methods.distributions(name for method in options.methods for name in method.names)
    known = {"provenance": provenance.collect(given, options.device, registered).to_json()}
    lines: list[dict[str, Any]] = []
    wrong = ""
    for line in measure(plan, options.methods, tell):
        lines.append(line | known)
        if options.out is not None:  # all lines each time, so that an interrupted run leaves whole ones
            wrong = output.write(options.out, "".join(f"{json.dumps(each)}\n" for each in lines))
    return Answer(table.render(lines), f"quantwm bench: {wrong}" if wrong else "", FAILED if wrong else DONE)


def _check_methods(wanted: Sequence[MethodChoice]) -> None:
    """Refuse what only a host could tell a cache.

    Raises:
        ParameterError: A method looks ahead.
    """
    for method in wanted:
        scheme = method.scheme(chunks_per_seal=1)
        if scheme.frames_ahead and scheme.uses_queries:
            raise ParameterError(
                f"--methods {method.label}: a stack has no table of rotations by which queries could be turned to the frames "
                "ahead; leave frames_ahead out, on which no byte depends"
            )


def _limit(memory: int | None, device: str) -> None:
    """Let PyTorch allocate so many GiB at most.

    Raises:
        ParameterError: The device is a CPU, or has less.
    """
    if memory is None:
        return
    if torch.device(device).type != "cuda":
        raise ParameterError(f"--memory {memory}: needs --device cuda; what a CPU allocates cannot be limited")
    number = torch.device(device).index or 0
    there = torch.cuda.get_device_properties(number).total_memory
    if there < memory * table.GIB:
        raise ParameterError(f"--memory {memory}: {device} has {there / table.GIB:.0f} GiB that can be limited")
    torch.cuda.set_per_process_memory_fraction(memory * table.GIB / there, number)
