"""Hosts that run from a checkout: released weights and scenes in, results of a whole experiment out; and what is missing."""

import os
import random
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantwm_core.errors import FormatError, ParameterError, QuantWMError
from quantwm_core.method import scheme
from quantwm_eval import cli, hosts, results
from quantwm_eval.checkout_host import CheckoutHost
from quantwm_eval.footage import Footage
from quantwm_eval.hosts import Setup
from quantwm_eval.hosts.hy_world import alone
from quantwm_eval.hosts.longcat_video import GIVEN, LongCatVideoHost
from quantwm_eval.suite import Scene
from tests.eval import fake_hosts

HOSTS = tuple(fake_hosts.FILES)
ENOUGH = {"lingbot_world": 61, "matrix_game": 33, "hy_world": 29, "longcat_video": 40}
"""Frames after which every host has read what it sealed before."""
METRICS = "psnr,memory,latency,reconstruction_error,selection_shift,logit_error,attention_kl,output_error,query_energy"
FIGURES = {"psnr", "seconds", "key_error", "value_error", *METRICS.split(",")[4:]}


@pytest.fixture(scope="module", params=HOSTS)
def checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_hosts.write(request.param, tmp_path_factory.mktemp("checkouts") / request.param)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantwm_eval.hosts.lingbot_world.gpu", lambda _: 0)


@pytest.fixture
def setup(checkout: Path) -> Iterator[Setup]:
    with fake_hosts.imported(checkout):
        yield Setup(checkout=checkout, weights=checkout / "weights", inputs=checkout / "scenes")


def loaded(setup: Setup, **changed: Any) -> CheckoutHost:
    assert setup.checkout is not None
    host = hosts.get(setup.checkout.name)(Setup(**(vars(setup) | changed)))
    assert isinstance(host, CheckoutHost)
    return host


