"""The launch that reconstructs keys and values, against the reference: every method, range, layout and mixture of units."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwm_core import methods as core_methods
from quantwm_core.chunk import KINDS, Kind
from quantwm_core.chunk import SealedTensor as CoreTensor
from quantwm_core.clustered import TABLE_SCALES
from quantwm_core.errors import DeviceError, DtypeError, FormatError, StateError
from quantwm_core.method import decode_tensor
from quantwm_kernels import reading_batches, reading_launches
from quantwm_kernels.bridge import to_torch
from quantwm_kernels.chunk import SealedTensor
from quantwm_kernels.launch import Launch
from tests.core import strategies, variants
from tests.parity.gate import POISON, TOLERANCES, assert_close, assert_equal, poison
from tests.parity.settings import EXAMPLES

pytest.importorskip("quantwm_kernels.triton.reading", exc_type=ImportError)

# Small enough that a program takes more than one tile, and that tiles are ragged.
SMALL = Launch(blocks={"BLOCK_TOKENS": 16}, programs=1, most_tiles=2)
LARGE = Launch(blocks={"BLOCK_TOKENS": 32}, programs=1, most_tiles=3)


@dataclass(frozen=True)
class Read:
    """A range of a sealed tensor and the workspace's token where it begins."""

    sealed: CoreTensor
    start: int
    stop: int
    place: int = 0

    def part(self, device: torch.device, kept: list[SealedTensor]) -> reading_batches.Part:
        """What the launch takes; a part holds addresses only, so the arrays are kept."""
        kept.append(SealedTensor.from_core(self.sealed).to(device))
        return reading_batches.Part(kept[-1].row, self.start, self.stop, self.place)


def seal(name: str, kind: Kind, unit: np.ndarray, *, queries: int | None = None, **parameters: Any) -> CoreTensor:
    """A unit ``[B, H, N, D]`` sealed by the reference; ``queries`` seeds the moment, None is a stream's first unit."""
    batch, heads, _, channels = unit.shape
    moment = None if queries is None else strategies.moment(queries, heads, channels, batch=batch)
    return core_methods.get(name, **parameters).seal(kind, unit, moment)


def workspace(like: CoreTensor, tokens: int, device: torch.device, *, token_major: bool) -> Tensor:
    """Poisoned ``[B, H, tokens, D]`` in either memory order."""
    batch, heads, _, channels = like.shape
    if token_major:
        return poison(batch, tokens, heads, channels, dtype=torch.bfloat16, device=device).transpose(1, 2)
    return poison(batch, heads, tokens, channels, dtype=torch.bfloat16, device=device)


def check(out: Tensor, reads: list[Read], name: str = "decoded") -> None:
    """All reads stand in ``out``, and nothing else was written."""
    rest = torch.ones(out.shape[2], dtype=torch.bool)
    for each in reads:
        place = slice(each.place, each.place + each.stop - each.start)
        rest[place] = False
        expected = to_torch(decode_tensor(each.sealed, each.start, each.stop).copy())
        if not {"basis", "shared_basis"}.isdisjoint(each.sealed.arrays):
            assert_close(name, out[:, :, place], expected, TOLERANCES["decoded"])
        else:
            assert_equal(name, out[:, :, place], expected)
    untouched = out[:, :, rest.to(out.device)].contiguous().view(torch.uint8)
    assert (untouched == POISON).all(), f"{name}: written beside its place"


def launch(
    device: torch.device,
    keys: list[Read],
    values: list[Read],
    *,
    token_major: bool = False,
    chosen: Launch | None = SMALL,
) -> int:
    """Read both into workspaces with room to spare, check them, and return how many launches that took."""
    ends = [[each.place + each.stop - each.start for each in reads] for reads in (keys, values)]
    outputs = [
        workspace(reads[0].sealed, max(end) + 3, device, token_major=token_major)
        for reads, end in zip((keys, values), ends, strict=True)
    ]
    kept: list[SealedTensor] = []
    parts = [[each.part(device, kept) for each in reads] for reads in (keys, values)]
    batches = reading_batches.batches(parts[0], parts[1], device, chosen)
    reading_launches.run(batches, outputs[0], outputs[1])
    check(outputs[0], keys, "keys")
    check(outputs[1], values, "values")
    return len(batches)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", list(variants.every()), ids=str)
