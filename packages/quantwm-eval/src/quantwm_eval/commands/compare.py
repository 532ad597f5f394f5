"""``quantwm compare``: two videos or two folders of them, without any model."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from quantwm_core.errors import ParameterError, StateError
from quantwm_eval import compare, metrics, output, pool, provenance
from quantwm_eval.commands.answer import BAD_OPTIONS, FAILED, Answer, Tell
from quantwm_eval.commands.arguments import metric_list, positive


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add its options."""
    told = """\
        Scores a video against a reference by every metric that needs nothing but pictures. Each of the two is a video
        file, a folder of frames (pictures, in the order of the numbers in their names), or a folder of either kind,
        whose members are matched by name."""
    one = commands.add_parser(
        "compare",
        help="any two videos, or two folders of videos, by every metric of pictures",
        description=textwrap.fill(textwrap.dedent(told), 100),
        epilog=f"metrics: {', '.join(compare.names())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("video", type=Path, metavar="VIDEO", help="what is judged")
    one.add_argument("reference", type=Path, metavar="REFERENCE", help="what it should look like")
    one.add_argument("--metrics", type=metric_list, metavar="A,B,...", help="only these (default: all)")
    one.add_argument(
        "--jobs", type=positive, default=os.cpu_count() or 1, metavar="N", help="processes (default: %(default)s)"
    )
    one.add_argument("--out", type=Path, metavar="FILE.json", help="write figures and curves over frames as JSON")
    one.add_argument("--overwrite", action="store_true", help="replace FILE.json if it exists; never an input")
    one.set_defaults(run=run)


def run(options: argparse.Namespace, given: Sequence[str], tell: Tell) -> Answer:
    """Do it."""
    try:
        wanted = _wanted(options.metrics, tell)
        pairs = compare.match(options.video, options.reference)
        if options.out is not None:
            read = (path for pair in pairs for side in (pair.video, pair.reference) for path in side.files)
            output.check_file(options.out, read, options.overwrite)
    except (ParameterError, StateError) as error:
        return Answer("", f"quantwm compare: {error}", BAD_OPTIONS)
    found = pool.scores(pairs, wanted, options.jobs)
    scores = list(tqdm(found, total=len(pairs), unit="video", disable=None, leave=False))
    table = compare.table(scores, wanted)
    if options.out is not None:
        text = compare.to_json(scores, provenance.collect(given, registered=metrics.distributions(wanted)))
        if wrong := output.write(options.out, text):  # what was measured is printed
            return Answer(table, f"quantwm compare: {wrong}", FAILED)
    return Answer(table)


def _wanted(chosen: tuple[str, ...] | None, tell: Tell) -> list[str]:
    """Metrics to apply: those asked for, or all that are installed.

    Raises:
        ParameterError: One that was asked for needs more than pictures, or is not installed.
    """
    for name in chosen or ():
        metric = metrics.get(name)
        if not metric.pictorial:
            raise ParameterError(
                f"metric {name!r} needs more than pictures ({', '.join(metric.needs)}); known: {', '.join(compare.names())}"
            )
        if not metric.installed:
            raise ParameterError(f"metric {name!r} needs {metric.lacks}, which is not there")
    names = chosen or compare.names()
    lacking = [name for name in names if not metrics.get(name).installed]
    if told := [name for name in lacking if metrics.get(name).variable is None]:  # what a variable names is the user's
        tell(f"left out: {', '.join(f'{name} (needs {metrics.get(name).lacks})' for name in told)}")
    return [name for name in names if name not in lacking]
