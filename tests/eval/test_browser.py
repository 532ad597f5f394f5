"""The page in a real browser: it asks for nothing, complains of nothing, and its videos play in step."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantwm_eval import provenance
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.produce import produce
from tests.eval.browser import Tab, tab
from tests.eval.fake_host import FakeHost

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium; apt install chromium")

WANTED = Experiment(
    (MethodChoice("bf16"), MethodChoice("rtn"), MethodChoice("quantwm")), scenes=(0, 1), frames=24, chunks_per_seal=1
)
FRAMES = "[...document.querySelectorAll('.reel:not([hidden]) video')].map(v => Math.floor(v.currentTime * 4 + 1e-3))"
PAUSE = "new Promise(done => setTimeout(done, {}))"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert PROGRAM is not None
    folder = tmp_path_factory.mktemp("page")
    produce(WANTED, FakeHost(), provenance.collect(["eval"]), folder, lambda _title: None)
    with tab(PROGRAM, tmp_path_factory.mktemp("browser")) as opened:
        opened.open(folder / "report.html")
        yield opened


def test_it_asks_for_nothing_and_complains_of_nothing(page: Tab) -> None:
    page.evaluate(PAUSE.format(200))
    assert page.evaluate("document.querySelector('h1').textContent")
    asked = [address for address in page.requests if not address.startswith(("data:", "blob:"))]
    assert [address.rpartition("/")[2] for address in asked] == ["report.html"]
    assert page.complaints == []
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert page.evaluate("[...document.images].every(image => image.alt)")


def test_its_videos_decode_and_play_in_step(page: Tab) -> None:
    ready = "[...document.querySelectorAll('.reel:not([hidden]) video')].every(v => v.readyState >= 2 && !v.error)"
    for _ in range(50):
        if page.evaluate(ready):
            break
        page.evaluate(PAUSE.format(100))
    assert page.evaluate(ready)
    assert page.evaluate(f"{FRAMES}.length") == 1 + 3 + 2  # truth, methods, differences of two
    page.evaluate("document.getElementById('player').focus()")
    if page.evaluate("document.getElementById('play').getAttribute('aria-label')") == "Play":
        page.evaluate("document.getElementById('play').click()")
    page.evaluate(PAUSE.format(1500))
    frames = page.evaluate(FRAMES)
    assert max(frames) - min(frames) <= 1, frames
    assert page.complaints == []


def test_the_keyboard_steps_every_video_to_the_same_frame(page: Tab) -> None:
    key = "document.getElementById('player').dispatchEvent(new KeyboardEvent('keydown', {{key: '{}', bubbles: true}}))"
    page.evaluate(key.format("Home"))
    page.evaluate(PAUSE.format(300))
    if page.evaluate("document.getElementById('play').getAttribute('aria-label')") == "Pause":
        page.evaluate("document.getElementById('play').click()")
        page.evaluate(key.format("Home"))
        page.evaluate(PAUSE.format(300))
    assert set(page.evaluate(FRAMES)) == {0}
    for _ in range(3):
        page.evaluate(key.format("ArrowRight"))
    page.evaluate(PAUSE.format(300))
    assert set(page.evaluate(FRAMES)) == {3}
    assert page.evaluate("document.getElementById('frame').textContent").startswith("4 /")
    page.evaluate(key.format("n"))
    page.evaluate(PAUSE.format(300))
    assert page.evaluate("document.querySelectorAll('[data-reel][aria-pressed=true]')[0].dataset.reel") == "1"


def test_the_wipe_shows_one_video_left_of_the_line_and_another_right_of_it(page: Tab) -> None:
    pause = "if (document.getElementById('play').getAttribute('aria-label') === 'Pause') document.getElementById('play').click()"
    page.evaluate(pause)
    page.evaluate(PAUSE.format(300))
    assert page.evaluate("[...document.getElementById('left').options].map(o => o.value)") == [
        "truth",
        "bf16",
        "rtn",
        "quantwm",
    ]
    assert page.evaluate("[left.value, right.value]") == ["bf16", "quantwm"]
    page.evaluate(
        "left.value = 'truth'; right.value = 'rtn'; split.value = 25; split.dispatchEvent(new Event('input'))"
    )
    # Mean difference from each of the two videos, left and right of the line.
    found = page.evaluate(
        """(() => {
          const {width, height} = both, edge = width / 4;
          const shown = [...document.querySelectorAll(".reel:not([hidden]) figure")];
          const pixels = (source, from, to) => {
            const copy = new OffscreenCanvas(width, height).getContext("2d");
            copy.drawImage(source, 0, 0);
            return copy.getImageData(from, 0, to - from, height).data;
          };
          const apart = (a, b) => a.reduce((sum, x, i) => sum + Math.abs(x - b[i]), 0) / a.length;
          const videos = [0, 2].map((index) => shown[index].querySelector(".plain"));
          return [[0, edge - 2], [edge + 2, width]].map((part) => videos.map((video) => apart(pixels(both, ...part), pixels(video, ...part))));
        })()"""
    )
    (left_truth, left_rtn), (right_truth, right_rtn) = found
    assert left_truth == right_rtn == 0
    assert min(left_rtn, right_truth) > 0
    assert page.complaints == []


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(page: Tab, width: int, tmp_path: Path) -> None:
    page.resize(width, 900)
    page.evaluate(PAUSE.format(100))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
