"""``quantwm demo``: the bundled world under several caches, as one page."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from quantwm_core import methods
from quantwm_core.errors import QuantWMError
from quantwm_eval import output, ownership, provenance, report
from quantwm_eval.commands.answer import BAD_OPTIONS, FAILED, Answer, Tell
from quantwm_eval.commands.arguments import method_list, natural, positive, threads
from quantwm_eval.demo_host import MOST_SCENES, DemoHost
from quantwm_eval.experiment import Experiment, with_control
from quantwm_eval.produce import Product, produce
from quantwm_eval.run import count_chunks
from quantwm_eval.threads import limit_threads

DEFAULT_METHODS = "bf16,bf16:window=1,rtn,kivi,qvg,quantwm"
DEFAULT_OUT = "quantwm-demo"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add its options."""
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
    one.add_argument("--frames", type=positive, default=40, metavar="N", help="frames of a walk, a multiple of 4")
    one.add_argument(
        "--degrees",
        type=_angle,
        default=100,
        metavar="D",
        help="angle of the look-away test, a multiple of 10; 0 leaves it out",
    )
    one.add_argument(
        "--methods",
        type=method_list,
        default=DEFAULT_METHODS,
        metavar="A,B,...",
        help="bf16, the control, is always among them",
    )
    one.add_argument(
        "--chunks-per-seal", type=positive, default=2, metavar="N", help="chunks of 4 frames per sealed unit"
    )
    one.add_argument("--seed", type=natural, default=0, metavar="N", help="noise")
    one.add_argument("--batch", type=positive, default=4, metavar="N", help="scenes generated together")
    one.add_argument(
        "--threads",
        type=threads,
        default=argparse.SUPPRESS,
        metavar="N",
        help="of PyTorch, NumPy and SciPy (default: their choice)",
    )
    one.add_argument(
        "--out",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help=f"new or empty folder (default: {DEFAULT_OUT}, or {DEFAULT_OUT}-2 and so on where that is taken)",
    )
    one.add_argument("--overwrite", action="store_true", help="replace an earlier run in --out when this one has ended")
    one.set_defaults(run=run)


def run(options: argparse.Namespace, given: Sequence[str], tell: Tell) -> Answer:
    """Do it."""
    with ExitStack() as held:
        return _run(options, given, tell, held)


def _run(options: argparse.Namespace, given: Sequence[str], tell: Tell, held: ExitStack) -> Answer:
    if "threads" in options:
        limit_threads(options.threads)
    try:
        wanted = Experiment(
            methods=with_control(options.methods),
            scenes=tuple(range(options.scenes)),
            kinds=DemoHost.kinds if options.degrees else DemoHost.kinds[:1],
            frames=options.frames,
            degrees=options.degrees or 100,
            seeds=(options.seed,),
            chunks_per_seal=options.chunks_per_seal,
            batch=options.batch,
        )
        host = DemoHost()
        total = count_chunks(wanted, host)
        source = provenance.collect(given, registered=wanted.distributions(), host={})
        folder = output.prepare(getattr(options, "out", None), DEFAULT_OUT, options.overwrite)
        held.enter_context(ownership.owned(folder))
    except QuantWMError as error:
        return Answer("", f"quantwm demo: {error}", BAD_OPTIONS)
    tell(f"writing into {folder}/")
    with tqdm(total=total, unit="chunk", smoothing=0.05, dynamic_ncols=True) as bar:

        def progress(title: str) -> None:
            bar.set_postfix_str(title, refresh=False)
            bar.update()

        made = produce(wanted, host, source, folder, progress)
    return _conclude(made)


def _conclude(made: Product) -> Answer:
    text = "\n".join((report.headline(made.results), *map(str, made.files)))
    if made.results.valid:
        return Answer(text)
    return Answer(text, "quantwm demo: INVALID, a BF16 control differed from its reference", FAILED)


def _scenes(text: str) -> int:
    number = positive(text)
    if number > MOST_SCENES:
        raise argparse.ArgumentTypeError(f"{text!r}: the demo world has {MOST_SCENES} scenes")
    return number


def _angle(text: str) -> int:
    number = natural(text)
    if number % 10 or number > 180:
        raise argparse.ArgumentTypeError(f"{text!r}: need a multiple of 10 from 0 to 180")
    return number
