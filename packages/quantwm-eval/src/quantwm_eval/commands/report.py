"""``quantwm report``: stored results as a page, as tables, as numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from quantwm_core.errors import ParameterError, QuantWMError, StateError
from quantwm_eval import films, markdown, merge, output, paired, report, results, tables, vbench
from quantwm_eval.commands.answer import BAD_OPTIONS, FAILED, Answer, Tell
from quantwm_eval.gallery import Gallery
from quantwm_eval.results import Results
from quantwm_eval.summary import Table

FORMATS = ("html", "table", "markdown", "csv", "jsonl")
TAKEN_BY = {"against": ("table", "csv"), "all": ("table",), "videos": ("html",)}
"""Formats that an option says something to."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add its options."""
    one = commands.add_parser(
        "report",
        help="results files as one HTML page, or as tables",
        description="Renders results files. Several are taken as parts of one experiment: other scenes, seeds or methods.",
    )
    one.add_argument(
        "results", type=Path, nargs="+", metavar="RESULTS", help="results.jsonl, or the folder that holds it"
    )
    one.add_argument(
        "--format",
        choices=FORMATS,
        default="html",
        help="html is written, the others are printed unless there is --out; jsonl: one results file of all",
    )
    one.add_argument("--against", metavar="METHOD", help="table, csv: show differences from it, over the same scenes")
    one.add_argument("--all", action="store_true", help="table: every quantity, not the main ones only")
    one.add_argument("--videos", type=Path, metavar="DIR", help="html: kept videos (default: videos/ beside RESULTS)")
    one.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="html: folder (default: that of the first RESULTS); others: file to write",
    )
    one.add_argument("--overwrite", action="store_true", help="replace a page or a file that is there, never RESULTS")
    one.set_defaults(run=run)


def run(options: argparse.Namespace, _given: Sequence[str], tell: Tell) -> Answer:
    """Do it."""
    paths = [path / output.RESULTS if path.is_dir() else path for path in options.results]
    judge = paths[0].with_name(vbench.FILE)
    file: Path | None = None if options.format == "html" else options.out
    try:
        _check(options, paths)
        if file is not None:
            output.check_file(file, [*paths, *filter(Path.exists, [judge])], options.overwrite)
        found = merge.load(paths)
        scores = vbench.load(judge)
        judged = [] if scores is None else [scores.table(_labels(found), kind) for kind in found.experiment.kinds]
        text = _rendered(options, found, paths[0].parent, judged)
    except QuantWMError as error:
        return Answer("", f"quantwm report: {error}", BAD_OPTIONS)
    if found.missing:
        tell(f"incomplete: {len(found.cells)} of {len(found.cells) + found.missing} cells are measured")
    if file is not None:
        if wrong := output.write(file, f"{text}\n"):
            return Answer(text, f"quantwm report: {wrong}", FAILED)
        text = str(file)
    if found.valid:
        return Answer(text)
    return Answer(text, "quantwm report: INVALID, a BF16 control differed from its reference", FAILED)


def _rendered(options: argparse.Namespace, found: Results, beside: Path, judged: Sequence[Table]) -> str:
    """The results in the format asked for, without the end of the last line; of a page, which is written, where it is.

    Raises:
        StateError: The page cannot be written.
        UnknownNameError: The method to compare with is none of the results'.
    """
    against = paired.opponent(found, options.against)
    if options.format == "html":
        return _page(options, found, beside, judged)
    if options.format == "table":
        return "\n\n".join([tables.text(found, against, options.all), *map(tables.grid, judged)])
    if options.format == "jsonl":
        text = results.text(found)
    elif options.format == "csv":
        text = tables.comma_separated(found, against)
    else:
        text = markdown.render(found, report.headline(found), judged)
    return text.rstrip("\n")


def _check(options: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Look at what was typed, before anything is read.

    Raises:
        ParameterError: An option says nothing to the format.
        StateError: A results file is not there.
    """
    for name, formats in TAKEN_BY.items():
        if getattr(options, name) and options.format not in formats:
            raise ParameterError(f"--{name}: not for --format {options.format}, only for {' and '.join(formats)}")
    for path in paths:
        if not path.is_file():
            raise StateError(
                f"{path}: there is no such results file; quantwm eval and quantwm demo write {output.RESULTS}"
            )


def _labels(found: Results) -> list[str]:
    return [method.label for method in found.experiment.methods]


def _page(options: argparse.Namespace, found: Results, beside: Path, judged: Sequence[Table]) -> str:
    """Write the page and its Markdown.

    Raises:
        StateError: One of them is there already or cannot be written, or the folder of videos is not there.
    """
    folder: Path = options.out or beside
    if options.videos is not None and not options.videos.is_dir():
        raise StateError(f"--videos {options.videos}: there is no such folder")
    for name in (report.PAGE, report.TABLES):
        if (folder / name).exists() and not options.overwrite:
            raise StateError(f"{folder / name}: exists; name another folder with --out, or add --overwrite")
    output.check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    reels = list(films.reels(options.videos or beside / films.VIDEOS, found.experiment))
    rate = reels[0].rate if reels else 1
    written = report.write_page(folder, found, Gallery(rate), reels, judged)
    return "\n".join((report.headline(found), *map(str, written)))
