"""The page on evaluation says what the commands take."""

import re
import shlex
import tomllib
from importlib.metadata import EntryPoints
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from quantwm_core import plugin
from quantwm_eval import cli, experiment_file, hosts, metrics, named
from tests.distributions import install

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_command_on_the_page_can_be_typed() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) == 18
    for line in lines:
        program, *arguments = shlex.split(line.partition(" > ")[0], comments=True)
        assert program == "quantwm"
        cli.parser().parse_args(arguments)


def test_the_experiment_on_the_page_is_one() -> None:
    (plain,) = (plain for text in blocks("toml") if "methods" in (plain := tomllib.loads(text)))
    wanted = experiment_file.build(experiment_file.settings(plain))
    assert [method.label for method in wanted.methods] == ["bf16", "kivi", "qvg", "quantwm:rank=16"]
    assert (len(wanted.scenes), wanted.seeds, wanted.batch) == (8, (0, 1), 1)


def test_the_entry_points_on_the_page_are_those_that_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [plain["project"]["entry-points"] for text in blocks("toml") if "project" in (plain := tomllib.loads(text))]
    asked: set[str] = set()

    def entry_points(group: str) -> EntryPoints:
        asked.add(group)
        return EntryPoints()

    monkeypatch.setattr(plugin, "entry_points", entry_points)
    for family in (metrics, hosts):
        family.names()
    assert {group for entries in told for group in entries} == asked


def test_the_host_on_the_page_is_measured_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = next(number for number, text in enumerate(blocks("python")) if "class Pond:" in text)
    (tmp_path / "pond_of_the_page.py").write_text("\n".join(blocks("python")[first : first + 2]))
    (tmp_path / "pictures").mkdir()
    for number in range(2):
        level = np.full((32, 32, 3), 80 * number, np.uint8)
        PIL.Image.fromarray(level).save(tmp_path / "pictures" / f"{number}.png")
    install(tmp_path, "pond", "quantwm.hosts", {"pond": "pond_of_the_page:load"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (typed,) = (text.splitlines() for text in blocks("sh") if "--host pond" in text)
    for line in typed:
        assert cli.main(shlex.split(line)[1:]) == 0
    assert "prompt: PSNR, dB ↑" in capsys.readouterr().out


def test_every_metric_is_on_the_page() -> None:
    assert [name for name in metrics.names() if f"`{name}`" not in PAGE] == []


def test_every_bundled_experiment_and_host_is_on_the_page() -> None:
    assert [name for name in (*named.names(), *hosts.names()) if f"`{name}`" not in PAGE and name != "demo"] == []
