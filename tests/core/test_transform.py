"""What the methods of a transform code have in common; klt stands for them."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwm_core import allocation, archive, basis, chunk, cost, methods, transform
from quantwm_core.chunk import SealedChunk, SealedTensor
from quantwm_core.errors import FormatError, ParameterError, ShapeError
from quantwm_core.method import Scheme, decode_tensor, scheme
from tests.core import strategies, tolerances
from tests.core.compare import assert_bits, assert_within

CODES = pytest.mark.parametrize("name", ["klt", "kvtc"])


def _unit(seed: int = 0, tokens: int = 96, channels: int = 32, drift: float = 0.0) -> np.ndarray:
    """BF16 ``[1, 2, tokens, channels]`` of a few strong directions, others with more ``drift``."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(
        rng.standard_normal((2, channels, channels))
        + drift * np.random.default_rng(seed + 1).standard_normal((2, channels, channels))
    )[0]
    spread = np.exp2(-np.arange(channels) / 4)
    normal = np.random.default_rng(seed).standard_normal((1, 2, tokens, channels))
    return np.asarray((3 + normal * spread @ turn).astype("bfloat16"))


def _seal(name: str, unit: np.ndarray, previous: SealedTensor | None = None, **parameters: Any) -> SealedTensor:
    return methods.get(name, **parameters).seal("values", unit, None, previous)


def _without(sealed: SealedTensor, part: str) -> SealedTensor:
    """What a damaged file may hold."""
    return replace(sealed, arrays={name: array for name, array in sealed.arrays.items() if name != part})


@settings(max_examples=25)
@given(
    unit=strategies.units(("normal", "clusters", "channels", "zeros", "one"), (32, 80)),
    bits=st.sampled_from([0.5, 1.25, 2.0, 5.0]),
)
@CODES
def test_bytes_of_every_part_by_formula(name: str, unit: np.ndarray, bits: float) -> None:
    sealed = _seal(name, unit, bits=bits)
    counts, blocks = sealed.arrays["blocks"], sealed.arrays["shared_basis_blocks"]
    formula = [
        cost.transform_nbytes(unit.shape[2], unit.shape[3], counts[place].tolist(), 8 * int(blocks[place]))
        for place in np.ndindex(*blocks.shape)
    ]
    own, shared = (sum(part) for part in zip(*formula, strict=True))
    assert (sealed.nbytes - sealed.shared_nbytes, sealed.shared_nbytes) == (own, shared)
    per_token = allocation.budget(bits, unit.shape[3])
    assert all(per_token - 2 <= allocation.token_bytes(each) <= per_token for each in counts.reshape(-1, 3))


