"""What ``quantwm eval`` can be told."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from quantwm_eval import hosts, launch, vbench
from quantwm_eval.commands.arguments import method_list, metric_list, natural, numbers, positive, threads, words
from quantwm_eval.experiment import KINDS

DEFAULT_OUT = "quantwm-eval"
OF_EXPERIMENT = (
    "methods", "scenes", "kinds", "frames", "degrees", "seeds", "chunks_per_seal", "batch", "samples", "metrics", "model",
)  # fmt: skip
"""Options that are settings of the experiment; none is there unless it was typed."""
OF_HOST = ("checkout", "weights", "inputs", "config", "size")
"""Options that say where a host comes from, likewise."""

TOLD = """\
    Runs an experiment, a bundled one by its name or one's own, and appends every finished cell (one video under one method)
    to OUT/results.jsonl. The same command again goes on where it was stopped; a results file of another experiment, host,
    version or machine is refused. Options take precedence over the file's settings. "quantwm report" renders what is there, at
    any time."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command with its options."""
    one = commands.add_parser(
        "eval",
        help="an experiment by name, from a TOML file or from options, resumable",
        description=textwrap.fill(textwrap.dedent(TOLD), 100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    one.add_argument(
        "experiment", nargs="?", default=None, metavar="NAME|FILE.toml",
        help="a bundled experiment (--list), or a file of settings",
    )  # fmt: skip
    one.add_argument("--list", action="store_true", default=False, help="say which experiments are bundled, and end")
    one.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), metavar="DIR", help=f"default: {DEFAULT_OUT}")
    one.add_argument("--videos", type=natural, default=0, metavar="N", help="keep the videos of the first N scenes")
    one.add_argument("--device", default="cpu", metavar="D", help="cpu (default) or cuda, as torch calls it")
    one.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="batches of scenes at a time, a process each"
    )
    one.add_argument("--launcher", choices=launch.LAUNCHERS, default="local", help="who runs them (default: local)")
    one.add_argument(
        "--threads", type=threads, metavar="N",
        help="of torch in each process (default: its choice, with several jobs at most cores / jobs)",
    )  # fmt: skip
    _add_settings(one.add_argument_group("settings of the experiment"))
    _add_host(one.add_argument_group("another world"))
    judge = one.add_argument_group("VBench")
    judge.add_argument("--vbench", type=Path, metavar="ENV", help="let VBench, of this environment, score all videos")
    judge.add_argument(
        "--vbench-dimensions", type=words, default=vbench.DIMENSIONS, metavar="A,B,...",
        help=f"default: {', '.join(vbench.DIMENSIONS)}",
    )  # fmt: skip
    return one


def _add_settings(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--methods", type=method_list, metavar="A,B,...", help="bf16, the control, is always among them")
    group.add_argument("--scenes", type=numbers, metavar="0-7,9", help="numbers of scenes")
    group.add_argument("--kinds", type=words, metavar="A,B", help=f"of {', '.join(KINDS)}")
    group.add_argument("--frames", type=positive, metavar="N", help="frames of a video")
    group.add_argument("--degrees", type=positive, metavar="D", help="angle of the look-away test")
    group.add_argument("--seeds", type=numbers, metavar="0-2", help="noise")
    group.add_argument("--chunks-per-seal", type=positive, metavar="N", help="chunks per sealed unit")
    group.add_argument("--batch", type=positive, metavar="N", help="scenes generated, and at worst lost, together")
    group.add_argument(
        "--samples", type=natural, metavar="N", help="queries scored per head, layer and call; 0: nobody looks on"
    )
    group.add_argument("--metrics", type=metric_list, metavar="A,B,...", help="default: all")


def _add_host(group: argparse._ArgumentGroup) -> None:
    known = ", ".join(hosts.names())
    group.add_argument("--host", dest="model", metavar="NAME", help=f"one of {known} (default: demo)")
    group.add_argument("--checkout", type=Path, metavar="DIR", help="the host's own code")
    group.add_argument("--weights", type=Path, metavar="PATH", help="the host's weights")
    group.add_argument(
        "--inputs", type=Path, metavar="PATH", help="scenes: a file of prompts, a folder of pictures, or one of folders"
    )
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="the host's own configuration (default: its usual one)"
    )
    group.add_argument("--size", choices=("480p", "720p"), help="size of frames, where the host has a choice")
