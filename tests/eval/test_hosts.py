"""Hosts that experiments load: from a checkout, weights and prompts to results; and whatever may be missing."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantwm_core import plugin
from quantwm_core.errors import FormatError, ParameterError, UnknownNameError
from quantwm_core.method import scheme
from quantwm_eval import cli, hosts, results
from quantwm_eval.demo_host import DemoHost
from quantwm_eval.hosts import Setup
from quantwm_eval.hosts.causal_forcing import CausalForcingHost
from tests.eval import fake_checkout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_checkout.write(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(autouse=True)
def small(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("quantwm_eval.hosts.causal_forcing.LATENT", fake_checkout.LATENT)
    with fake_checkout.imported(checkout):
        yield


def setup(checkout: Path) -> Setup:
    return Setup(checkout=checkout, weights=checkout / "weights.safetensors", inputs=checkout / "prompts.txt")


def loaded(checkout: Path) -> CausalForcingHost:
    host = hosts.get("causal_forcing")(setup(checkout))
    assert isinstance(host, CausalForcingHost)
    return host


def options(checkout: Path) -> list[str]:
    given = setup(checkout)
    paths = {"checkout": given.checkout, "weights": given.weights, "inputs": given.inputs}
    return ["--host", "causal_forcing", *(word for name, path in paths.items() for word in (f"--{name}", str(path)))]


def test_a_named_experiment_runs_on_a_host_with_the_hosts_own_settings(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout.parent)
    monkeypatch.setattr(CausalForcingHost, "frames", 45)
    given = ["eval", "paper/table4", *options(checkout), "--scenes", "0,1", "--out", str(tmp_path)]
    assert cli.main(given) == 0
    assert Path.cwd() == checkout.parent
    told = capsys.readouterr()
    found = results.load(tmp_path / "results.jsonl")
    wanted = found.experiment
    assert (wanted.model, wanted.kinds, wanted.frames, wanted.batch) == ("causal_forcing", ("prompt",), 45, 1)
    assert found.valid
    assert found.missing == 0
    assert "What the paper states, and what was measured on causal_forcing" in told.out
    shifts = {cell.method: cell.measurement.values["selection_shift"] for cell in found.cells if cell.scene == 0}
    assert shifts["bf16"] == 0 < shifts["quantwm"] < shifts["qvg"]
    bits = {cell.method: cell.measurement.values["bits_per_element"] for cell in found.cells}
    assert bits["bf16"] == 16 > bits["quantwm"]
    assert all(len(cell.measurement.curves["cache_bytes"]) == 45 // 12 + 1 for cell in found.cells)
    before = (tmp_path / "results.jsonl").read_bytes()
    assert cli.main(given) == 0
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_the_weights_are_those_of_the_file_and_videos_follow_prompt_and_seed(checkout: Path) -> None:
    host = loaded(checkout)
    before = torch.get_rng_state()
    episodes = host.episodes("prompt", (0, 1), 21, 0)
    assert [episode.prompt for episode in episodes] == ["a door", "a window"]
    chunks: list[int] = []

    def video(episode: int, seed: int) -> np.ndarray:
        return host.generate([episodes[episode]], [seed], lambda: chunks.append(1))[0]

    first, again, other, seeded = video(0, 0), video(0, 0), video(1, 0), video(0, 1)
    assert first.shape == (21, 32, 32, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, seeded)
    assert len(chunks) == 4 * 2
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        host.pipeline.generator.model.blocks[0].self_attn.weights.zero_()
    assert not np.array_equal(video(0, 0), first)


def test_the_cache_comes_and_goes(checkout: Path) -> None:
    host = loaded(checkout)
    episodes = host.episodes("prompt", (1,), 33, 0)
    plain = host.generate(episodes, [0], lambda: None)[0]
    with host.attach(scheme("bf16"), []) as attached:
        np.testing.assert_array_equal(host.generate(episodes, [0], lambda: None)[0], plain)
        assert attached.use().stored.sealed > 0
    with host.attach(scheme("rtn"), []):
        assert not np.array_equal(host.generate(episodes, [0], lambda: None)[0], plain)
    np.testing.assert_array_equal(host.generate(episodes, [0], lambda: None)[0], plain)
    with pytest.raises(ParameterError, match="window 3"), host.attach(scheme("rtn"), [], window=3):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--frames": "46"}, "need one of 9, 21, 33, 45, 57, 69, 81 up to 81"),
        ({"--frames": "93"}, "makes whole chunks, 7 at most"),
        ({"--scenes": "0-2"}, "the suite has prompts 0 to 1"),
        ({"--kinds": "walk"}, "unknown kind of episode of host 'causal_forcing'"),
        ({"--batch": "2"}, "batch 2: host 'causal_forcing' makes one video at a time"),
        ({"--size": "720p"}, "host 'causal_forcing' is written for 480p"),
        ({"--checkout": "absent"}, "--checkout absent: there is no such"),
        ({"--checkout": __file__}, "test_hosts.py: is a file; name the folder of the host's code"),
        ({"--weights": None}, "needs --weights PATH"),
        ({"--config": "configs/absent.yaml"}, "configs/absent.yaml and no /"),
        ({"--config": "configs/many_steps.yaml"}, "many_steps.yaml: names no denoising_step_list"),
        ({"--config": "configs/torn.yaml"}, "torn.yaml: no YAML that can be read: 'utf-8' codec can't decode"),
        ({"--config": "configs/list.yaml"}, "list.yaml: need settings by name, got list"),
        ({"--host": "sglang"}, "experiments cannot load it (they load causal_forcing, demo, hy_world,"),
        ({"--host": "causal_forcin"}, "did you mean 'causal_forcing'"),
        ({"--host": "demo"}, "the demo world has no use for it"),
    ],
)  # fmt: skip
def test_what_a_host_cannot_do_is_said_before_anything_runs(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str | None], message: str
) -> None:
    typed: dict[str, str | None] = {"--frames": "21", "--scenes": "0", "--methods": "rtn"}
    words = options(checkout)
    typed |= dict(zip(words[::2], words[1::2], strict=True)) | change
    given = [word for name, value in typed.items() if value is not None for word in (name, value)]
    assert cli.main(["eval", *given, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--scenes": "0-2"}, "the suite has prompts 0 to 1"),
        ({"--batch": "2"}, "batch 2: host 'causal_forcing' makes one video at a time"),
        ({"--weights": __file__}, "test_hosts.py: not safetensors"),
        ({"--weights": str(Path(__file__).parent)}, "eval: is a folder; name the file of safetensors"),
        ({"--inputs": "empty.txt"}, "empty.txt: holds no prompt"),
        ({"--config": "absent.yaml"}, "there is no "),
    ],
)  # fmt: skip
def test_what_takes_nothing_of_the_hosts_is_looked_at_first(
    checkout: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    bare = fake_checkout.write(tmp_path / "bare")
    (bare / "omegaconf.py").write_text("import a_library_that_nobody_has\n")
    words = options(bare)
    typed = {"--scenes": "0", "--methods": "rtn"} | dict(zip(words[::2], words[1::2], strict=True)) | change
    with fake_checkout.imported(bare):
        assert cli.main(["eval", *(word for pair in typed.items() for word in pair)]) == 2
    assert message in capsys.readouterr().err


def test_a_checkout_that_lacks_something_is_named(checkout: Path, tmp_path: Path) -> None:
    given = setup(checkout)
    load = hosts.get("causal_forcing")
    with pytest.raises(ParameterError, match="names no denoising_step_list"):
        load(Setup("cpu", checkout, given.weights, given.inputs, checkout / "configs" / "many_steps.yaml"))
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04")
    (tmp_path / "empty.txt").write_text("\n \n")
    for name, message in (("other.safetensors", "not the weights of Generator"), ("pickle.pt", "not safetensors")):
        with pytest.raises(FormatError, match=message):
            load(Setup("cpu", checkout, tmp_path / name, given.inputs))
    with pytest.raises(FormatError, match="holds no prompt"):
        load(Setup("cpu", checkout, given.weights, tmp_path / "empty.txt"))


def test_a_module_of_another_place_is_not_taken_for_the_checkouts(checkout: Path, tmp_path: Path) -> None:
    other = fake_checkout.write(tmp_path / "other")
    loaded(checkout)  # its module of that name stays imported
    given = setup(checkout)
    with pytest.raises(ParameterError, match="was imported from"):
        hosts.get("causal_forcing")(Setup("cpu", other, given.weights, given.inputs))


def test_the_checkouts_pipeline_needs_its_libraries(checkout: Path, tmp_path: Path) -> None:
    bare = fake_checkout.write(tmp_path / "bare")
    (bare / "pipeline" / "__init__.py").write_text("import a_library_that_nobody_has\n")
    given = setup(checkout)
    with fake_checkout.imported(bare), pytest.raises(ParameterError, match="a_library_that_nobody_has"):
        hosts.get("causal_forcing")(Setup("cpu", bare, given.weights, given.inputs))


def test_every_host_of_the_paper_is_loaded_by_name() -> None:
    assert hosts.names() == ("causal_forcing", "demo", "hy_world", "lingbot_world", "longcat_video", "matrix_game")
    with pytest.raises(UnknownNameError, match="did you mean 'demo'"):
        hosts.get("demos")


def test_others_bring_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("mine", "quantwm_eval.hosts.demo:load", "quantwm.hosts")])
    monkeypatch.setattr(plugin, "entry_points", points.select)
    assert isinstance(hosts.get("mine")(Setup()), DemoHost)