def test_every_method(device: torch.device, variant: variants.Variant, kind: Kind) -> None:
    unit = strategies.unit(("normal", "channels"), 0, 70, 32)
    sealed = variant.make().seal(kind, unit, strategies.moment(1, 2, 32))
    launch(device, [Read(sealed, 5, 64, place=2)], [Read(sealed, 0, 70)], token_major=kind == "keys")


SHARP = {"group_size": 32, "rank": 16, "coefficient_bits": 4, "centroid_bits": 4}


@pytest.mark.parametrize(
    ("name", "channels", "parameters"),
    [
        ("quantwm", 128, {}),
        ("quantwm", 256, {"rank": 16}),
        ("quantwm", 96, SHARP),
        ("quantwm", 128, SHARP),
        ("qvg", 128, {"stages": 2}),
        ("klt", 128, {}),
        ("klt", 256, {"bits": 1.25}),
        ("klt", 128, {"bits": 4.0}),
        ("oscar", 128, {}),
        ("kivi", 64, {}),
    ],
)
def test_as_it_is_launched(device: torch.device, name: str, channels: int, parameters: dict[str, Any]) -> None:
    unit = strategies.unit(("normal", "channels"), 1, 150, channels)
    if name == "quantwm":
        parameters = {"iterations": 1, "centroids": 16, **parameters}
    keys, values = (seal(name, kind, unit, queries=1 if kind == "keys" else None, **parameters) for kind in KINDS)
    reads = [[Read(keys, 0, 130), Read(keys, 149, 150, 130)], [Read(values, 3, 150), Read(values, 20, 40, 147)]]
    launch(device, reads[0], reads[1], token_major=True, chosen=None)


GROUPS = {32: (4, 16, 32), 64: (16, 64), 80: (16, 40, 80), 96: (32, 48), 128: (16, 64, 128), 256: (64, 128)}


@settings(EXAMPLES)
@given(data=st.data())
def test_any_head_dimension_group_range_and_layout(device: torch.device, data: st.DataObject) -> None:
    channels = data.draw(st.sampled_from(strategies.HEAD_DIMENSIONS))
    tokens = data.draw(st.sampled_from(strategies.TOKENS))
    kinds = tuple(data.draw(st.lists(st.sampled_from(strategies.KINDS), min_size=1, max_size=2)))
    unit = strategies.unit(kinds, data.draw(st.integers(0, 999)), tokens, channels)
    group = data.draw(st.sampled_from(GROUPS[channels]))
    rank = data.draw(st.sampled_from((0, 1, 4, 8, 11, 16)))
    queries = data.draw(st.sampled_from((None, 3)))
    keys = seal("quantwm", "keys", unit, queries=queries, rank=rank, group_size=group, iterations=2, centroids=16)
    quantizer = data.draw(st.sampled_from(("affine", "symmetric")))
    values = seal("qvg", "values", unit, quantizer=quantizer, group_size=group, iterations=1)
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start, tokens))
    place = data.draw(st.integers(0, 3))
    reads = [Read(sealed, start, stop, place) for sealed in (keys, values)]
    token_major = data.draw(st.booleans())
    launch(device, reads[:1], reads[1:], token_major=token_major)


def test_many_units_of_two_tensors_take_one_launch(device: torch.device) -> None:
    sizes = (40, 3, 64, 1, 33)
    units = [strategies.unit(("normal", "clusters", "channels"), seed, n, 64, 2) for seed, n in enumerate(sizes)]
    keys, values, place = [], [], 1
    for number, unit in enumerate(units):
        start, stop = (7, 29) if number == 0 else (0, unit.shape[2])
        queries = number or None  # the first unit knows no queries, hence no compensation
        keys.append(Read(seal("quantwm", "keys", unit, queries=queries, iterations=1), start, stop, place))
        values.append(Read(seal("quantwm", "values", unit, iterations=1), start, stop, place))
        place += stop - start
    for token_major in (False, True):
        assert launch(device, keys, values, token_major=token_major) == 1


