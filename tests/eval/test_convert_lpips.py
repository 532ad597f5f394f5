"""The script that makes LPIPS's weights: it reads arrays out of a pickle, and nothing else."""

import importlib.util
import io
import pickle  # noqa: TID251  # the script reads such files, restricted; the test writes them
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from quantwm_eval.lpips import NETWORKS, bundled

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_lpips.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_lpips", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Harmful:
    """A pickle of it would call a function when it is read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, ("harm",)


def test_arrays_are_read_and_whatever_else_is_named_is_refused(script: ModuleType) -> None:
    plain = {"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}}
    # As the sdist was written: protocol 3 and NumPy before version 2.
    content = pickle.dumps(plain, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    found = script.ArrayUnpickler(io.BytesIO(content)).load()
    np.testing.assert_array_equal(found["a"]["kernel"], plain["a"]["kernel"])
    for harmful in (Harmful(), print, np.load):
        with pytest.raises(pickle.UnpicklingError, match="no part of a NumPy array"):
            script.ArrayUnpickler(io.BytesIO(pickle.dumps(harmful))).load()


@pytest.mark.parametrize(("network", "name"), [("alexnet", "AlexNet_0"), ("vgg16", "VGG16_0")])
def test_kernels_are_turned_into_torchs_order(script: ModuleType, network: str, name: str) -> None:
    draw = np.random.default_rng(0)
    layers, taps = len(NETWORKS[network]), sum(layer.tap for layer in NETWORKS[network])
    plain = {
        name: {
            f"Conv_{i}": {"kernel": draw.normal(size=(3, 5, 2, 4 + i)), "bias": draw.normal(size=4 + i)}
            for i in range(layers)
        }
    } | {f"NetLinLayer_{i}": {"Conv_0": {"kernel": draw.normal(size=(1, 1, 7, 1))}} for i in range(taps)}
    found = script.convert(plain, network)
    assert len(found) == 2 * layers + taps
    assert all(tensor.dtype == torch.float16 for tensor in found.values())
    weight = found["convolution.2.weight"]
    assert weight.shape == (6, 2, 3, 5)
    assert weight[5, 1, 2, 4].item() == np.float16(plain[name]["Conv_2"]["kernel"][2, 4, 1, 5])
    assert found["linear.0"].shape == (7,)


def test_the_bundled_network_has_alexnets_shapes() -> None:
    shapes = [tuple(weight.shape) for weight, _ in bundled().convolutions]
    assert shapes == [(64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3)]
    assert [len(weights) for weights in bundled().linear] == [64, 192, 384, 256, 256]
    assert all(weights.min() >= 0 for weights in bundled().linear)  # else it were no distance


def test_another_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.tar.gz").write_bytes(b"another")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "other.tar.gz"), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "its SHA-256 is another one" in ended.stderr
    assert not (tmp_path / "out").exists()