@CODES
def test_a_reconstruction_is_mean_plus_levels_times_matrix(name: str) -> None:
    sealed = _seal(name, _unit(), bits=3.0)
    arrays = sealed.arrays
    position = 0
    for head, matrix in enumerate(transform.matrices(arrays)):
        counts = arrays["blocks"][0, head]
        size = 96 * allocation.token_bytes(counts)
        packed = arrays["codes"][position : position + size].reshape(96, -1)
        position += size
        for token in (0, 63, 64, 95):
            want = arrays["means"][0, head].astype(np.float64)
            place = 0
            for width, blocks in zip((8, 4, 2), counts, strict=True):
                for direction in range(8 * int(blocks)):
                    code = int(packed[token, place // 8]) >> place % 8 & (2**width - 1)
                    row = sum(8 * int(each) for each in counts[: (8, 4, 2).index(width)]) + direction
                    level = code - 2 ** (width - 1) + (0 if width == 8 else 0.5)
                    want = want + level * matrix[row].astype(np.float64)
                    place += width
            got = decode_tensor(sealed)[0, head, token]
            assert_within("token", got, want, 2 * np.abs(want) * tolerances.BF16_ROUNDING + 1e-5)


@CODES
def test_more_bits_leave_less_error(name: str) -> None:
    unit = _unit()
    errors = [
        np.square(decode_tensor(_seal(name, unit, bits=bits)).astype(float) - unit.astype(float)).mean()
        for bits in (0.5, 1.0, 2.0, 4.0, 8.0)
    ]
    assert all(second < first / 2 for first, second in itertools.pairwise(errors))


@CODES
def test_a_basis_is_shared_until_a_new_one_is_worth_its_bytes(name: str) -> None:
    first = _seal(name, _unit())
    alike = _seal(name, _unit(1), first)
    assert all(alike.arrays[part] is first.arrays[part] for part in basis.PARTS)
    other = _seal(name, _unit(2, tokens=2000, drift=9.0), first)
    assert other.arrays["shared_basis"] is not first.arrays["shared_basis"]
    for lifetime, renewed in ((0.0, False), (1e-3, False), (1e3, True)):
        sealed = _seal(name, _unit(2, drift=9.0), first, lifetime=lifetime)
        assert (sealed.arrays["shared_basis"] is not first.arrays["shared_basis"]) == renewed


def test_a_basis_that_needs_more_bytes_for_the_same_error_is_renewed() -> None:
    rng = np.random.default_rng(0)
    flat, normal = (rng.standard_normal((1, 1, 2048, 64)) for _ in range(2))
    steep = (normal * np.exp2(-np.arange(64) / 6)).astype("bfloat16")
    first = _seal("klt", flat.astype("bfloat16"), tolerance=0.003)
    fresh, after = _seal("klt", steep, tolerance=0.003), _seal("klt", steep, first, tolerance=0.003)
    assert after.arrays["codes"].nbytes == fresh.arrays["codes"].nbytes
    kept = _seal("klt", steep, first, tolerance=0.003, lifetime=0.0)
    assert kept.arrays["codes"].nbytes > 2 * fresh.arrays["codes"].nbytes


@CODES
def test_a_renewed_basis_codes_the_unit_as_if_nothing_had_been_before(name: str) -> None:
    unit = _unit(2, drift=9.0)
    renewed, alone = _seal(name, unit, _seal(name, _unit()), lifetime=1e9), _seal(name, unit, lifetime=1e9)
    for part, array in alone.arrays.items():
        assert_bits(part, renewed.arrays[part], array)


@CODES
def test_a_basis_of_another_cache_is_not_taken(name: str) -> None:
    unit = _unit()
    for stranger in (
        _seal(name, _unit()[:, :1]),
        _seal(name, _unit(channels=40)),
        _seal({"klt": "kvtc", "kvtc": "klt"}[name], _unit()),
        _seal("rtn", _unit()),
        *(_without(_seal(name, _unit()), part) for part in basis.PARTS),
    ):
        want = _seal(name, unit)
        for part, array in _seal(name, unit, stranger, lifetime=0.0).arrays.items():
            assert_bits(part, array, want.arrays[part])


def test_a_file_holds_what_is_shared_once(tmp_path: Path) -> None:
    chosen, chunks = scheme("klt", lifetime=0.0), list[SealedChunk]()
    for seed in range(3):
        unit = _unit(seed)
        chunks.append(chosen.seal(unit, unit, None, chunks[-1] if chunks else None, 96 * seed))
    own, shared = chunk.stored_nbytes(chunks)
    assert shared == chunks[0].shared_nbytes
    assert own + shared < sum(each.nbytes for each in chunks)
    for kept in (chunks, chunks[1:]):  # the unit that the basis was made for may be gone
        chunk.save(tmp_path / "cache", {4: kept, 5: kept})
        arrays, _ = chunk.read_arrays(tmp_path / "cache")
        assert sum(array.nbytes for array in arrays.values()) == 2 * sum(chunk.stored_nbytes(kept))
        loaded = chunk.load(tmp_path / "cache")[0][4]
        assert chunk.stored_nbytes(loaded) == chunk.stored_nbytes(kept)
        for got, want in zip(loaded, kept, strict=True):
            assert got.keys.arrays["shared_basis"] is loaded[0].keys.arrays["shared_basis"]
            assert_bits("decoded", decode_tensor(got.keys), decode_tensor(want.keys))
        assert sum(int(row["bytes"]) for row in archive.rows({4: loaded})) == sum(chunk.stored_nbytes(kept))


@pytest.mark.parametrize(
    ("holder", "message"), [(7, "chunk 7"), (1, "chunk 1"), (-1, "chunk -1"), ("0", "damaged"), ({}, "damaged")]
)
def test_a_file_that_names_a_wrong_holder_is_refused(tmp_path: Path, holder: object, message: str) -> None:
    import json

    chosen, unit = scheme("klt", lifetime=0.0), _unit()
    first = chosen.seal(unit, unit)
    path = tmp_path / "cache"
    chunk.save(path, {0: [first, chosen.seal(unit, unit, None, first, 96)]})
    arrays, metadata = chunk.read_arrays(path)
    table = json.loads(metadata["chunks"])
    table[1]["keys"]["shared"]["shared_basis"] = holder
    chunk.write_arrays(path, arrays, {**metadata, "chunks": json.dumps(table)})
    with pytest.raises(FormatError, match=message):
        chunk.load(path)


@CODES
@pytest.mark.parametrize("part", transform.PARTS)
def test_a_part_of_another_length_is_refused(name: str, part: str) -> None:
    sealed = _seal(name, _unit())
    for cut in (sealed.arrays[part][:0], np.concatenate([sealed.arrays[part]] * 2)):
        damaged = SealedTensor(name, sealed.parameters, sealed.shape, {**sealed.arrays, part: cut})
        with pytest.raises(FormatError, match=name):
            decode_tensor(damaged)


def test_a_direction_that_is_not_in_the_basis_is_refused() -> None:
    sealed = _seal("klt", _unit())
    order = np.full_like(sealed.arrays["order"], 255)
    with pytest.raises(FormatError, match="klt"):
        decode_tensor(SealedTensor("klt", sealed.parameters, sealed.shape, {**sealed.arrays, "order": order}))


@CODES
def test_a_rate_without_a_single_block_is_refused(name: str) -> None:
    method, unit = methods.get(name, bits=0.5), np.ones((1, 1, 4, 16), "bfloat16")
    for call in (lambda: method.seal("keys", unit), lambda: method.nbytes("keys", unit.shape, first=True)):
        with pytest.raises(ParameterError, match=r"0\.5 bits an element of head dimension 16: need 1\.0"):
            call()


@pytest.mark.parametrize("name", ["klt", "kvtc", "oscar"])
def test_a_head_that_is_no_multiple_of_eight_is_refused(name: str) -> None:
    with pytest.raises(ShapeError, match="head dimension 36"):
        _seal(name, np.ones((1, 1, 4, 36), "bfloat16"))


@pytest.mark.parametrize("name", ["klt", "kvtc", "oscar"])
def test_later_chunks_change_no_earlier_byte(name: str) -> None:
    keys = np.concatenate([_unit(seed, drift=float(seed)) for seed in range(4)], axis=2)
    queries = strategies.unit(("channels", "normal"), 5, keys.shape[2], 32)
    chosen = Scheme(methods.get(name), methods.get(name), chunks_per_seal=1)
    whole = archive.compress(archive.Dump(keys, keys, queries), chosen, 96)
    for count in (1, 2, 3):
        changed = [array.copy() for array in (keys, queries)]
        for array in changed:
            array[:, :, 96 * count :] = 1
        again = archive.compress(archive.Dump(changed[0], changed[0], changed[1]), chosen, 96)
        for got, want in zip(again[:count], whole[:count], strict=True):
            for part, array in want.keys.arrays.items():
                assert_bits(part, got.keys.arrays[part], array)
