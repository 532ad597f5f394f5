"""seal, decode and decode_into on CUDA tensors: the operator, the plan, graphs, compilation, and what a read may not do."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantwm_core import methods as core_methods
from quantwm_core.chunk import KINDS
from quantwm_core.errors import RangeError, ShapeError, StateError
from quantwm_core.method import decode_tensor
from quantwm_core.method import scheme as make_scheme
from quantwm_kernels import methods, reading
from quantwm_kernels.bridge import to_numpy, to_torch
from quantwm_kernels.chunk import SealedChunk, SealedTensor
from quantwm_kernels.reading import Piece, ReadPlan
from tests.core import strategies
from tests.parity.gate import TOLERANCES, assert_close, assert_equal, poison

kernels = pytest.importorskip("quantwm_kernels.triton.reading", exc_type=ImportError)

OPERATORS = ("seal", "decode")

TOKENS, CHANNELS = 300, 128
BF16 = torch.bfloat16


def chunk(seed: int = 0, tokens: int = TOKENS, method: str = "quantwm", channels: int = CHANNELS) -> SealedChunk:
    """A unit of two heads on the CPU, keys with compensation."""
    units = [strategies.unit(("normal", "channels"), seed + number, tokens, channels) for number in range(2)]
    made = make_scheme(method).seal(units[0], units[1], strategies.moment(seed, 2, channels))
    return SealedChunk.from_core(made)


def expected(sealed: SealedTensor, start: int, stop: int) -> Tensor:
    return to_torch(decode_tensor(sealed.to("cpu").to_core(), start, stop).copy())


def specification(name: str) -> str:
    """What the operator that seals is told of keys."""
    made: Any = core_methods.get(name)
    parameters = dataclasses.asdict(made)
    return json.dumps({"method": name, "parameters": parameters, "label": "keys", "previous": None, "kind": "keys"})


@pytest.mark.gpu
@pytest.mark.parametrize("name", core_methods.names())
def test_decode_into_on_a_gpu(gpu: torch.device, name: str) -> None:
    unit = chunk(method=name).to(gpu)
    for kind in KINDS:
        sealed: SealedTensor = getattr(unit, kind)
        for start, stop in ((0, TOKENS), (17, 211), (299, 300), (5, 5)):
            out = poison(1, stop - start, 2, CHANNELS, dtype=BF16, device=gpu).transpose(1, 2)
            methods.decode_into(sealed, out, start, stop)
            assert_close(kind, out, expected(sealed, start, stop), TOLERANCES["decoded"])
        again = poison(1, 2, 20, CHANNELS, dtype=BF16, device=gpu)
        torch.ops.quantwm.decode(list(sealed.arrays.values()), sealed.specification, again, 3, 23)
        assert_close(kind, again, expected(sealed, 3, 23), TOLERANCES["decoded"])


@pytest.mark.gpu
def test_opcheck_of_decode(gpu: torch.device) -> None:
    sealed = chunk(tokens=40).to(gpu).values
    out = torch.zeros(1, 2, 20, CHANNELS, dtype=BF16, device=gpu)
    arguments = (list(sealed.arrays.values()), sealed.specification, out, 3, 23)
    # The schema check compares inputs with allclose, which E4M3 does not have.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quantwm.decode.default, arguments, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("name", core_methods.names())
def test_seal_on_a_gpu_and_its_opcheck(gpu: torch.device, name: str) -> None:
    values = torch.from_numpy(strategies.unit(("normal", "channels"), 0, 40, CHANNELS).astype(np.float32)).to(gpu)
    mean = torch.from_numpy(strategies.moment(0, 2, CHANNELS).mean).to(gpu)
    arguments: tuple[Any, ...] = (values.to(BF16), mean, 20, [], specification(name))
    results = torch.ops.quantwm.seal(*arguments)
    assert len({result.untyped_storage()._cdata for result in results}) == len(results)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.quantwm.seal.default, arguments, test_utils=checks)


def test_absent_arrays_of_the_operator_share_no_storage(device: torch.device) -> None:
    values = torch.ones(1, 1, 20, 32, dtype=BF16, device=device)
    results = methods._seal_by_kernels(values, None, 0, [], specification("quantwm"))
    assert sum(not result.numel() for result in results) > 1  # a first unit has no compensation
    assert len({result.untyped_storage()._cdata for result in results}) == len(results)


@pytest.mark.gpu
def test_decode_compiles_into_a_graph_without_a_break(gpu: torch.device) -> None:
    sealed = chunk().to(gpu).keys

    @torch.compile(fullgraph=True)
    def read(out: Tensor) -> Tensor:
        methods.decode_into(sealed, out, 10, 74)
        return out.float().sum((0, 1, 3))

    out = poison(1, 2, 64, CHANNELS, dtype=BF16, device=gpu)
    total = read(out)
    plain = poison(1, 2, 64, CHANNELS, dtype=BF16, device=gpu)
    methods.decode_into(sealed, plain, 10, 74)
    assert_equal("decoded", out, plain)
    torch.testing.assert_close(total, plain.float().sum((0, 1, 3)), rtol=1e-4, atol=1e-3)


def plan_of(gpu: torch.device) -> tuple[ReadPlan, Callable[[Tensor, Tensor], None], tuple[Tensor, Tensor]]:
    """A plan over three units of different lengths, a check of what it wrote, and workspaces for it."""
    units = [chunk(seed, tokens).to(gpu) for seed, tokens in ((0, 300), (5, 40), (9, 130))]
    pieces = [Piece(units[0], 100, 300, 0), Piece(units[1], 0, 40, 200), Piece(units[2], 0, 77, 240)]
    outputs = [poison(1, 320, 2, CHANNELS, dtype=BF16, device=gpu).transpose(1, 2) for _ in KINDS]

    def check(keys: Tensor, values: Tensor) -> None:
        for unit, start, stop, place in pieces:
            for kind, out in zip(KINDS, (keys, values), strict=True):
                part = out[:, :, place : place + stop - start]
                assert_close(kind, part, expected(getattr(unit, kind), start, stop), TOLERANCES["decoded"])

    return ReadPlan(pieces), check, (outputs[0], outputs[1])


@pytest.mark.gpu
def test_a_plan_waits_for_nothing_allocates_nothing_and_compiles_once(gpu: torch.device) -> None:
    plan, check, outputs = plan_of(gpu)
    plan.into(*outputs)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    compiled = sum(len(caches[0]) for caches in kernels.read_kernel.function.device_caches.values())
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.into(*outputs)
        other = ReadPlan([Piece(plan.pieces[0].chunk, 3, 298, 5), Piece(plan.pieces[2].chunk, 1, 2, 0)])
        before_tables = torch.cuda.memory_stats()["allocation.all.allocated"]
        other.into(*outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert before_tables == allocations
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations + 1  # the other plan's table
    assert sum(len(caches[0]) for caches in kernels.read_kernel.function.device_caches.values()) == compiled
    plan.into(*outputs)
    check(*outputs)


@pytest.mark.gpu
def test_a_plan_and_a_single_read_made_on_a_busy_stream_serve_another(gpu: torch.device) -> None:
    warm, _, outputs = plan_of(gpu)
    single = [poison(1, 2, 111, CHANNELS, dtype=BF16, device=gpu) for _ in range(2)]
    warm.into(*outputs)  # compiled, for a kernel that is loaded waits for the device
    methods.decode_into(warm.pieces[0].chunk.keys, single[0], 11, 122)
    plan, check, outputs = plan_of(gpu)
    sealed = plan.pieces[0].chunk.keys
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(1_000_000_000)
        scratch = [out.clone() for out in outputs]
        plan.into(*scratch)
        methods.decode_into(sealed, single[0], 11, 122)
    with torch.cuda.stream(second):
        plan.into(*outputs)
        methods.decode_into(sealed, single[1], 11, 122)
        second.synchronize()
        check(*outputs)
    torch.cuda.synchronize()
    assert_equal("single", single[1], single[0])


@pytest.mark.gpu
def test_a_cuda_graph_replays_a_read(gpu: torch.device) -> None:
    plan, check, outputs = plan_of(gpu)
    graph = torch.cuda.CUDAGraph()
    plan.into(*outputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.into(*outputs)
    for out in outputs:
        out.zero_()
    graph.replay()
    check(*outputs)


@pytest.mark.gpu
def test_a_read_without_tables_is_refused_while_a_graph_is_captured(gpu: torch.device) -> None:
    plan, _, outputs = plan_of(gpu)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with pytest.raises(StateError, match="before the capture"), torch.cuda.graph(graph):
        plan.into(*outputs)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_workspace_of_more_elements_than_32_bits_count(gpu: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of GPU memory")
    unit = chunk(tokens=33, method="rtn").to(gpu)
    tokens = 2**31 // (2 * CHANNELS) + 1000
    for token_major in (False, True):
        shape = (1, tokens, 2, CHANNELS) if token_major else (1, 2, tokens, CHANNELS)
        outputs = [torch.zeros(shape, dtype=BF16, device=gpu) for _ in KINDS]
        views = [out.transpose(1, 2) if token_major else out for out in outputs]
        place = tokens - 33
        ReadPlan([Piece(unit, 0, 33, place)]).into(*views)
        for kind, out, view in zip(KINDS, outputs, views, strict=True):
            assert_equal(kind, view[:, :, place:], expected(getattr(unit, kind), 0, 33))
            assert not out.view(-1)[: 2**20].any()
        del outputs, views, out, view


@pytest.mark.gpu
@pytest.mark.slow
def test_a_unit_of_more_elements_than_32_bits_count(gpu: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    tokens, heads = 70_000, 260
    generator = torch.Generator(device=gpu).manual_seed(0)
    exact = torch.randint(0, 2**15, (1, heads, tokens, CHANNELS), dtype=torch.int16, device=gpu, generator=generator)
    sealed = SealedTensor("bf16", {}, (1, heads, tokens, CHANNELS), {"exact": exact.view(BF16)})
    out = torch.empty(1, heads, 50, CHANNELS, dtype=BF16, device=gpu)
    methods.decode_into(sealed, out, tokens - 50, tokens)
    assert torch.equal(out.view(torch.int16), exact[:, :, -50:])


def test_a_plan_on_the_cpu_is_the_reference() -> None:
    units = [chunk(0, 30, channels=32), chunk(1, 20, method="kivi", channels=32)]
    plan = ReadPlan([Piece(units[0], 7, 25, 2), Piece(units[1], 0, 20, 20)])
    keys, values = (poison(1, 2, 41, 32, dtype=BF16) for _ in KINDS)
    plan.into(keys, values)
    for kind, out in zip(KINDS, (keys, values), strict=True):
        assert_equal(kind, out[:, :, 2:20], expected(getattr(units[0], kind), 7, 25))
        assert_equal(kind, out[:, :, 20:40], expected(getattr(units[1], kind), 0, 20))
        assert (to_numpy(out[:, :, :2].contiguous().view(torch.uint8)) == 0xA5).all()


def test_a_plan_or_workspace_that_does_not_fit_is_refused() -> None:
    unit = chunk(0, 30, method="rtn", channels=32)
    for start, stop, place in ((-1, 4, 0), (5, 31, 0), (6, 5, 0), (0, 4, -1)):
        with pytest.raises(RangeError, match="sealed unit of 30"):
            ReadPlan([Piece(unit, start, stop, place)])
    with pytest.raises(ShapeError, match="read them apart"):
        ReadPlan([Piece(unit, 0, 3, 0), Piece(chunk(0, 30, method="rtn", channels=64), 0, 3, 3)])
    plan = ReadPlan([Piece(unit, 0, 30, 2)])
    fit = torch.empty(1, 2, 32, 32, dtype=BF16)
    for bad in (fit[:, :, :31], fit[:, :1], fit[..., :16], fit[0]):
        with pytest.raises(ShapeError, match="workspace of values"):
            plan.into(fit, bad)
    with pytest.raises(StateError, match=r"workspace of keys.*requires grad"):
        plan.into(torch.empty(1, 2, 32, 32, dtype=BF16, requires_grad=True), fit)
    assert reading.ReadPlan([]).into(fit, fit) is None  # type: ignore[func-returns-value]  # nothing to read
