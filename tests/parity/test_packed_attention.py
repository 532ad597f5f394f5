"""attend_packed on the kernel, against core's attention over what core decodes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwm_core import attention as core
from quantwm_core import methods as core_methods
from quantwm_core.chunk import KINDS, SealedTensor
from quantwm_core.errors import DeviceError, DtypeError, ShapeError, StateError
from quantwm_core.method import decode_tensor
from quantwm_kernels import packed_attention
from quantwm_kernels.chunk import SealedChunk
from quantwm_kernels.chunk import SealedTensor as KernelTensor
from quantwm_kernels.launch import Launch, processors
from quantwm_kernels.packed_attention import Attended, Pair, attend_packed
from quantwm_kernels.reading import Piece, ReadPlan
from tests.core import strategies, variants
from tests.parity.gate import TOLERANCES, assert_close, assert_equal
from tests.parity.settings import EXAMPLES

kernels = pytest.importorskip("quantwm_kernels.triton.attention", exc_type=ImportError)
OPERATORS = ("attend_packed",)

BF16 = torch.bfloat16
# Small enough that there are several tiles and that all of them are ragged somewhere.
WHOLE = Launch(blocks={"BLOCK_QUERIES": 16, "BLOCK_TOKENS": 16})
DIVIDED = Launch(blocks={"BLOCK_QUERIES": 16, "BLOCK_TOKENS": 16}, programs=12)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def sealed(
    name: str, unit: np.ndarray, *, kind: Any = "keys", queries: int | None = 3, **parameters: Any
) -> SealedTensor:
    """A unit ``[B, H, N, D]`` sealed by the reference."""
    batch, heads, _, channels = unit.shape
    moment = None if queries is None else strategies.moment(queries, heads, channels, batch=batch)
    return core_methods.get(name, **parameters).seal(kind, unit, moment)


def piece(keys: SealedTensor, values: SealedTensor, start: int = 0, stop: int | None = None) -> Piece:
    unit = SealedChunk(KernelTensor.from_core(keys), KernelTensor.from_core(values))
    return Piece(unit, start, unit.tokens if stop is None else stop, 0)


def simple_piece(name: str = "quantwm", tokens: int = 40, channels: int = 32, seed: int = 0, heads: int = 2) -> Piece:
    """A unit of ordinary numbers."""
    kinds = ("normal", "channels", "clusters")[:heads]
    keys, values = (strategies.unit(kinds, seed + shift, tokens, channels) for shift in (0, 1))
    parameters = {"iterations": 1} if name == "quantwm" else {}
    return piece(sealed(name, keys, **parameters), sealed(name, values, kind="values", **parameters))


def pairs(*lengths: int, heads: int = 2, channels: int = 32, values: int | None = None, batch: int = 1) -> list[Pair]:
    """Plain keys and values."""
    return [
        (
            normal(batch, heads, length, channels, seed=100 + number),
            normal(batch, heads, length, values or channels, seed=200 + number),
        )
        for number, length in enumerate(lengths)
    ]


def reference(queries: Tensor, pieces: Sequence[Piece], exact: Sequence[Pair], scale: float) -> tuple[np.ndarray, ...]:
    """Attention over what the reference decodes, the same over magnitudes of values, and the logarithm of the sums."""
    parts: list[list[np.ndarray]] = [[], []]
    for chunk, start, stop, _ in pieces:
        for each, kind in zip(parts, KINDS, strict=True):
            each.append(decode_tensor(getattr(chunk.to_core(), kind), start, stop).astype(np.float32))
    for pair in exact:
        for each, tensor in zip(parts, pair, strict=True):
            each.append(tensor.float().numpy())
    keys, values = (np.concatenate(each, axis=2) for each in parts)
    asked = queries.to(BF16).float().numpy() * np.float32(scale * queries.shape[3] ** 0.5)
    logarithm = core.log_sum_exp(core.logits(asked, keys))
    return core.attend(asked, keys, values), core.attend(asked, keys, np.abs(values)), logarithm


def launch(
    device: torch.device,
    queries: Tensor,
    pieces: Sequence[Piece],
    exact: Sequence[Pair] = (),
    *,
    scale: float | None = None,
    chosen: Launch = WHOLE,
    rotated: bool = False,
) -> tuple[Attended, ReadPlan]:
    """What the kernel makes of tensors that are moved to the device."""
    moved = [each._replace(chunk=each.chunk.to(device)) for each in pieces]
    plain = [(keys.to(device), values.to(device)) for keys, values in exact]
    plan = ReadPlan(moved)
    asked = queries.to(device)
    sizes = packed_attention.checked_sizes(asked, plan, plain)
    factor = queries.shape[3] ** -0.5 if scale is None else scale
    return packed_attention.run(asked, plan, plain, sizes, factor, chosen, rotated=rotated), plan


def judge_output(result: Tensor, output: Tensor, magnitude: Tensor) -> None:
    """Hold an output against the reference, relative to what it averages: a method may have decoded all of that to zero."""
    unit = magnitude.clamp(min=2.0**-60)  # a weight below may be lost
    assert_close("output", result.cpu().float() / unit, output / unit, TOLERANCES["attention"])


def check(
    device: torch.device,
    queries: Tensor,
    pieces: Sequence[Piece],
    exact: Sequence[Pair] = (),
    *,
    scale: float | None = None,
    chosen: Launch = WHOLE,
    rotated: bool = False,
) -> tuple[Attended, ReadPlan]:
    """Hold the kernel against the reference, relative to the magnitude of the values that each output averages."""
    attended, plan = launch(device, queries, pieces, exact, scale=scale, chosen=chosen, rotated=rotated)
    factor = queries.shape[3] ** -0.5 if scale is None else scale
    output, magnitude, logarithm = (torch.from_numpy(each) for each in reference(queries, pieces, exact, factor))
    assert attended.output.dtype == BF16
    judge_output(attended.output, output, magnitude)
    assert_close("log_sum_exp", attended.log_sum_exp, logarithm, TOLERANCES["log_sum_exp"])
    return attended, plan


def parts_of(plan: ReadPlan) -> list[int]:
    """Among how many programs each pass divides the tokens."""
    (planned,) = plan.tables.values()
    return [each.parts for each in planned.expected()]


@pytest.mark.parametrize(
    ("name", "channels", "chosen"),
    [("klt", 32, WHOLE), ("klt", 80, DIVIDED), ("kvtc", 64, WHOLE), ("quantwm", 32, DIVIDED)],
)
def test_queries_rotated_into_the_basis_of_the_keys(
    device: torch.device, name: str, channels: int, chosen: Launch
) -> None:
    # No outlier channels: their logits of hundreds magnify what the rounding of rotated queries leaves.
    units = [strategies.unit(("normal", "clusters"), seed, tokens, channels) for seed, tokens in enumerate((40, 33))]
    pieces = [piece(sealed(name, unit), sealed(name, unit, kind="values")) for unit in units]
    pieces[1] = pieces[1]._replace(start=5, stop=30)
    queries, exact = normal(1, 4, 20, channels, seed=9), pairs(7, channels=channels)
    attended, _ = launch(device, queries, pieces, exact, chosen=chosen, rotated=True)
    output, magnitude, logarithm = (
        torch.from_numpy(each) for each in reference(queries, pieces, exact, channels**-0.5)
    )
    judge_output(attended.output, output, magnitude)
    assert_close("log_sum_exp", attended.log_sum_exp, logarithm, TOLERANCES["rotated_log_sum_exp"])
    served = attend_packed(queries, ReadPlan(pieces), exact, rotated=True)
    judge_output(served.output, output, magnitude)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("variant", list(variants.every()), ids=str)
def test_every_method(device: torch.device, variant: variants.Variant) -> None:
    units = [strategies.unit(("normal", "channels"), seed, 70, 32) for seed in (0, 1)]
    moment = strategies.moment(1, 2, 32)
    keys, values = (variant.make().seal(kind, unit, moment) for kind, unit in zip(KINDS, units, strict=True))
    check(device, normal(1, 4, 5, 32), [piece(keys, values, 5, 64)], pairs(19))


GROUPS = {32: (4, 16, 32), 64: (16, 64), 80: (16, 40, 80), 96: (32, 48), 128: (16, 64, 128), 256: (64, 128)}


@settings(EXAMPLES)
@given(data=st.data())
def test_any_shape_range_layout_and_division(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    channels, other = (draw(st.sampled_from(strategies.HEAD_DIMENSIONS)) for _ in range(2))
    tokens, seed = draw(st.sampled_from(strategies.TOKENS)), draw(st.integers(0, 99))
    heads, group = draw(st.sampled_from(((1, 1), (1, 3), (2, 1), (2, 2))))
    kinds = ("normal", "clusters")[:heads]
    rank = draw(st.sampled_from((0, 1, 8, 11, 16)))
    keys = sealed(
        "quantwm", strategies.unit(kinds, seed, tokens, channels), queries=draw(st.sampled_from((None, 3))), rank=rank,
        group_size=draw(st.sampled_from(GROUPS[channels])), iterations=1, centroids=8,
    )  # fmt: skip
    values = sealed(
        "qvg", strategies.unit(kinds, seed + 1, tokens, other), kind="values", iterations=1,
        quantizer=draw(st.sampled_from(("affine", "symmetric"))), group_size=draw(st.sampled_from(GROUPS[other])),
    )  # fmt: skip
    start = draw(st.integers(0, tokens - 1))
    stop = draw(st.integers(start, tokens))
    lengths = draw(st.lists(st.integers(0, 20), max_size=2)) if stop > start else [draw(st.integers(1, 20))]
    queries = normal(1, draw(st.integers(1, 18)), heads * group, channels, seed=seed).transpose(1, 2)
    if draw(st.booleans()):
        queries = queries.contiguous()
    attended, _ = check(
        device, queries, [piece(keys, values, start, stop)], pairs(*lengths, heads=heads, channels=channels, values=other),
        scale=draw(st.sampled_from((None, 0.05, -0.1))), chosen=draw(st.sampled_from((WHOLE, DIVIDED))),
    )  # fmt: skip
    ours = queries.new_empty(0).to(device) if not attended.output.numel() else attended.output
    assert (ours.stride(1) < ours.stride(2)) == (queries.stride(1) < queries.stride(2))


def test_units_of_several_methods_and_plain_tokens_are_one_attention(device: torch.device) -> None:
    pieces = [
        simple_piece("kivi", 33, seed=1), simple_piece("quantwm", 40, seed=2), simple_piece("kivi", 20, seed=3),
        simple_piece("bf16", 17, seed=4)._replace(start=3, stop=3), simple_piece("rtn", 17, seed=5),
    ]  # fmt: skip
    for chosen in (WHOLE, DIVIDED):
        _, plan = check(device, normal(1, 2, 5, 32), pieces, pairs(3, 30), chosen=chosen)
        assert len(parts_of(plan)) == 3


@pytest.mark.usefixtures("poisoned")
def test_batches_and_parts(device: torch.device) -> None:
    keys, values = (strategies.unit(("normal", "channels"), seed, 90, 32, batch=2) for seed in (0, 1))
    pieces = [piece(sealed("rtn", keys), sealed("quantwm", values, kind="values", iterations=1))]
    plain = pairs(37, batch=2)
    _, plan = check(device, normal(2, 4, 9, 32), pieces, plain, chosen=DIVIDED)
    many = parts_of(plan)
    _, plan = check(device, normal(2, 2, 9, 32), pieces, plain, chosen=DIVIDED)
    few = parts_of(plan)
    if processors(device) == 1:
        assert (many, few) == ([1], [3])  # eight blocks of queries are work enough
    else:
        assert [1] < many <= few


@pytest.mark.parametrize("chosen", [WHOLE, DIVIDED])
def test_one_huge_key_takes_all(device: torch.device, chosen: Launch) -> None:
    (keys, values), queries = pairs(50)[0], normal(1, 2, 6, 32, seed=9)
    for token in (0, 23, 49):
        huge = keys.clone()
        huge[:, :, token] = queries[:, :, 0] * 2.0**50
        attended, _ = check(device, queries[:, :, :1], [], [(huge, values)], chosen=chosen)
        assert_equal("output", attended.output[:, :, 0], values[:, :, token])


@pytest.mark.parametrize("size", [0.0, 1.0, 2.0**40])
def test_equal_logits_of_any_size_average_all_values(device: torch.device, size: float) -> None:
    keys, values = torch.full((1, 2, 83, 32), size, dtype=BF16), normal(1, 2, 83, 32, seed=1)
    queries = torch.ones(1, 2, 4, 32, dtype=BF16)
    expected = values.float().mean(2, keepdim=True).expand(queries.shape)
    for chosen in (WHOLE, DIVIDED):
        attended, plan = launch(device, queries, [], [(keys, values)], chosen=chosen)
        assert parts_of(plan) == [6 if chosen is DIVIDED else 1]
        assert_close("output", attended.output.float(), expected, TOLERANCES["attention"])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("chosen", [WHOLE, DIVIDED])
def test_no_token_gives_zeros_and_no_weight(device: torch.device, chosen: Launch) -> None:
    empty = simple_piece()._replace(start=7, stop=7)
    for pieces, exact in (([empty], []), ([empty], pairs(0, 0)), ([], pairs(0))):
        attended, _ = launch(device, normal(1, 4, 3, 32), pieces, exact, chosen=chosen)
        assert_equal("output", attended.output, torch.zeros(1, 4, 3, 32, dtype=BF16))
        assert (attended.log_sum_exp == -torch.inf).all()
    attended, _ = launch(device, normal(1, 4, 0, 32), [simple_piece()], chosen=chosen)
    assert attended.output.shape == (1, 4, 0, 32)


def test_a_sparse_ragged_end_is_not_read_beyond(device: torch.device) -> None:
    unit = strategies.unit(("normal", "channels"), 4, 75, 32)
    keys = sealed("quantwm", unit, queries=5, threshold=0.3, iterations=1)
    assert len(keys.arrays["sparse_values"]) > 20
    values = sealed("bf16", unit[:, :, ::-1].copy(), kind="values")
    check(device, normal(1, 2, 3, 32), [piece(keys, values, 1, 75), piece(keys, values, 63, 66)])


@pytest.mark.parametrize("channels", [8, 20, 36])
def test_channels_that_no_vector_divides(device: torch.device, channels: int) -> None:
    for name in ("kivi", "bf16", "quantwm"):
        check(device, normal(1, 2, 3, channels), [simple_piece(name, 21, channels)], pairs(9, channels=channels))


def test_tensors_of_any_strides(device: torch.device) -> None:
    unit, wide = simple_piece(), normal(1, 30, 2, 70, seed=5)
    odd = (wide[:, 3:20, :, 1:33].transpose(1, 2), wide[:, 3:20, :, 34:66].transpose(1, 2))
    apart = (normal(1, 2, 32, 9, seed=6).transpose(2, 3), normal(1, 2, 32, 9, seed=7).transpose(2, 3))
    check(device, normal(1, 4, 7, 33, seed=8)[..., 1:], [unit], [odd, apart])
    check(device, normal(1, 4, 32, 5, seed=8).transpose(2, 3), [unit])


def tokens_first_and_channels_apart(queries: Tensor) -> Tensor:
    """The same queries in memory that no kernel reads as it is."""
    return torch.stack([queries.transpose(1, 2)] * 2, dim=-1)[..., 0].transpose(1, 2)


def test_the_output_is_laid_out_as_a_graph_that_is_compiled_is_told(device: torch.device) -> None:
    queries = tokens_first_and_channels_apart(normal(1, 4, 7, 32, seed=8))
    attended, _ = check(device, queries, [simple_piece()])
    assert attended.output.stride() == packed_attention.output_like(queries, 32).stride() == (896, 32, 128, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_number_formats_are_rounded_first(device: torch.device, dtype: torch.dtype) -> None:
    queries = torch.randn(1, 2, 3, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    check(device, queries, [simple_piece()])


def test_the_logarithm_merges_attentions(device: torch.device) -> None:
    pieces, exact, queries = [simple_piece(seed=1), simple_piece(seed=5)], pairs(21), normal(1, 4, 5, 32)
    whole, _ = launch(device, queries, pieces, exact)
    parts = [launch(device, queries, pieces[:1])[0], launch(device, queries, pieces[1:], exact)[0]]
    logarithms = torch.stack([part.log_sum_exp for part in parts])
    weights = (logarithms - logarithms.logsumexp(0)).exp()
    merged = sum(weight[..., None] * part.output.float() for weight, part in zip(weights, parts, strict=True))
    assert isinstance(merged, Tensor)
    assert_close("merged", merged, whole.output.float(), TOLERANCES["attention"])
    assert_close("log_sum_exp", logarithms.logsumexp(0), whole.log_sum_exp, TOLERANCES["log_sum_exp"])


@pytest.mark.parametrize("chosen", [WHOLE, DIVIDED])
def test_the_same_input_gives_the_same_bytes(device: torch.device, chosen: Launch) -> None:
    first, second = (
        launch(device, normal(1, 2, 5, 32), [simple_piece()], pairs(9), chosen=chosen)[0] for _ in range(2)
    )
    for name, ours, theirs in zip(Attended._fields, first, second, strict=True):
        assert_equal(name, ours, theirs)


def test_tables_are_kept_by_address_and_their_number_is_bounded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = simple_piece(tokens=16)
    plan, queries = ReadPlan([unit._replace(chunk=unit.chunk.to(device))]), normal(1, 2, 1, 32).to(device)
    monkeypatch.setattr(packed_attention, "MOST_TABLES", 2)
    kept = [normal(1, 2, 1, 32, seed=seed).to(device) for seed in range(3)]
    seen = []
    for plain in (kept[0], kept[0], kept[1], kept[0], kept[2]):
        packed_attention.run(queries, plan, [(plain, plain)], (1, 2, 32, 32), 1.0, WHOLE)
        seen.append(len(plan.tables))
    assert seen == [1, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("queries", "exact", "error", "message"),
    [
        (normal(1, 3, 2, 32), [], ShapeError, "multiple of 2"),
        (normal(2, 2, 2, 32), [], ShapeError, "queries"),
        (normal(1, 2, 2, 16), [], ShapeError, "queries"),
        (normal(1, 2, 32), [], ShapeError, "queries"),
        (normal(1, 2, 2, 32).double(), [], DtypeError, "queries"),
        (normal(1, 2, 2, 32).requires_grad_(), [], StateError, "queries"),
        (normal(1, 2, 2, 32), [(normal(1, 2, 4, 32), normal(1, 2, 5, 32))], ShapeError, "same B, H and n"),
        (normal(1, 2, 2, 32), [(normal(1, 1, 4, 32), normal(1, 1, 4, 32))], ShapeError, "need one kind"),
        (normal(1, 2, 2, 32), [(normal(1, 2, 4, 32), normal(1, 2, 4, 32).float())], DtypeError, "plain values 0"),
        (normal(1, 2, 2, 32), [(normal(1, 2, 4, 32).to("meta"),) * 2], DeviceError, "plain keys 0"),
    ],
)
def test_what_does_not_fit_is_refused(queries: Tensor, exact: list[Pair], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attend_packed(queries, ReadPlan([simple_piece()]), exact)


def test_nothing_and_too_many_channels_are_refused() -> None:
    with pytest.raises(ShapeError, match="need one kind"):
        attend_packed(normal(1, 2, 2, 32), ReadPlan([]))
    with pytest.raises(ShapeError, match="at most 256"):
        attend_packed(normal(1, 2, 2, 260), ReadPlan([]), pairs(3, channels=260))


def on_a_gpu(gpu: torch.device) -> tuple[ReadPlan, Tensor, Pair, Callable[[Attended, Pair], None]]:
    """A plan over two units, queries, plain tokens, and a check of a result with plain tokens of any content."""
    pieces = [simple_piece(tokens=300, channels=128, seed=1), simple_piece(tokens=70, channels=128, seed=5)]
    queries = normal(1, 90, 4, 128).transpose(1, 2)
    pair = pairs(200, channels=128)[0]

    def judge(attended: Attended, plain: Pair) -> None:
        ours = [(plain[0].cpu(), plain[1].cpu())]
        output, magnitude, logarithm = map(torch.from_numpy, reference(queries, pieces, ours, 128**-0.5))
        judge_output(attended.output, output, magnitude)
        assert_close("log_sum_exp", attended.log_sum_exp, logarithm, TOLERANCES["log_sum_exp"])

    plan = ReadPlan([each._replace(chunk=each.chunk.to(gpu)) for each in pieces])
    return plan, queries.to(gpu), (pair[0].to(gpu), pair[1].to(gpu)), judge


@pytest.mark.gpu
@pytest.mark.parametrize("name", core_methods.names())
@pytest.mark.parametrize("channels", [64, 80, 128, 256])
def test_attend_packed_with_the_launch_that_is_used(gpu: torch.device, name: str, channels: int) -> None:
    pieces, plain = [simple_piece(name, 700, channels)], pairs(333, channels=channels)
    for count in (1, 50, 300):
        queries = normal(1, 4, count, channels)
        moved = ReadPlan([each._replace(chunk=each.chunk.to(gpu)) for each in pieces])
        attended = attend_packed(queries.to(gpu), moved, [(plain[0][0].to(gpu), plain[0][1].to(gpu))])
        output, magnitude, logarithm = map(torch.from_numpy, reference(queries, pieces, plain, channels**-0.5))
        judge_output(attended.output, output, magnitude)
        assert_close("log_sum_exp", attended.log_sum_exp, logarithm, TOLERANCES["log_sum_exp"])


@pytest.mark.gpu
def test_it_waits_for_nothing_and_allocates_no_keys(gpu: torch.device) -> None:
    plan, queries, plain, judge = on_a_gpu(gpu)
    attend_packed(queries, plan, [plain])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attended = attend_packed(queries, plan, [plain])
        attend_packed(queries, ReadPlan(plan.pieces), [plain])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    judge(attended, plain)
    parts = parts_of(plan)
    partial = sum(parts) * queries.numel() * 5 if parts[0] > 1 else 0
    assert torch.cuda.max_memory_allocated() - before <= 2 * (queries.nbytes + queries.numel() // 8 + partial) + 8192


@pytest.mark.gpu
def test_a_cuda_graph_replays_attention_over_what_was_overwritten(gpu: torch.device) -> None:
    plan, queries, plain, judge = on_a_gpu(gpu)
    attend_packed(queries, plan, [plain])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended = attend_packed(queries, plan, [plain])
    for tensor, other in zip(plain, pairs(1, 200, channels=128)[1], strict=True):
        tensor.copy_(other)
    graph.replay()
    judge(attended, plain)


@pytest.mark.gpu
def test_it_compiles_into_a_graph_without_a_break(gpu: torch.device) -> None:
    plan, queries, plain, judge = on_a_gpu(gpu)

    @torch.compile(fullgraph=True)
    def attend(asked: Tensor, keys: Tensor, values: Tensor) -> Attended:
        return attend_packed(asked + 0, plan, [(keys, values)])

    for pair in (plain, *pairs(200, channels=128), plain):
        moved = pair[0].to(gpu), pair[1].to(gpu)
        judge(attend(queries, *moved), moved)


@pytest.mark.gpu
def test_opcheck_of_attend_packed(gpu: torch.device) -> None:
    plan, queries, plain, _ = on_a_gpu(gpu)
    sealed = [
        tensor
        for each in plan.pieces
        for half in (each.chunk.keys, each.chunk.values)
        for tensor in half.arrays.values()
    ]
    # The schema check compares inputs with allclose, which E4M3 does not have.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for asked in (queries, tokens_first_and_channels_apart(queries)):
        arguments = (asked, sealed, list(plain), plan.specification, 0.1, False)
        torch.library.opcheck(torch.ops.quantwm.attend_packed.default, arguments, test_utils=checks)


@pytest.mark.gpu
def test_attention_without_tables_is_refused_while_a_graph_is_captured(gpu: torch.device) -> None:
    plan, queries, plain, _ = on_a_gpu(gpu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(StateError, match="before the capture"), torch.cuda.graph(graph):
        attend_packed(queries, plan, [plain])


@pytest.mark.gpu
def test_other_lengths_compile_nothing_anew(gpu: torch.device) -> None:
    plan, queries, plain, _ = on_a_gpu(gpu)

    def compiled() -> int:
        return sum(len(caches[0]) for caches in kernels.attend_kernel.function.device_caches.values())

    attend_packed(queries, plan, [plain])
    attend_packed(queries[:, :, :1], plan, [plain])
    known = compiled()
    unit = plan.pieces[0].chunk
    for start, stop, count in ((0, 1, 89), (3, 280, 17), (16, 32, 1)):
        attend_packed(queries[:, :, :count], ReadPlan([Piece(unit, start, stop, 0)]), [(plain[0][:, :, :stop],) * 2])
    assert compiled() == known