def test_what_was_read_is_read_again_and_elsewhere(device: torch.device) -> None:
    unit = strategies.unit(("normal", "channels"), 0, 40, 32)
    reads = [Read(seal("quantwm", kind, unit, queries=3, iterations=1, centroids=8), 0, 40) for kind in KINDS]
    kept: list[SealedTensor] = []
    keys, values = ([each.part(device, kept)] for each in reads)
    batches = reading_batches.batches(keys, values, device, SMALL)
    first, other = (workspace(reads[0].sealed, 80, device, token_major=True) for _ in range(2))
    head_major = workspace(reads[0].sealed, 80, device, token_major=False)
    places = [
        first[:, :, :40],
        first[:, :, 40:],
        other[:, :, 40:],
        head_major[:, :, :40],
        head_major[:, :, 40:],
        first[:, :, :40],
    ]
    # One memory in both orders, and either half elsewhere than just before while the other stays.
    turned = other.transpose(1, 2).view(head_major.shape)[:, :, :40]
    assert (turned.data_ptr(), turned.shape) == (other.data_ptr(), other[:, :, :40].shape)
    pairs = [
        *itertools.pairwise(places),
        (first[:, :, :40], first[:, :, 40:]),
        (first[:, :, :40], other[:, :, :40]),
        (first[:, :, :40], turned),
        (turned, first[:, :, :40]),
        (other[:, :, :40], first[:, :, :40]),
        (first[:, :, 40:], first[:, :, :40]),
    ]
    for out, beside in pairs:
        for each in (out, beside):
            each.fill_(0)
        reading_launches.run(batches, out, beside)
        check(out, reads[:1], "keys")
        check(beside, reads[1:], "values")
        out.fill_(0)
        reading_launches.run(batches, out, beside)
        check(out, reads[:1], "keys, again")


def test_units_of_different_methods_are_read_in_a_launch_each(device: torch.device) -> None:
    unit = strategies.unit(("normal", "clusters"), 0, 20, 32)
    names = ("bf16", "kivi", "qvg", "rtn", "bf16")
    keys = [Read(seal(name, "keys", unit), 3, 20, 17 * number) for number, name in enumerate(names)]
    values = [Read(seal("bf16", "values", unit[..., :8]), 3, 20, 17 * number) for number in range(len(names))]
    assert launch(device, keys, values) == len(set(names))


@pytest.mark.parametrize("rank", [3, 16, 24])
@pytest.mark.parametrize("kinds", [("normal", "zeros"), ("zeros", "normal"), ("zeros", "zeros")], ids="-".join)
def test_dense_and_sparse_streams_of_one_unit(device: torch.device, rank: int, kinds: tuple[str, ...]) -> None:
    sealed = seal("quantwm", "keys", strategies.unit(kinds, 1, 90, 32, batch=2), queries=2, rank=rank, iterations=1)
    assert "layout" in sealed.arrays
    reads = [Read(sealed, 0, 90), Read(sealed, 61, 81, 90)]
    launch(device, reads, reads, chosen=LARGE)


def test_the_place_of_a_stream_among_many(device: torch.device) -> None:
    kinds = ("normal", "zeros", "zeros", "normal") * 18
    sealed = seal("quantwm", "keys", strategies.unit(kinds, 1, 18, 32), queries=2, rank=1, iterations=0, centroids=2)
    launch(device, [Read(sealed, 0, 18)], [Read(sealed, 17, 18)], chosen=LARGE)


