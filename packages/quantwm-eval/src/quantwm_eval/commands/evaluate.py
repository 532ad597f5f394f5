"""``quantwm eval``: an experiment from a file or from options, taken up again where it was left."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from quantwm_core.errors import QuantWMError, StateError, lookup
from quantwm_eval import experiment_file, films, named, paired, provenance, resume, tables, text_table, vbench
from quantwm_eval.commands.answer import BAD_OPTIONS, FAILED, Answer, Tell
from quantwm_eval.commands.arguments import check_device, method_list, metric_list, natural, numbers, positive, words
from quantwm_eval.demo_host import DemoHost
from quantwm_eval.evaluate import evaluate
from quantwm_eval.experiment import KINDS, Experiment
from quantwm_eval.host import Host
from quantwm_eval.output import RESULTS
from quantwm_eval.run import count_chunks

HOSTS: Mapping[str, Callable[[str], Host]] = {"demo": lambda device: DemoHost(device=device)}
"""By name, what makes a host on a device."""
DEFAULT_OUT = "quantwm-eval"
OF_EXPERIMENT = (
    "methods", "scenes", "kinds", "frames", "degrees", "seeds", "chunks_per_seal", "batch", "samples", "metrics",
)  # fmt: skip
SECONDS_BETWEEN_LOG_LINES = 30


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add its options."""
    told = """\
        Runs an experiment, a bundled one by its name or one's own, and appends every finished cell (one video under one method) to OUT/results.jsonl. The same
        command again goes on where it was stopped; a results file of another experiment, version or machine is refused.
        Options take precedence over the file's settings. "quantwm report" renders what is there, at any time."""
    one = commands.add_parser(
        "eval",
        help="an experiment by name, from a TOML file or from options, resumable",
        description=textwrap.fill(textwrap.dedent(told), 100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    one.add_argument(
        "experiment",
        nargs="?",
        default=None,
        metavar="NAME|FILE.toml",
        help="a bundled experiment (--list), or a file of settings",
    )
    one.add_argument("--list", action="store_true", default=False, help="say which experiments are bundled, and end")
    one.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), metavar="DIR", help=f"default: {DEFAULT_OUT}")
    one.add_argument("--methods", type=method_list, metavar="A,B,...", help="bf16, the control, is always among them")
    one.add_argument("--scenes", type=numbers, metavar="0-7,9", help="numbers of scenes")
    one.add_argument("--kinds", type=words, metavar="A,B", help=f"of {', '.join(KINDS)}")
    one.add_argument("--frames", type=positive, metavar="N", help="frames of a walk")
    one.add_argument("--degrees", type=positive, metavar="D", help="angle of the look-away test")
    one.add_argument("--seeds", type=numbers, metavar="0-2", help="noise")
    one.add_argument("--chunks-per-seal", type=positive, metavar="N", help="chunks per sealed unit")
    one.add_argument("--batch", type=positive, metavar="N", help="scenes generated, and at worst lost, together")
    one.add_argument(
        "--samples", type=natural, metavar="N", help="queries scored per head, layer and call; 0: nobody looks on"
    )
    one.add_argument("--metrics", type=metric_list, metavar="A,B,...", help="default: all")
    one.add_argument("--videos", type=natural, default=0, metavar="N", help="keep the videos of the first N scenes")
    one.add_argument(
        "--vbench", type=Path, metavar="ENV", help="let VBench, of this environment, score all videos as well"
    )
    one.add_argument(
        "--vbench-dimensions", type=words, default=vbench.DIMENSIONS, metavar="A,B,...", help="default: all"
    )
    one.add_argument("--device", default="cpu", metavar="D", help="cpu (default) or cuda, as torch calls it")
    one.add_argument("--threads", type=positive, metavar="N", help="of torch (default: its choice)")
    one.set_defaults(run=run)


def run(options: argparse.Namespace, given: Sequence[str], tell: Tell) -> Answer:
    """Do it."""
    if options.list:
        return Answer(
            text_table.grid(
                [("experiment", "what it asks"), *((name, named.get(name).about) for name in named.names())], left=2
            )
        )
    if "threads" in options:
        torch.set_num_threads(options.threads)
    path: Path = options.out / RESULTS
    try:
        wanted = _experiment(options)
        judge = vbench.find(options.vbench) if "vbench" in options else None
        vbench.check_dimensions(options.vbench_dimensions)
        check_device(options.device)
        source = provenance.collect(given, options.device)
        host = HOSTS[lookup("model", wanted.model, HOSTS)](options.device)
        count_chunks(wanted, host)
        if options.out.exists() and not options.out.is_dir():
            raise StateError(f"--out {options.out}: is a file; name a folder")
        options.out.mkdir(parents=True, exist_ok=True)
        begun = resume.begin(path, wanted, source)
    except QuantWMError as error:
        return Answer("", f"quantwm eval: {error}", BAD_OPTIONS)
    total = count_chunks(wanted, host, begun.cells)
    tell(f"{path}: {len(begun.cells)} of {len(begun.cells) + begun.missing} cells are there")
    count = len(wanted.scenes) if judge is not None else options.videos
    kept = films.Films(options.out / films.VIDEOS, wanted, count, host.frame_rate) if count else None
    with _bar(total) as bar:

        def progress(title: str) -> None:
            bar.set_postfix_str(title, refresh=False)
            bar.update()

        found = evaluate(wanted, host, begun, path, progress, kept)
    text = f"{tables.text(found, paired.opponent(found, None))}\n\n{path}"
    if not found.valid:
        return Answer(text, "quantwm eval: INVALID, a BF16 control differed from its reference", FAILED)
    if judge is None:
        return Answer(text)
    try:
        return Answer(f"{_judged(judge, options, wanted, tell)}\n\n{text}")
    except QuantWMError as error:  # what was measured stands
        return Answer(text, f"quantwm eval: {error}", FAILED)


def _judged(command: Path, options: argparse.Namespace, wanted: Experiment, tell: Tell) -> str:
    """VBench's scores of the kept videos, written beside the results, as tables.

    Raises:
        StateError: A video was not kept, or VBench fails.
        FormatError: VBench answers in another form than is known.
    """
    videos = films.paths(options.out / films.VIDEOS, wanted)
    lost = [path for path in videos.values() if not path.is_file()]
    if lost:
        raise StateError(
            f"{lost[0]}: was not kept when its cell was measured; run again into another --out with --vbench"
        )
    scores = vbench.score(command, videos, options.vbench_dimensions, lambda dimension: tell(f"VBench: {dimension}"))
    vbench.save(options.out / vbench.FILE, scores)
    labels = [method.label for method in wanted.methods]
    return "\n\n".join(tables.grid(scores.table(labels, kind)) for kind in wanted.kinds)


def _experiment(options: argparse.Namespace) -> Experiment:
    """The file's or the bundled experiment's settings with those of the options over them."""
    chosen: dict[str, Any] = {}
    if options.experiment is not None:
        path = Path(options.experiment)
        chosen = experiment_file.read(path) if path.suffix == ".toml" else named.get(options.experiment).settings
    chosen |= {name: getattr(options, name) for name in OF_EXPERIMENT if name in options}
    return experiment_file.build(chosen)


def _bar(total: int) -> Any:
    """A bar with the time left: redrawn on a terminal, a line now and then in a log."""
    pause = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LOG_LINES
    return tqdm(total=total, unit="chunk", smoothing=0.05, dynamic_ncols=True, mininterval=pause)
