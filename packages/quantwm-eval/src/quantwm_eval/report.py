"""Results and pictures to one self-contained HTML page, Markdown beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2

from quantwm_core.tensor_file import replaced
from quantwm_eval import agreement, drawing, figures, films, markdown, summary
from quantwm_eval.experiment import CONTROL
from quantwm_eval.films import VIDEOS
from quantwm_eval.gallery import TRUTH, Gallery, Reel, data_uri
from quantwm_eval.results import Results
from quantwm_eval.summary import Table

PAGE = "report.html"
TABLES = "report.md"


@dataclass(frozen=True)
class Card:
    """What the top of the page says of a method."""

    label: str
    balls: str
    bits: str
    quality: str


def write(folder: Path, results: Results, gallery: Gallery) -> tuple[Path, ...]:
    """Write page, tables and the page's videos into a folder that exists.

    Returns:
        The page, the tables, and the folder of videos if there are any.

    Raises:
        OSError: A file cannot be written.
    """
    reels = list(gallery.reels())
    written = list(write_page(folder, results, gallery, reels))
    if reels:
        written.append(folder / VIDEOS)
        written[-1].mkdir(exist_ok=True)
    for reel in reels:
        for tile in reel.tiles:
            (folder / VIDEOS / f"{films.stem(reel.kind, reel.scene, tile.label)}.mp4").write_bytes(tile.film)
    return tuple(written)


def write_page(
    folder: Path, results: Results, gallery: Gallery, reels: Sequence[Reel], more: Sequence[Table] = ()
) -> tuple[Path, Path]:
    """Write page and tables into a folder that exists; ``more`` are tables that come from elsewhere, VBench's.

    Files that are there are replaced only when both texts are made.

    Raises:
        FormatError: A folder has the name of one of them.
        OSError: A file cannot be written.
    """
    written = folder / PAGE, folder / TABLES
    texts = page(results, gallery, reels, more), markdown.render(results, headline(results), more)
    for path, text in zip(written, texts, strict=True):
        with replaced(path) as file:
            file.write(text.encode())
    return written


def page(results: Results, gallery: Gallery, reels: Sequence[Reel], more: Sequence[Table] = ()) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantwm_eval"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.globals.update(data_uri=data_uri)
    source = resources.files("quantwm_eval") / "templates"
    return environment.get_template("report.html.j2").render(
        style=(source / "report.css").read_text(encoding="utf-8"),
        script="".join((source / name).read_text(encoding="utf-8") for name in ("player.js", "wipe.js")),
        results=results,
        experiment=results.experiment,
        provenance=results.provenance,
        headline=headline(results),
        cards=cards(results),
        colours=drawing.colours(results),
        table=summary.main_table(results),
        details=[summary.detail_table(results, kind) for kind in results.experiment.kinds],
        unmeasured=summary.unmeasured(results),
        more=more,
        stated=agreement.rows(results),
        stated_heads=agreement.HEADS,
        stated_title=agreement.title(results),
        plots=figures.all_plots(results),
        gallery=gallery,
        reels=reels,
        control=CONTROL,
        truth=TRUTH,
    )


def headline(results: Results) -> str:
    """The run in a sentence: what is left of the ball, method by method."""
    found = cards(results)
    if all(card.balls.startswith("–") for card in found):
        return "PSNR against BF16: " + ", ".join(f"{card.label} {card.quality}" for card in found)
    told = ", ".join(f"{card.label} {card.balls}" for card in found)
    return f"Balls redrawn after looking {results.experiment.degrees}° away and back: {told}"


def cards(results: Results) -> list[Card]:
    """What matters most of every method."""
    known = summary.quantities(results)
    kind = results.experiment.kinds[0]

    def text(label: str, name: str, of: str) -> str:
        if name not in known:
            return "–"
        found = summary.estimate(results, of, label, name)
        lacking = "" if found.n or of not in results.experiment.kinds else summary.why(results, of, label, name)
        return summary.entry(known[name], found, best=False, why=lacking).text

    return [
        Card(
            method.label,
            text(method.label, "balls_redrawn", "look-away"),
            text(method.label, "bits_per_element", kind),
            text(method.label, "psnr", kind),
        )
        for method in results.experiment.methods
    ]