@pytest.mark.parametrize(("rank", "threshold"), [(8, 0.3), (20, 0.2), (1, 0.3)])
def test_sparse_values_are_found_from_any_token(device: torch.device, rank: int, threshold: float) -> None:
    unit = strategies.unit(("normal", "channels", "clusters"), 4, 200, 32)
    sealed = seal("quantwm", "keys", unit, queries=5, rank=rank, threshold=threshold, iterations=1)
    assert len(sealed.arrays["sparse_values"]) > 20
    reads = [Read(sealed, 0, 200), Read(sealed, 1, 66, 200), Read(sealed, 63, 64, 270), Read(sealed, 127, 200, 280)]
    launch(device, reads[:2], reads[2:], chosen=LARGE)


@pytest.mark.parametrize("channels", [6, 20, 36])
def test_channels_that_no_vector_divides(device: torch.device, channels: int) -> None:
    unit = strategies.unit(("normal", "channels"), 3, 21, channels)
    forms: list[tuple[str, dict[str, Any]]] = [
        ("bf16", {}),
        ("kivi", {"group_size": 5}),
        ("rtn", {"granularity": "channel", "group_size": 8}),
    ]
    if channels % 4 == 0:
        forms += [("quantwm", {"rank": 3, "iterations": 1}), ("qvg", {})]
    for name, parameters in forms:
        keys, values = (seal(name, kind, unit, queries=1, **parameters) for kind in KINDS)
        launch(device, [Read(keys, 2, 20, 1)], [Read(values, 0, 21)])


def shifted_by_one(tensor: Tensor) -> Tensor:
    """The same numbers in memory that begins one of them later than memory does."""
    block = tensor.new_zeros(tensor.numel() + 1)
    block[1:] = tensor.reshape(-1)
    return block[1:].view(tensor.shape)


def test_memory_that_no_vector_fits(device: torch.device) -> None:
    unit = strategies.unit(("normal", "channels"), 5, 40, 64)
    sealed = SealedTensor.from_core(seal("quantwm", "keys", unit, queries=1)).to(device)
    shifted = replace(sealed, arrays={name: shifted_by_one(tensor) for name, tensor in sealed.arrays.items()})
    assert not shifted.row.aligned
    expected = to_torch(decode_tensor(sealed.to("cpu").to_core()).copy())
    for source, width in ((shifted, 64), (sealed, 65), (sealed, 68)):
        out = poison(1, 2, 40, width, dtype=torch.bfloat16, device=device)[..., width - 64 :]
        reading_launches.run(
            reading_batches.batches([reading_batches.Part(source.row, 0, 40, 0)], [], device, SMALL), out, out
        )
        assert_close("decoded", out, expected, TOLERANCES["decoded"])


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_centroids_that_no_vector_fits(device: torch.device, bits: int) -> None:
    unit = strategies.unit(("normal", "channels"), 5, 40, 64)
    sealed = SealedTensor.from_core(seal("quantwm", "keys", unit, centroid_bits=bits)).to(device)
    shifted = replace(sealed, arrays={**sealed.arrays, TABLE_SCALES: shifted_by_one(sealed.arrays[TABLE_SCALES])})
    assert (sealed.row.aligned, shifted.row.aligned) == (True, False)
    out = poison(1, 2, 40, 64, dtype=torch.bfloat16, device=device)
    part = reading_batches.Part(shifted.row, 0, 40, 0)
    reading_launches.run(reading_batches.batches([part], [], device, SMALL), out, out)
    assert_close("decoded", out, to_torch(decode_tensor(sealed.to("cpu").to_core()).copy()), TOLERANCES["decoded"])


def test_a_workspace_whose_channels_lie_apart(device: torch.device) -> None:
    sealed = seal("rtn", "keys", strategies.unit(("normal",), 5, 20, 32))
    out = poison(1, 1, 32, 25, dtype=torch.bfloat16, device=device).transpose(2, 3)
    other = poison(1, 1, 25, 32, dtype=torch.bfloat16, device=device)
    each = Read(sealed, 2, 19, 3)
    kept: list[SealedTensor] = []
    part = each.part(device, kept)
    reading_launches.run(reading_batches.batches([part], [part], device, SMALL), out, other)
    check(out, [each])
    check(other, [each])


