"""Files of every format version are read by today's code, and today's code still writes those of its own version.

See ``tests/core/golden/make.py`` for how they were made.
"""

from pathlib import Path

import numpy as np
import pytest

from quantwm_core import archive, load, packing
from quantwm_core.chunk import FORMAT_VERSION, KINDS, SealedChunk, SealedTensor, read_arrays, save, stored_nbytes
from tests.core import tolerances
from tests.core.compare import assert_bits, assert_within
from tests.core.golden import make

FILES = sorted(make.FOLDER.glob("*.qwm.safetensors"))
# Their arithmetic is one number at a time, so any machine writes the same bytes.
ELEMENTWISE = ("bf16", "kivi", "rtn", "rtn-channel")
# Their codes are taken in eigenvectors, which another machine may turn a little; what they decode to is as good.
TRANSFORMS = ("klt", "kvtc", "oscar")
PSAC = ("basis", "coefficient_scales", "coefficients", "bitmap", "sparse_values", "sparse_counts", "layout")


def test_every_entry_has_a_file_of_this_version() -> None:
    present = {path.name.split(".")[0] for path in FILES if f".v{FORMAT_VERSION}." in path.name}
    assert present == set(make.SCHEMES)
    assert all(path.stat().st_size < 30_000 for path in make.FOLDER.iterdir() if path.is_file())


def test_the_files_hold_what_the_format_can_hold() -> None:
    first, second = load(make.sealed_path("quantwm"))[0][0]
    assert "basis" not in first.keys.arrays
    assert {"basis", "coefficients"} <= second.keys.arrays.keys()
    sparse = load(make.sealed_path("quantwm-sparse"))[0][0][1].keys.arrays
    assert sparse["layout"].tolist() == [[1, 0]]
    assert sparse["coefficients"].shape == (1, 67, 4)
    assert sparse["sparse_values"].size > 0
    first, second = load(make.sealed_path("klt-layer"))[0][0]
    assert second.keys.arrays["shared_basis"] is first.keys.arrays["shared_basis"]
    first, second = load(make.sealed_path("oscar"))[0][0]
    assert second.keys.arrays["shared_basis"] is not first.keys.arrays["shared_basis"]
    assert [sealed.keys.method for sealed in load(make.sealed_path("kivi"))[0][0]] == ["kivi", "kivi", "bf16"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_decodes_to_what_it_always_decoded_to(path: Path) -> None:
    layers, _ = load(path)
    expected, _ = read_arrays(path.with_name(path.name.replace(".qwm.", ".expected.")))
    assert list(layers) == [0]
    restored = archive.restore(layers[0])
    for kind in KINDS:
        got, want = getattr(restored, kind), expected[kind]
        products = any(
            "basis" in (arrays := getattr(sealed, kind).arrays) or "shared_basis" in arrays for sealed in layers[0]
        )
        if not products:
            assert_bits(f"{path.name} {kind}", got, want)
            continue
        # The correction is a matrix product, whose sum another machine may round differently.
        differs = got.view(np.uint16) != want.view(np.uint16)
        assert differs.mean() <= tolerances.GOLDEN_SHARE
        step = np.abs(want.astype(float)) * tolerances.BF16_ROUNDING * 2
        assert_within(f"{path.name} {kind}", got, want, step + tolerances.FP32_ROUNDING)


@pytest.mark.parametrize("name", list(make.SCHEMES))
def test_todays_encoder_writes_the_same_file(name: str, tmp_path: Path) -> None:
    chunks = archive.compress(make.recording(), make.SCHEMES[name], make.CHUNK_TOKENS)
    if name in ELEMENTWISE:
        save(tmp_path / "again", {0: chunks})
        assert (tmp_path / "again").read_bytes() == make.sealed_path(name).read_bytes()
        return
    wanted = load(make.sealed_path(name))[0][0]
    if wanted[0].keys.method in TRANSFORMS:
        _assert_as_good(name, chunks, wanted)
        return
    for got, want in zip(chunks, wanted, strict=True):
        assert (got.start, got.stop) == (want.start, want.stop)
        for kind in KINDS:
            _assert_same_tensor(f"{name}, tokens {got.start}, {kind}", getattr(got, kind), getattr(want, kind))


def _assert_as_good(label: str, got: list[SealedChunk], want: list[SealedChunk]) -> None:
    """Nearly the same bytes, and nearly the same error."""
    sizes = [sum(stored_nbytes(chunks)) for chunks in (got, want)]
    assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[1], label
    recording = make.recording()
    for kind in KINDS:
        exact = getattr(recording, kind).astype(float)
        errors = [
            np.square(getattr(archive.restore(chunks), kind).astype(float) - exact).mean() for chunks in (got, want)
        ]
        assert errors[0] == pytest.approx(errors[1], rel=0.05), f"{label} {kind}"


def _steps(stored: np.ndarray) -> np.ndarray:
    """Coefficients as whole numbers, INT4 with the zero that an odd last byte is filled up with."""
    whole = packing.unpack_nibbles(stored, 2 * stored.shape[-1]) if stored.dtype == np.uint8 else stored
    return whole.astype(int)


def _assert_same_tensor(label: str, got: SealedTensor, want: SealedTensor) -> None:
    """The clustered parts to the bit; the low-rank part, which eigenvectors and products go into, nearly."""
    assert (got.method, dict(got.parameters), got.shape) == (want.method, dict(want.parameters), want.shape)
    assert sorted(got.arrays) == sorted(want.arrays)
    fed_back = {"codes"} if want.parameters.get("rounding") == "feedback" and "basis" in want.arrays else set()
    if fed_back:  # the matrix that is fed back by comes from a factorisation, and a code draws those behind it along
        codes = [packing.unpack(each.arrays["codes"], want.shape[3]) for each in (got, want)]
        assert (codes[0] != codes[1]).mean() <= tolerances.GOLDEN_SHARE
    for name in want.arrays.keys() - set(PSAC) - fed_back:
        assert_bits(f"{label} {name}", got.arrays[name], want.arrays[name])
    if "basis" in want.arrays:
        planes = [
            array @ np.swapaxes(array, -1, -2) for array in (each.arrays["basis"].astype(float) for each in (got, want))
        ]
        assert_within(f"{label} U U^T", planes[0], planes[1], 2 * tolerances.BF16_ROUNDING)
        scales = [each.arrays["coefficient_scales"].astype(float) for each in (got, want)]
        assert_within(f"{label} scales", scales[0], scales[1], 4 * tolerances.BF16_ROUNDING * scales[1])
    if "coefficients" in want.arrays:
        steps = [_steps(each.arrays["coefficients"]) for each in (got, want)]
        assert_within(f"{label} coefficients", steps[0], steps[1], 1)
