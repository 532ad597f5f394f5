"""The ``quantwm`` command: arguments in, one call, messages out."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from quantwm_core import methods
from quantwm_core.errors import QuantWMError
from quantwm_eval import __version__, experiment, output, provenance, report
from quantwm_eval.demo_host import MOST_SCENES, DemoHost
from quantwm_eval.experiment import Experiment, MethodChoice, with_control
from quantwm_eval.produce import Product, produce
from quantwm_eval.run import count_chunks

DEFAULT_METHODS = "bf16,bf16:window=1,rtn,kivi,qvg,quantwm"
DEFAULT_OUT = "quantwm-demo"
BAD_OPTIONS, FAILED, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 done, 1 failed or the control was not exact, 2 bad options, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    try:
        return demo(options, given)
    except KeyboardInterrupt:
        print("\ninterrupted; finished cells are in the results file", file=sys.stderr)
        return INTERRUPTED
    except (QuantWMError, OSError) as error:
        print(f"quantwm: {error}", file=sys.stderr)
        return FAILED


def parser() -> argparse.ArgumentParser:
    """What can be typed."""
    top = argparse.ArgumentParser(prog="quantwm", description="Compressed caches for video world models, measured.")
    top.add_argument("--version", action="version", version=f"quantwm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    told = """\
        Generates the same scenes with the same noise and the same actions under several caches and writes a
        self-contained HTML page (report.html) with the numbers, the plots and the videos side by side, the numbers
        as Markdown (report.md), and every measurement as JSON lines (results.jsonl)."""
    one = commands.add_parser(
        "demo",
        help="the bundled demo world model under several caches, as one HTML page",
        description=textwrap.fill(textwrap.dedent(told), 100),
        epilog=f"methods: {', '.join(methods.names())}; settings follow after colons: quantwm:rank=16:values=bf16; window=N "
        "shows the model N past chunks only",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    one.add_argument(
        "--scenes", type=_scenes, default=4, metavar="N", help="random walks, and as many look-away scenes"
    )
    one.add_argument("--frames", type=_positive, default=40, metavar="N", help="frames of a walk, a multiple of 4")
    one.add_argument(
        "--degrees",
        type=_angle,
        default=100,
        metavar="D",
        help="angle of the look-away test, a multiple of 10; 0 leaves it out",
    )
    one.add_argument(
        "--methods",
        type=_methods,
        default=DEFAULT_METHODS,
        metavar="A,B,...",
        help="bf16, the control, is always among them",
    )
    one.add_argument(
        "--chunks-per-seal", type=_positive, default=2, metavar="N", help="chunks of 4 frames per sealed unit"
    )
    one.add_argument("--seed", type=_number, default=0, metavar="N", help="noise")
    one.add_argument("--batch", type=_positive, default=4, metavar="N", help="scenes generated together")
    one.add_argument(
        "--threads", type=_positive, default=argparse.SUPPRESS, metavar="N", help="of torch (default: its choice)"
    )
    one.add_argument(
        "--out",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help=f"new or empty folder (default: {DEFAULT_OUT}, or {DEFAULT_OUT}-2 and so on where that is taken)",
    )
    one.add_argument("--overwrite", action="store_true", help="replace the files of an earlier run in --out")
    return top


def demo(options: argparse.Namespace, given: Sequence[str]) -> int:
    """``quantwm demo``."""
    if "threads" in options:
        torch.set_num_threads(options.threads)
    try:
        wanted = Experiment(
            methods=with_control(options.methods),
            scenes=tuple(range(options.scenes)),
            kinds=experiment.KINDS if options.degrees else experiment.KINDS[:1],
            frames=options.frames,
            degrees=options.degrees or 100,
            seeds=(options.seed,),
            chunks_per_seal=options.chunks_per_seal,
            batch=options.batch,
        )
        host = DemoHost()
        total = count_chunks(wanted, host)
        folder = output.prepare(getattr(options, "out", None), DEFAULT_OUT, options.overwrite)
    except QuantWMError as error:
        print(f"quantwm demo: {error}", file=sys.stderr)
        return BAD_OPTIONS
    print(f"writing into {folder}/", file=sys.stderr)
    with tqdm(total=total, unit="chunk", smoothing=0.05, dynamic_ncols=True) as bar:

        def progress(title: str) -> None:
            bar.set_postfix_str(title, refresh=False)
            bar.update()

        made = produce(wanted, host, provenance.collect(given), folder, progress)
    return _conclude(made)


def _conclude(made: Product) -> int:
    print(report.headline(made.results))
    for path in made.files:
        print(path)
    if made.results.valid:
        return 0
    print("quantwm demo: INVALID, a BF16 control differed from its reference", file=sys.stderr)
    return FAILED


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: need a whole number of at least 1")
    return number


def _scenes(text: str) -> int:
    number = _positive(text)
    if number > MOST_SCENES:
        raise argparse.ArgumentTypeError(f"{text!r}: the demo world has {MOST_SCENES} scenes")
    return number


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: need a whole number of at least 0")
    return int(text)


def _angle(text: str) -> int:
    number = _number(text)
    if number % 10 or number > 180:
        raise argparse.ArgumentTypeError(f"{text!r}: need a multiple of 10 from 0 to 180")
    return number


def _methods(text: str) -> tuple[MethodChoice, ...]:
    try:
        chosen = tuple(MethodChoice.parse(one) for one in text.split(","))
        for method in chosen:
            method.scheme(chunks_per_seal=1)
            _ = method.window
    except QuantWMError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return chosen


if __name__ == "__main__":
    raise SystemExit(main())