def test_nothing_to_read_is_no_launch(device: torch.device) -> None:
    part = Read(seal("rtn", "keys", strategies.unit(("normal",), 5, 20, 32)), 4, 4).part(device, [])
    assert reading_batches.batches([part], [part], device) == ()
    assert reading_batches.batches([], [], device) == ()


def test_arrays_elsewhere_are_refused(device: torch.device) -> None:
    part = Read(seal("rtn", "keys", strategies.unit(("normal",), 5, 20, 32)), 0, 4).part(device, [])
    with pytest.raises(DeviceError, match="meta"):
        reading_batches.batches([part], [part], torch.device("meta"))


def test_an_index_beyond_the_codebook_reads_no_foreign_memory(device: torch.device) -> None:
    core = seal("qvg", "keys", strategies.unit(("normal",), 5, 40, 32), centroids=5)
    damaged = {**core.arrays, "index": np.full_like(core.arrays["index"], 255)}
    last = replace(core, arrays={**core.arrays, "index": np.full_like(core.arrays["index"], 4)})
    out = workspace(core, 40, device, token_major=False)
    kept: list[SealedTensor] = []
    part = Read(replace(core, arrays=damaged), 0, 40).part(device, kept)
    reading_launches.run(reading_batches.batches([part], [], device, SMALL), out, out)
    assert_equal("decoded", out, to_torch(decode_tensor(last).copy()))


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("codes", lambda array: array[:, :, :-1], FormatError),
        ("scales", lambda array: array[..., :1, :], FormatError),
        ("index", lambda array: array.int(), DtypeError),
        ("centroids", lambda array: array[:, :, :0], FormatError),
        ("basis", lambda array: array[:, :1], FormatError),
        ("coefficients", lambda array: array[:, :, 1:], FormatError),
        ("coefficient_scales", lambda array: array.float(), DtypeError),
        ("zero_points", lambda array: array[..., 1:], FormatError),
        ("centroids", lambda array: array.transpose(2, 3).contiguous().transpose(2, 3), StateError),
        ("super_scale", None, FormatError),
    ],
)
def test_a_damaged_unit_is_refused_before_any_address_is_followed(
    name: str, change: Any, error: type[Exception]
) -> None:
    sealed = SealedTensor.from_core(seal("quantwm", "keys", strategies.unit(("normal",) * 2, 5, 40, 32), queries=1))
    arrays = dict(sealed.arrays)
    if change is None:
        del arrays[name]
    else:
        arrays[name] = change(arrays[name])
    with pytest.raises(error, match=name):
        _ = replace(sealed, arrays=arrays).row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", list(variants.every()), ids=str)
def test_a_damaged_file_is_refused_whatever_it_lacks(variant: variants.Variant, kind: Kind) -> None:
    unit = strategies.unit(("normal", "zeros"), 5, 40, 48)
    core = variant.make().seal(kind, unit, strategies.moment(1, 2, 48))
    sealed = SealedTensor.from_core(core).to("cpu")
    for name in core.arrays.keys() - {"sparse_values"}:  # which a unit lacks whose coefficients are all zero
        lacking = {other: array for other, array in core.arrays.items() if other != name}
        with pytest.raises(FormatError, match=core.method):
            decode_tensor(replace(core, arrays=lacking))
        with pytest.raises(FormatError, match=f"sealed with {core.method} lacks its array '{name}'"):
            _ = replace(sealed, arrays={other: sealed.arrays[other] for other in lacking}).row
        with pytest.raises((FormatError, DtypeError), match=core.method):
            _ = replace(sealed, arrays={**sealed.arrays, name: torch.tensor(1)}).row


def test_another_method_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match="negated"):
        _ = SealedTensor("negated", {}, (1, 1, 2, 4), {"exact": torch.zeros(1, 1, 2, 4)}).row