def test_an_experiment_runs_with_the_metrics_of_queries(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup.checkout is not None
    name, frames = setup.checkout.name, ENOUGH[setup.checkout.name]
    paths = [word for part in ("checkout", "weights", "inputs") for word in (f"--{part}", str(getattr(setup, part)))]
    options = ["--host", name, *paths, "--scenes", "0,1", "--frames", str(frames), "--metrics", METRICS]
    options += ["--out", str(tmp_path)]
    assert cli.main(["eval", "--methods", "rtn,quantwm", *options]) == 0
    assert "a host that talks" not in capsys.readouterr().out
    found = results.load(tmp_path / "results.jsonl")
    assert found.valid
    assert found.missing == 0
    assert (found.experiment.model, found.experiment.kinds, found.experiment.batch) == (name, ("prompt",), 1)
    for cell in found.cells:
        values = cell.measurement.values
        assert values.keys() >= FIGURES
        assert all(np.isfinite(values[figure]) for figure in FIGURES - {"psnr"})
        assert (values["selection_shift"] == 0) == (cell.method == "bf16")
        assert (values["bits_per_element"] == 16) == (cell.method == "bf16")


def test_videos_follow_the_scene_and_the_seed_and_nothing_else(setup: Setup) -> None:
    host = loaded(setup)
    before = torch.get_rng_state(), random.getstate(), dict(os.environ)
    frames, chunks = ENOUGH[host.name], []
    episodes = host.episodes("prompt", (0, 1), frames, 0)

    def video(episode: int, seed: int) -> np.ndarray:
        return host.generate([episodes[episode]], [seed], lambda: chunks.append(1))[0]

    first, again, other, seeded = video(0, 0), video(0, 0), video(1, 0), video(0, 1)
    assert first.shape[::3] == (frames, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, seeded)
    assert host.frames_of(len(chunks) // 4) == frames
    with host.attach(scheme("bf16"), []) as attached:
        np.testing.assert_array_equal(video(0, 0), first)
        assert attached.use().stored.sealed > 0
    after = torch.get_rng_state(), random.getstate(), dict(os.environ)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert before[2] == after[2]


def test_weights_are_those_of_the_folder(setup: Setup, tmp_path: Path) -> None:
    assert setup.weights is not None
    host = loaded(setup)
    (episode,) = host.episodes("prompt", (0,), ENOUGH[host.name], 0)
    first = host.generate([episode], [0], lambda: None)[0]
    others = shutil.copytree(setup.weights, tmp_path / "others")
    for path in sorted(others.rglob("*.safetensors")):
        scaled = {name: 0.5 * x for name, x in load_file(path).items()}
        save_file(scaled, path)
    assert not np.array_equal(loaded(setup, weights=others).generate([episode], [0], lambda: None)[0], first)
    shutil.rmtree(others)
    others.mkdir()
    with pytest.raises(ParameterError, match=r"--weights .* holds no "):
        loaded(setup, weights=others)


def test_what_a_host_does_not_make_is_refused(setup: Setup) -> None:
    assert setup.checkout is not None
    made = {"lingbot_world": "480p 720p", "longcat_video": "480p 720p", "hy_world": "720p", "matrix_game": ""}
    for size in ("480p", "720p"):
        if size in made[setup.checkout.name]:
            loaded(setup, size=size)
        else:
            with pytest.raises(ParameterError, match=f"--size {size}: host '{setup.checkout.name}' makes"):
                loaded(setup, size=size)
    early: list[tuple[dict[str, Any], str]] = [
        ({"scenes": (2,)}, "prompts 0 to 1"),
        ({"batch": 2}, "one video at a time"),
        ({"weights": Path(__file__)}, "is a file; name the folder"),
    ]
    if setup.checkout.name != "matrix_game":  # whose configuration says what a chunk is
        early.append(({"frames": 31}, "makes whole chunks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantwm_eval.checkout.library", pytest.fail)
        for change, message in early:
            with pytest.raises(ParameterError, match=message):
                loaded(setup, **change)
    if setup.checkout.name != "matrix_game":
        with pytest.raises(ParameterError, match="has its settings in its code"):
            loaded(setup, config=setup.checkout / "any.yaml")
    for part in ("checkout", "weights", "inputs"):
        with pytest.raises(ParameterError, match=f"needs --{part} PATH"):
            loaded(setup, **{part: None})
    with pytest.raises(ParameterError, match="makes whole chunks"):
        loaded(setup).check((0,), 31, 0)
    with pytest.raises(ParameterError, match="prompts 0 to 1"):
        loaded(setup).check((2,), ENOUGH[setup.checkout.name], 0)


LACKING: dict[str, list[tuple[str, str | None, type[QuantWMError], str]]] = {
    "lingbot_world": [
        ("00/prompt.txt", None, ParameterError, "needs a prompt"),
        ("00/image.jpg", None, ParameterError, "needs image there"),
        ("00/intrinsics.npy", None, ParameterError, "needs intrinsics there"),
        ("00/poses.npy", "3", ParameterError, r"got shape \(3, 4, 4\), need \[61 or more, 4, 4\]"),
        ("00/poses.npy", "text", FormatError, "no array that can be read"),
        ("00/poses.npy", "archive", FormatError, "no array that can be read"),
        ("00/poses.npy", "torn", FormatError, "no array that can be read"),
        ("00/intrinsics.npy", "3", ParameterError, r"got shape \(3, 4, 4\), need \[1 or more, 4\]"),
    ],
    "matrix_game": [
        ("0000.npz", "text", FormatError, "no .npz of keyboard, mouse"),
        ("0000.npz", "torn", FormatError, "no .npz of keyboard, mouse"),
        ("0000.npz", "array", FormatError, "no .npz of keyboard, mouse: it is a single array"),
        ("0000.npz", "3", FormatError, r"keyboard has shape \(3, 4\), need \[33 or more, 4\]"),
    ],
    "hy_world": [
        ("00/prompt.txt", None, ParameterError, "needs a prompt"),
        ("00/pose.txt", "w-2", ParameterError, "3 cameras; 29 frames are 8 latent frames"),
        ("00/pose.txt", "forward", FormatError, "no camera path of the host"),
        ("00/pose.json", "[1, 2]", FormatError, "no camera path of the host: need an object, .* got list"),
        ("00/pose.json", "{", FormatError, "no camera path of the host"),
        ("00/pose.json", '{"0": {}}', ParameterError, "1 cameras; 29 frames are 8 latent frames"),
    ],
    "longcat_video": [
        ("00/prompt.txt", None, ParameterError, "needs a prompt"),
        ("00/video/0.png", "picture", ParameterError, "has 1 frames, a segment is given 73"),
        ("00/video/0/0.png", "picture", ParameterError, "has 1 frames, a segment is given 73"),
        ("00/video/1.mp4", "beside 0.mp4", FormatError, "holds 2 videos, 0, 1; keep the one to be continued"),
    ],
}


def test_a_scene_that_lacks_something_is_named(setup: Setup, tmp_path: Path) -> None:
    assert setup.checkout is not None
    assert setup.inputs is not None
    name = setup.checkout.name
    for number, (file, content, error, message) in enumerate(LACKING[name]):
        path = shutil.copytree(setup.inputs, tmp_path / str(number)) / file
        path.parent.mkdir(exist_ok=True, parents=True)
        put(path, content)
        with pytest.raises(error, match=message) as raised:
            loaded(setup, inputs=tmp_path / str(number)).check((0, 1), ENOUGH[name], 0)
        assert str(tmp_path / str(number) / "00") in str(raised.value)


def put(path: Path, content: str | None) -> None:
    """Put something else where a scene's file is: nothing, a picture, an array of so many frames, another file, or words."""
    if content is None:
        path.unlink()
    elif content == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros((40, 4)))
    elif content == "archive":
        with path.open("wb") as file:
            np.savez(file, keyboard=np.zeros((40, 4)), mouse=np.zeros((40, 2)))
    elif content == "torn":
        path.write_bytes(b"PK\x03\x04 and nothing more")
    elif content.startswith("beside "):
        for each in (path, path.with_name(content.removeprefix("beside "))):
            each.write_bytes(b"")
    elif content == "picture":
        PIL.Image.new("RGB", (32, 32), (200, 100, 50)).save(path)
    elif not content.isdigit():
        path.write_text(content)
    elif path.suffix == ".npy":
        np.save(path, np.zeros((int(content), 4, 4)))
    else:
        np.savez(path, keyboard=np.zeros((int(content), 4)), mouse=np.zeros((int(content), 2)))


def test_what_a_scene_offers_is_used(setup: Setup, tmp_path: Path) -> None:
    assert setup.checkout is not None
    assert setup.inputs is not None
    name = setup.checkout.name
    host = loaded(setup)
    (episode,) = host.episodes("prompt", (0,), ENOUGH[name], 0)
    plain = host.generate([episode], [0], lambda: None)[0]
    scenes = shutil.copytree(setup.inputs, tmp_path / "scenes")
    if name == "matrix_game":
        np.savez(scenes / "0000.npz", keyboard=np.ones((40, 4)), mouse=np.ones((40, 2)))
    elif name == "lingbot_world":
        np.save(scenes / "00" / "poses.npy", np.full((40, 4, 4), 0.3))
    else:
        put(scenes / "00" / "image.png", "picture")
    host = loaded(setup, inputs=scenes)
    assert not np.array_equal(host.generate([episode], [0], lambda: None)[0], plain)
    if name == "longcat_video":
        for frame in range(80):
            PIL.Image.new("RGB", (32, 32), (frame, 0, 0)).save(scenes / "00" / f"{frame}.png")
        (scenes / "00" / "video").mkdir()
        for frame in range(80):
            (scenes / "00" / f"{frame}.png").rename(scenes / "00" / "video" / f"{frame}.png")
        other = loaded(setup, inputs=scenes).generate([episode], [0], lambda: None)[0]
        assert not np.array_equal(other, plain)


def test_a_device_and_a_mode_that_a_host_has_not(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    assert setup.checkout is not None
    monkeypatch.undo()
    if setup.checkout.name == "lingbot_world":
        with pytest.raises(ParameterError, match="written for CUDA"):
            loaded(setup)
    if setup.checkout.name == "matrix_game":
        config = Path("configs/inference_yaml/inference_gta_drive.yaml")  # of the checkout, wherever one is
        with pytest.raises(ParameterError, match="holds no gta_distilled_model/gta_keyboard2dim"):
            loaded(setup, config=config)
        with pytest.raises(ParameterError, match=r"there is no .*absent\.yaml and no .*absent\.yaml"):
            loaded(setup, config=config.with_name("absent.yaml"))
        (setup.checkout / "modeless.yaml").write_text("model_kwargs: {}\n")
        with pytest.raises(ParameterError, match=r"modeless\.yaml: names no mode"):
            loaded(setup, config=Path("modeless.yaml"))


def test_the_environment_may_change_while_a_host_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with alone():
        assert os.environ.pop("WORLD_SIZE") == "0"
    assert os.environ["WORLD_SIZE"] == "2"
    monkeypatch.delenv("WORLD_SIZE")
    with alone():
        del os.environ["WORLD_SIZE"]
    assert "WORLD_SIZE" not in os.environ


def test_a_long_film_is_read_frame_by_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = most = 0

    def gone() -> None:
        nonlocal now
        now -= 1

    def frames(_: Footage) -> Iterator[np.ndarray]:
        nonlocal now, most
        for level in range(300):
            frame = np.full((2, 2, 3), level % 256, np.uint8)
            weakref.finalize(frame, gone)
            now += 1
            most = max(most, now)
            yield frame

    (tmp_path / "film.mp4").touch()
    monkeypatch.setattr(Footage, "frames", frames)
    pipeline, scene = SimpleNamespace(), Scene("here", "a door", {"video": tmp_path / "film.mp4"})
    LongCatVideoHost(pipeline, (scene,), torch.device("cpu"), "480p").check((0,), 20, 0)
    assert GIVEN < most < GIVEN + 5
