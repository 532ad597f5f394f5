"""The page, its tables and its pictures, from a run of the fake host."""

import base64
import dataclasses
import io
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import matplotlib.image
import numpy as np
import pytest

from quantwm_eval import figures, film, markdown, provenance, report, results, summary, tables
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.gallery import Gallery
from quantwm_eval.metric import Quantity
from quantwm_eval.produce import Product, produce
from quantwm_eval.results import Results
from quantwm_eval.run import run
from tests.eval.fake_host import FakeHost

METHODS = (MethodChoice("bf16"), MethodChoice("rtn"), MethodChoice.parse("quantwm:rank=2"))
WANTED = Experiment(METHODS, scenes=(0, 1, 2), frames=12, chunks_per_seal=1)
ADDRESSES = ("src", "href", "poster", "data", "action", "srcset", "xlink:href", "background", "formaction")
VOID = {"meta", "link", "img", "input", "br", "hr", "source", "wbr"}


class Element(NamedTuple):
    tag: str
    attributes: dict[str, str | None]


class Page(HTMLParser):
    """Elements and text; fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [element.attributes for element in self.elements if element.tag == tag]


def content(address: str | None) -> bytes:
    assert address is not None
    return base64.b64decode(address.partition(",")[2], validate=True)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Product:
    folder = tmp_path_factory.mktemp("run")
    return produce(WANTED, FakeHost(), provenance.collect(["demo", "--out", "<&>"]), folder, lambda _title: None)


@pytest.fixture(scope="module")
def text(product: Product) -> str:
    return product.files[1].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_everything_is_written(product: Product) -> None:
    assert [path.name for path in product.files] == ["results.jsonl", "report.html", "report.md", "videos"]
    back = results.load(product.files[0])
    assert len(back.cells) == len(product.results.cells) == 2 * 3 * 3
    names = {path.name for path in product.files[3].iterdir()}
    assert {"walk-0-truth.mp4", "walk-1-quantwm-rank=2.mp4", "look-away-0-bf16.mp4"} <= names
    assert len(names) == 2 * 2 * 4


def test_the_page_refers_to_nothing_outside(text: str, page: Page) -> None:
    for tag, attributes in page.elements:
        for name in ADDRESSES:
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name, value)
    assert not re.search(r"@import|url\((?!['\"]?data:)", text)
    script = text.partition("<script>")[2]
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\b\s*\(", script)
    policy = [tag["content"] for tag in page.all("meta") if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policy
    assert "default-src 'none'" in str(policy[0])


def test_every_picture_and_video_says_what_it_shows(page: Page) -> None:
    assert len(page.all("img")) > 10
    for image in page.all("img"):
        assert image.get("alt")
    for video in page.all("video"):
        assert video.get("aria-label")
    for control in page.all("input"):
        assert control.get("aria-label") or control.get("id") == "differ"
    assert page.all("html") == [{"lang": "en"}]
    assert page.all("meta")[1]["name"] == "viewport"


def test_ids_are_unique_and_labels_point_somewhere(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a} <= set(ids)


def test_embedded_videos_decode_to_the_frames_of_the_run(page: Page) -> None:
    wanted = {
        f"{o.cell.kind} scene {o.cell.scene}, generated with the {o.cell.method} cache": o.video
        for o in run(WANTED, FakeHost())
    }
    plain = [video for video in page.all("video") if video["class"] == "plain"]
    assert len(plain) == 2 * 2 * 4
    compared = 0
    for video in plain:
        decoded = film.decode(content(video["src"]))
        small = decoded.reshape(12, 32, 8, 32, 8, 3).mean(axis=(2, 4))
        if "true video" not in str(video["aria-label"]):
            error = np.square(small - wanted[str(video["aria-label"])]).mean()
            assert 10 * np.log10(255**2 / error) > 30
            compared += 1
    assert compared == 2 * 2 * 3
    assert len([video for video in page.all("video") if video["class"] == "difference"]) == 2 * 2 * 2


def test_embedded_pictures_are_pictures(page: Page) -> None:
    for image in page.all("img"):
        kind = str(image["src"]).partition(";")[0]
        file = content(image["src"])
        if kind == "data:image/png":
            assert matplotlib.image.imread(io.BytesIO(file)).shape[:2] == (32, 32)
        else:
            assert kind == "data:image/svg+xml"
            assert ET.fromstring(file).tag.endswith("svg")  # noqa: S314 - our own picture


def test_every_look_away_ending_is_shown(product: Product, page: Page) -> None:
    alts = [str(image["alt"]) for image in page.all("img")]
    for cell in product.results.cells:
        if cell.kind == "look-away":
            fate = "redrawn" if cell.measurement.values["balls_redrawn"] else "lost"
            assert f"{cell.method}, scene {cell.scene}: {fate}" in alts


def test_table_figures_are_the_means_of_the_cells(product: Product, page: Page) -> None:
    cells = [c for c in product.results.cells if c.kind == "walk" and c.method == "rtn"]
    words = " ".join(page.words)
    mean = np.mean([cell.measurement.values["psnr"] for cell in cells])
    assert f"{mean:.2f}" in words
    assert f"{mean:.2f}" in product.files[2].read_text()
    balls = sum(
        c.measurement.values["balls_redrawn"]
        for c in product.results.cells
        if c.method == "rtn" and c.kind == "look-away"
    )
    assert f"{balls:.0f} of 3" in words
    assert "∞" in words


def test_text_from_outside_is_escaped(text: str) -> None:
    assert "&lt;&amp;&gt;" in text
    assert "<&>" not in text


def test_a_failed_control_is_said_in_red(product: Product) -> None:
    spoiled = dataclasses.replace(
        product.results, cells=tuple(dataclasses.replace(cell, valid=cell.scene != 1) for cell in product.results.cells)
    )
    told = report.page(spoiled, Gallery(4), [])
    assert "Invalid run." in told
    assert "equals the first to the last bit" not in told
    assert "INVALID" in markdown.render(spoiled, "headline")
    assert "INVALID" not in markdown.render(product.results, "headline")


def test_a_page_without_look_away_and_videos_stands(product: Product) -> None:
    walks = dataclasses.replace(
        product.results,
        experiment=dataclasses.replace(WANTED, kinds=("walk",)),
        cells=tuple(cell for cell in product.results.cells if cell.kind == "walk"),
    )
    told = Page(report.page(walks, Gallery(4), []))
    assert told.all("video") == []
    assert "PSNR against BF16" in report.headline(walks)


def test_the_best_compressed_method_is_marked_and_the_control_never(product: Product) -> None:
    table = summary.main_table(product.results)
    rows = dict(table.rows)
    assert not any(entry.best for entry in rows["bf16"])
    marked = [[rows[label][column].best for label in ("rtn", "quantwm:rank=2")] for column in range(len(table.heads))]
    assert all(sum(marks) <= 1 for marks in marked)
    better = [summary.estimate(product.results, "walk", label, "psnr").mean for label in ("rtn", "quantwm:rank=2")]
    assert marked[table.heads.index("PSNR, dB ↑")] == [mean == max(better) for mean in better]


def test_bf16_under_a_shorter_window_competes_with_nobody() -> None:
    short = MethodChoice.parse("bf16:window=1")
    wanted = dataclasses.replace(WANTED, methods=(METHODS[0], short, METHODS[1]), scenes=(0,), kinds=("walk",))
    assert wanted.compressed == ("rtn",)
    found = Results(wanted, provenance.collect([]), tuple(outcome.cell for outcome in run(wanted, FakeHost())))
    assert not any(entry.best for entry in dict(summary.main_table(found).rows)[short.label])
    plots = {plot.title: plot.alternative for plot in figures.all_plots(found)}
    assert "window=1" not in plots["Quality against bits"]
    assert "window=1" not in plots["Selection shift by layer and head"]


def test_an_entry_of_fewer_scenes_says_of_how_many(product: Product) -> None:
    cells = tuple(c for c in product.results.cells if (c.kind, c.scene, c.method) != ("walk", 1, "rtn"))
    rows = dict(summary.detail_table(dataclasses.replace(product.results, cells=cells), "walk").rows)
    intervals = {label: [entry.interval for entry in entries if entry.interval] for label, entries in rows.items()}
    assert all(interval.endswith(", n = 2") for interval in intervals.pop("rtn"))
    assert not any("n = " in interval for others in intervals.values() for interval in others)
    assert "Mean over 3 scenes" in markdown.render(product.results, "headline")


def test_one_scene_has_no_interval() -> None:
    one = dataclasses.replace(WANTED, scenes=(0,), kinds=("walk",))
    cells = tuple(outcome.cell for outcome in run(one, FakeHost()))
    table = summary.detail_table(Results(one, provenance.collect([]), cells), "walk")
    assert all(entry.interval == "" for _, entries in table.rows for entry in entries)


def test_seeds_of_a_scene_are_averaged_before_scenes_are_counted() -> None:
    two = dataclasses.replace(WANTED, seeds=(0, 1), kinds=("walk",))
    cells = [outcome.cell for outcome in run(two, FakeHost())]
    found = summary.values(cells, "walk", "rtn", "ssim")
    assert len(found) == 3
    by_hand = [c.measurement.values["ssim"] for c in cells if c.method == "rtn" and c.scene == 1]
    assert found[1] == pytest.approx(np.mean(by_hand))


def test_the_best_is_the_lowest_where_lower_is_better() -> None:
    lower = Quantity("x", "X", "", "lower")
    assert summary.best_mean(lower, [3.0, float("nan"), 2.0]) == 2
    assert summary.best_mean(dataclasses.replace(lower, better="higher"), [3.0, 2.0]) == 3
    assert np.isnan(summary.best_mean(dataclasses.replace(lower, better="neither"), [3.0, 2.0]))
    assert np.isnan(summary.best_mean(lower, [2.0, 2.0]))


def test_plots_tell_their_figures_in_words(product: Product) -> None:
    plots = {plot.title: plot for plot in figures.all_plots(product.results)}
    assert list(plots) == [
        "Quality against bits", "Quality over time", "Drift from the truth", "Selection shift over time",
        "Logit error by age", "Logit error by position", "Query energy", "Selection shift by layer and head",
    ]  # fmt: skip
    by_age = [
        cell.measurement.ages["logit_error"]
        for cell in product.results.cells
        if (cell.kind, cell.method) == ("walk", "rtn")
    ]
    first, last = np.mean(by_age, axis=0)[1:][[0, -1]]
    assert f"rtn from {first:.4f} to {last:.4f}" in plots["Logit error by age"].alternative
    bits = summary.estimate(product.results, "walk", "rtn", "bits_per_element").mean
    assert (
        f"rtn {summary.estimate(product.results, 'walk', 'rtn', 'psnr').mean:.1f} dB at {bits:.2f} bits"
        in plots["Quality against bits"].alternative
    )
    assert all(plot.svg.startswith(b"<?xml") for plot in plots.values())


def test_plots_are_the_same_twice(product: Product) -> None:
    assert figures.all_plots(product.results) == figures.all_plots(product.results)


def test_a_run_that_breaks_off_keeps_its_finished_cells(tmp_path: Path) -> None:
    told: list[str] = []

    def break_off(title: str) -> None:
        told.append(title)
        if title == "look-away 0-2, reference":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce(WANTED, FakeHost(), provenance.collect([]), tmp_path, break_off)
    assert len(results.load(tmp_path / "results.jsonl").cells) == 3 * 3


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_run_is_replaced_when_the_new_one_has_succeeded(tmp_path: Path) -> None:
    one = dataclasses.replace(WANTED, scenes=(0,), kinds=("walk",))
    first = dataclasses.replace(one, methods=(*one.methods[:1], MethodChoice("rtn")))
    second = dataclasses.replace(one, methods=(*one.methods[:1], MethodChoice("qvg")))
    source = provenance.collect(["demo"])
    produce(first, FakeHost(), source, tmp_path, lambda _title: None)
    for mine in ("thesis.tex", "videos/mine.mp4"):
        (tmp_path / mine).write_bytes(b"mine")
    before = snapshot(tmp_path)
    assert "videos/walk-0-rtn.mp4" in before

    def break_off(title: str) -> None:
        if title == "walk 0, qvg":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce(second, FakeHost(), source, tmp_path, break_off)
    (unfinished,) = tmp_path.glob("unfinished-*")
    assert len(results.load(unfinished / "results.jsonl").cells) == 1
    assert {name: content for name, content in snapshot(tmp_path).items() if "unfinished" not in name} == before

    shutil.rmtree(unfinished)
    made = produce(second, FakeHost(), source, tmp_path, lambda _title: None)
    after = snapshot(tmp_path)
    assert after.keys() == {name.replace("rtn", "qvg") for name in before}
    assert (after["thesis.tex"], after["videos/mine.mp4"]) == (b"mine", b"mine")
    assert results.load(tmp_path / "results.jsonl").experiment == second
    assert made.files[0] == tmp_path / "results.jsonl"
    assert not list(tmp_path.glob("unfinished-*"))


def test_a_dash_says_why() -> None:
    names = ("psnr", "memory", "selection_shift", "object_permanence", "peak_memory")

    def told(samples: int, per_seal: int, without: str = "") -> str:
        wanted = Experiment(
            METHODS[:2],
            scenes=(0,),
            frames=4,
            chunks_per_seal=per_seal,
            samples=samples,
            metrics=names,
            kinds=("walk",),
        )
        cells = tuple(outcome.cell for outcome in run(wanted, FakeHost()) if outcome.cell.method != without)
        found = Results(wanted, provenance.collect(()), cells)
        return "\n".join((tables.text(found), markdown.render(found, "any"), *map(str, report.cards(found))))

    assert "– (no query was sampled)" in told(samples=0, per_seal=1)
    assert "– (nothing sealed was read)" in told(samples=4, per_seal=2)
    assert "– (nothing was sealed)" in told(samples=4, per_seal=9)
    assert "Not measured: object_permanence (no look-away test), peak_memory (no GPU)." in told(samples=4, per_seal=1)
    assert "– (not run yet)" in told(samples=4, per_seal=1, without="rtn")
    assert "– (" not in told(samples=4, per_seal=1).replace("– (no", "–")