@settings(EXAMPLES)
@given(data=st.data())
def test_any_transform_range_and_layout(device: torch.device, data: st.DataObject) -> None:
    channels = data.draw(st.sampled_from(strategies.HEAD_DIMENSIONS))
    tokens = data.draw(st.sampled_from(strategies.TOKENS))
    unit = strategies.unit(data.draw(st.sampled_from((("normal",), ("channels", "clusters")))), 0, tokens, channels)
    names = ("klt", "kvtc", "oscar", "rtn")
    pair = [
        seal(data.draw(st.sampled_from(names)), kind, unit, queries=3 if kind == "keys" else None) for kind in KINDS
    ]
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    launch(
        device,
        [Read(pair[0], start, stop, place=data.draw(st.integers(0, 3)))],
        [Read(pair[1], 0, tokens)],
        token_major=data.draw(st.booleans()),
        chosen=data.draw(st.sampled_from((SMALL, LARGE))),
    )


def test_units_that_share_a_basis_and_units_that_do_not_are_one_launch(device: torch.device) -> None:
    units: list[CoreTensor] = []
    for seed, (kinds, lifetime) in enumerate(
        ((("normal", "clusters"), 0.0), (("normal", "clusters"), 0.0), (("channels", "constant"), 1e9))
    ):
        method = core_methods.get("klt", bits=1.25, allocation="layer", lifetime=lifetime)
        unit = strategies.unit(kinds, seed, 40 + seed, 64)
        units.append(method.seal("keys", unit, strategies.moment(1, 2, 64), units[-1] if units else None))
    assert units[1].arrays["shared_basis"] is units[0].arrays["shared_basis"]
    assert units[2].arrays["shared_basis"] is not units[1].arrays["shared_basis"]
    reads = [Read(unit, number, unit.shape[2], place=50 * number) for number, unit in enumerate(units)]
    assert launch(device, reads, reads) == 1


def test_a_stream_without_directions_reads_no_row(device: torch.device) -> None:
    unit = strategies.unit(("normal", "normal"), 0, 40, 32).astype(np.float32)
    unit[:, 0] *= 2.0**-30
    quiet = core_methods.get("klt", allocation="layer", bits=0.5).seal("values", unit.astype("bfloat16"))
    assert not quiet.arrays["blocks"][0, 0].any()
    assert not quiet.arrays["shared_basis_blocks"][0, 0]
    assert launch(device, [Read(quiet, 0, 40)], [Read(quiet, 3, 40)]) == 1


def test_a_transform_whose_arrays_do_not_fit_together_is_refused(device: torch.device) -> None:
    sealed = SealedTensor.from_core(seal("klt", "keys", strategies.unit(("normal", "clusters"), 0, 20, 64))).to(device)
    for name in ("codes", "order", "steps", "means", "shared_basis", "shared_basis_scales"):
        cut = replace(sealed, arrays={**sealed.arrays, name: sealed.arrays[name][:-1].contiguous()})
        with pytest.raises(FormatError, match="klt"):
            _ = cut.row
    for name, add in (("blocks", 1), ("shared_basis_blocks", 1)):
        grown = replace(sealed, arrays={**sealed.arrays, name: sealed.arrays[name] + add})
        with pytest.raises(FormatError, match="klt"):
            _ = grown.row


def test_a_direction_beyond_the_basis_leads_to_its_last_row(device: torch.device) -> None:
    exact = seal("klt", "keys", strategies.unit(("normal",), 0, 20, 32))
    rows = exact.arrays["shared_basis"].shape[0]
    damaged, last = (
        replace(exact, arrays={**exact.arrays, "order": np.full_like(exact.arrays["order"], place)})
        for place in (255, rows - 1)
    )
    out = workspace(exact, 20, device, token_major=False)
    kept: list[SealedTensor] = []
    batches = reading_batches.batches([Read(damaged, 0, 20).part(device, kept)], [], device, SMALL)
    reading_launches.run(batches, out, out)
    check(out, [Read(last, 0, 20)])
