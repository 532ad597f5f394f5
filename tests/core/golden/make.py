"""Write the golden files of the current format version: ``python -m tests.core.golden.make``.

``recording.safetensors`` holds keys, values and queries. Per entry of :data:`SCHEMES`, ``NAME.vN.qwm.safetensors`` is
what this version seals them into, and ``NAME.vN.expected.safetensors`` is what that decodes to. A golden file that
exists is never written again: a release that stores something else has another format version, and goes on reading
the files of this one.
"""

from pathlib import Path

import numpy as np

from quantwm_core import archive, chunk
from quantwm_core.domain import BF16
from quantwm_core.method import Scheme, scheme
from tests.core import strategies

FOLDER = Path(__file__).parent
RECORDING = FOLDER / "recording.safetensors"
# 67 tokens: zero-points share a byte, a group of KIVI's is ragged, and the second count of sparse values matters.
CHUNK_TOKENS = 67
HEADS, CHANNELS, CHUNKS = 2, 16, 2

SCHEMES: dict[str, Scheme] = {
    "bf16": scheme("bf16"),
    "kivi": scheme("kivi", residual_length=10),
    "klt": scheme("klt"),
    "klt-layer": scheme("klt", bits=3.0, allocation="layer", lifetime=0.0),
    "kvtc": scheme("kvtc", bits=1.25),
    "oscar": scheme("oscar"),
    "quantwm": scheme("quantwm", centroids=8, group_size=8, rank=4),
    "quantwm-sparse": scheme("quantwm", centroids=8, group_size=8, rank=4, threshold=0.01),
    "quantwm-sharp": scheme(
        "quantwm",
        centroid_bits=4,
        group_size=8,
        rank=5,
        coefficient_bits=4,
        scale_candidates=3,
        rounding="feedback",
    ),
    "qvg": scheme("qvg", centroids=8),
    "qvg-affine": scheme("qvg", quantizer="affine", centroids=4, group_size=8, stages=2),
    "rtn": scheme("rtn", group_size=8),
    "rtn-channel": scheme("rtn", granularity="channel", group_size=32),
}


def sealed_path(name: str) -> Path:
    """Where the sealed chunks of an entry stand."""
    return FOLDER / f"{name}.v{chunk.FORMAT_VERSION}.qwm.safetensors"


def recording() -> archive.Dump:
    """The recording, as it stands in its file."""
    arrays, _ = chunk.read_arrays(RECORDING)
    return archive.collect(arrays)[0]


def main() -> None:
    """Write every file that is not there yet."""
    if not RECORDING.exists():
        units = [strategies.unit(("clusters",) * HEADS, seed, CHUNKS * CHUNK_TOKENS, CHANNELS) for seed in range(3)]
        units[2][:, 1] *= np.array(8, BF16)  # the louder head loses no coefficient to the threshold and stays dense
        chunk.write_arrays(RECORDING, dict(zip(("keys", "values", "queries"), units, strict=True)))
    for name, chosen in SCHEMES.items():
        path = sealed_path(name)
        if path.exists():
            continue
        chunks = archive.compress(recording(), chosen, CHUNK_TOKENS)
        chunk.save(path, {0: chunks})
        restored = archive.restore(chunks)
        expected = {"keys": restored.keys, "values": restored.values}
        chunk.write_arrays(path.with_name(path.name.replace(".qwm.", ".expected.")), expected)


if __name__ == "__main__":
    main()
