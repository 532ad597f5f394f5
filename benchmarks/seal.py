"""Sealing a layer: time against a floor of bytes and matrix products, kernel by kernel.

    python -m benchmarks.seal                      all shapes, parity first
    python -m benchmarks.seal --shape longcat --iterations 2
    python -m benchmarks.seal --sweep              each kernel alone under other launch parameters; the best shown last

The floor of a seal is 6.3 bytes an element, the tensors read three times and the codes written once, at the bandwidth of
a copy, and a matrix product of tokens and centroids per round and one more, at the rate of a large BF16 product.
A line of JSON per measurement goes to ``benchmarks/results/seal.jsonl``.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

try:
    from triton.runtime.errors import OutOfResources
except ImportError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(
        "benchmarks.seal: the package triton is not installed; packages/quantwm-kernels[gpu] brings it"
    ) from error

from benchmarks import needs, peer
from benchmarks.decode import COPY_NBYTES, SHAPES, Copier, environment
from quantwm_core import affine as core_affine
from quantwm_core import clustered
from quantwm_core import codebook as core_codebook
from quantwm_core import methods as core_methods
from quantwm_core.method import Method
from quantwm_kernels import launch
from quantwm_kernels.bridge import to_numpy
from quantwm_kernels.launch import Launch
from quantwm_kernels.sealing import Asked
from quantwm_kernels.triton import affine, codebook, psac, qsac, sealing, statistics
from quantwm_kernels.triton.layer import Layer
from quantwm_kernels.triton.projection import Projection
from quantwm_kernels.triton.residual import Residual

CENTROIDS, GROUP, RANK, CANDIDATES = 256, 64, 8, 4
LAYERS = 10
QUERIES = 4680
RESULTS = Path(__file__).parent / "results" / "seal.jsonl"
FLOOR_NBYTES_PER_ELEMENT = 6.3
MATRIX = 8192
OBJECTIVE = 1e-3


def tokens_of(shape: tuple[int, int, int], seed: int, device: torch.device) -> Tensor:
    """BF16 ``[1, H, N, D]`` as keys are: clusters around a mean with a few large channels."""
    tokens, heads, channels = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    scale = torch.exp(0.5 * normal(heads, 1, channels))
    middles = normal(heads, 64, channels)
    which = torch.randint(64, (heads, tokens), device=device, generator=generator)
    near = middles.gather(1, which[..., None].expand(-1, -1, channels))
    whole = (near + 0.7 * normal(heads, tokens, channels)) * scale + 2 * normal(heads, 1, channels)
    return whole.bfloat16()[None]


def seconds(call: Callable[[], object], repeats: int = 9, head_start: Callable[[], None] | None = None) -> float:
    """Median time of a call between two events; with a head start, of the device alone."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if head_start is not None:
            head_start()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def busy(copier: Copier) -> None:
    """Work for the device while the host enqueues."""
    for _ in range(16):
        copier()


def matrix_rate(device: torch.device) -> float:
    """Operations per second of a large BF16 product of random numbers."""
    left, right = (torch.randn(MATRIX, MATRIX, device=device).bfloat16() for _ in range(2))
    return 2 * MATRIX**3 / seconds(lambda: left @ right)


@cache
def method_of(iterations: int) -> Method:
    """The paper's setting, but for the rounds."""
    return core_methods.get("quantwm", centroids=CENTROIDS, candidates=CANDIDATES, rank=RANK, iterations=iterations)


class Subject:
    """Keys, values and queries of one layer."""

    def __init__(self, name: str, device: torch.device, shape: tuple[int, int, int] | None = None) -> None:
        self.name = name
        self.shape = SHAPES[name] if shape is None else shape
        tokens, heads, channels = self.shape
        self.keys, self.values = (tokens_of(self.shape, seed, device) for seed in (0, 1))
        self.queries = tokens_of((QUERIES, heads, channels), 2, device)
        self.moment = statistics.second_moment(self.queries, heads)
        self.basis = statistics.principal_basis(self.moment.mean, RANK)
        self.elements = 2 * tokens * heads * channels

    def asked(self, iterations: int) -> list[Asked]:
        method = method_of(iterations)
        return [Asked(method, "keys", self.keys, "keys"), Asked(method, "values", self.values, "values")]

    def seal(self, iterations: int) -> Any:
        return sealing.seal(self.asked(iterations), self.moment)

    def floor(self, iterations: int, bandwidth: float, rate: float) -> float:
        products = (iterations + 1) * 2 * self.elements * CENTROIDS
        return FLOOR_NBYTES_PER_ELEMENT * self.elements / bandwidth + products / rate


def check_parity(name: str, device: torch.device) -> None:
    """Hold two heads of a shape against the reference before anything is timed.

    Raises:
        AssertionError: A byte that follows from codebook and index differs, or the codebook is worse.
    """
    tokens, _, channels = SHAPES[name]
    subject = Subject(name, device, (min(tokens, 4096), 2, channels))
    sealed = subject.seal(2).wait()
    weights = to_numpy(statistics.sensitivity(subject.moment.mean).cpu())
    for ours, exact, metric in zip(sealed, (subject.keys, subject.values), (weights, None), strict=True):
        unit, arrays = to_numpy(exact.cpu()), ours.to("cpu").to_core().arrays
        residual = unit.astype(np.float32) - clustered.gather(arrays["centroids"], arrays["index"])
        for part, want in vars(core_affine.encode(residual, GROUP)).items():
            assert arrays[part].tobytes() == want.tobytes(), f"{name} {part} differs from the reference"
        reference = core_codebook.fit(unit, CENTROIDS, metric, 2)
        cost = [objective(unit, table, metric) for table in (arrays["centroids"], reference)]
        assert abs(cost[0].sum() / cost[1].sum() - 1) < OBJECTIVE, f"{name}: objective {cost[0]} for {cost[1]}"
        again = subject.seal(2).wait()[0 if metric is not None else 1]
        assert all(torch.equal(again.arrays[part].view(torch.uint8), array.view(torch.uint8))
                   for part, array in ours.arrays.items()), f"{name}: other bytes the second time"  # fmt: skip


def objective(unit: np.ndarray, table: np.ndarray, metric: np.ndarray | None) -> np.ndarray:
    """Sum of distances to the nearest centroid, per head, in FP64 products."""
    wide = [
        array.astype(np.float64) * (1 if metric is None else np.sqrt(metric)[..., None, :]) for array in (unit, table)
    ]
    cross = wide[0] @ np.swapaxes(wide[1], -1, -2)
    norms = [np.square(each).sum(-1) for each in wide]
    return np.asarray((norms[0][..., :, None] - 2 * cross + norms[1][..., None, :]).min(-1).sum(-1))


def kernels_of(call: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """How often each kernel of a call was launched, and its seconds on the device."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    found = {
        event.key: (event.count, event.self_device_time_total / 1e6)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    }
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def report(line: dict[str, Any]) -> None:
    """Keep a measurement."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def measure(
    subject: Subject, iterations: int, known: dict[str, Any], copier: Copier, yardsticks: tuple[float, float]
) -> None:
    """Time one shape, with the basis known and with the basis computed."""
    solve = statistics.principal_basis
    floor = subject.floor(iterations, *yardsticks)
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    subject.seal(iterations).wait()
    peak = torch.cuda.max_memory_allocated() - base
    whole = seconds(lambda: subject.seal(iterations), repeats=5)
    statistics.principal_basis = lambda *_: subject.basis
    try:
        took = seconds(lambda: subject.seal(iterations))
        device = seconds(lambda: subject.seal(iterations), head_start=partial(busy, copier))
        begun = time.perf_counter()
        subject.seal(iterations)
        host = time.perf_counter() - begun
        breakdown = kernels_of(lambda: subject.seal(iterations))
    finally:
        statistics.principal_basis = solve
    theirs = seconds(peer.sealer(subject.keys, subject.values, iterations), repeats=5) if peer.available() else None
    ratio = "" if theirs is None else f"  {theirs / whole:.2f} times as fast as the peer ({1e3 * theirs:.3f})"
    print(
        f"{subject.name:17} {iterations:2} rounds {1e3 * took:8.3f} ms (device {1e3 * device:.3f}, host {1e3 * host:.3f}, "
        f"with basis {1e3 * whole:.3f})  floor {1e3 * floor:.3f}  {100 * floor / took:5.1f} %  peak {peak / 2**20:.0f} MiB{ratio}"
    )
    for kernel, (count, spent) in itertools.islice(breakdown.items(), 14):
        print(f"    {1e3 * spent:8.3f} ms {count:4} x  {kernel[:90]}")
    report(
        known
        | {
            "shape": subject.name,
            "iterations": iterations,
            "seconds": took,
            "device_seconds": device,
            "host_seconds": host,
            "peer_seconds": theirs,
        }
        | {"seconds_with_basis": whole, "floor_seconds": floor, "share_of_floor": floor / took, "peak_nbytes": peak}
        | {"copy_bandwidth": yardsticks[0], "matrix_rate": yardsticks[1], "kernels": breakdown}
    )


def measure_statistics(subject: Subject, known: dict[str, Any], copier: Copier, bandwidth: float) -> None:
    """Time the moment of an attention call's queries, and the basis."""
    heads = subject.shape[1]
    took = seconds(lambda: statistics.second_moment(subject.queries, heads), head_start=copier)
    call = seconds(lambda: statistics.second_moment(subject.queries, heads))
    basis = seconds(lambda: statistics.principal_basis(subject.moment.mean, RANK), repeats=3)
    share = 2 * subject.queries.numel() / bandwidth / took
    print(f"{subject.name:17} moment of {QUERIES} queries {1e3 * took:.4f} ms on the device ({100 * share:.0f} % of copy), "
          f"{1e3 * call:.4f} ms a call; basis {1e3 * basis:.3f} ms")  # fmt: skip
    report(
        known | {"shape": subject.name, "moment_seconds": took, "moment_share_of_copy": share, "basis_seconds": basis}
    )


def measure_waits(subject: Subject, known: dict[str, Any]) -> None:
    """Time sealing that is waited for layer by layer, and once behind all layers."""

    def each() -> None:
        for _ in range(LAYERS):
            subject.seal(10).wait()

    def once() -> None:
        for pending in [subject.seal(10) for _ in range(LAYERS)]:
            pending.wait()

    apart, together = (seconds(call, repeats=5) / LAYERS for call in (each, once))
    print(
        f"{subject.name:17} 10 rounds, waited for layer by layer {1e3 * apart:.3f} ms a layer, once {1e3 * together:.3f}"
    )
    report(known | {"shape": subject.name, "waits_seconds": apart, "one_wait_seconds": together, "layers": LAYERS})


def parts_of(subject: Subject) -> dict[str, Callable[[], object]]:
    """Each kernel alone, by the name of its launch."""
    layer = Layer.of(subject.keys, subject.values)
    weights = torch.ones(layer.streams, layer.channels, device=layer.first.device)
    own = layer.per_tensor
    statistics.write_sensitivity(subject.moment.mean, weights[:own], layer.empty(dtype=torch.int32))
    frame = codebook.begin(layer, CENTROIDS, weights, None)
    codebook.prepare(frame, None, final=False)
    index = layer.empty(layer.tokens, dtype=torch.uint8)
    codebook.assign(frame, index)
    update, _ = codebook.add_members(frame, index)
    last = codebook.begin(layer, CENTROIDS, weights, None)
    codebook.refine(last, 2)
    found = codebook.rank(last, CANDIDATES, 1)
    chosen, largest = qsac.choose_layer(last, found, GROUP, weights, CANDIDATES, 1)
    matrix = psac.projection_of(subject.basis[0].flatten(0, 1))
    energies = subject.basis[1].flatten(0, 1)
    non_zero = torch.zeros(own, dtype=torch.int32, device=layer.first.device)

    def encode() -> Projection:
        along = Projection.onto(matrix, layer.tokens)
        affine.encode_layer(layer, GROUP, largest, Residual(chosen, last.stored), along)
        return along

    along = encode()
    wide = "_wide" if layer.channels > codebook.WIDE else ""
    return {
        "magnitude": lambda: codebook.magnitudes_of(layer),
        f"assign_centroids{wide}": lambda: codebook.assign(frame, index),
        f"sum_members{wide}": lambda: codebook.add_members(frame, index),
        "prepare_centroids": lambda: codebook.prepare(frame, update, final=False),
        f"rank_centroids{wide}": lambda: codebook.rank(last, CANDIDATES, 1),
        "choose_centroids": lambda: qsac.choose_layer(last, found, GROUP, weights, CANDIDATES, 1),
        "encode_groups": encode,
        "quantize_coefficients": lambda: psac.quantize(
            along.coefficients, along.peaks, energies, layer.channels, 0.0, non_zero
        ),
        "second_moment": lambda: statistics.second_moment(subject.queries, subject.shape[1]),
    }


CHOICES: dict[str, dict[str, Sequence[int]]] = {
    "magnitude": {"TILE": (32, 64), "warps": (4, 8), "programs": (8, 16)},
    "assign_centroids": {"TILE": (64, 128), "warps": (4, 8), "stages": (2, 3), "programs": (2, 4)},
    "sum_members": {"TILE": (64, 128), "BLOCK_C": (128, 256), "warps": (4, 8), "stages": (2, 3), "programs": (1, 2, 4)},
    "assign_centroids_wide": {"TILE": (64,), "warps": (4, 8), "stages": (1, 2), "programs": (1, 2, 3, 6)},
    "sum_members_wide": {
        "BLOCK_C": (128, 256),
        "BLOCK_K": (64, 128),
        "stages": (2, 3),
        "programs": (2, 3, 4),
        "registers": (0, 128),
    },
    "prepare_centroids": {"ROWS": (4, 8, 16, 32), "warps": (2, 4, 8)},
    "rank_centroids": {"TILE": (64, 128), "warps": (4, 8), "stages": (1,), "programs": (1, 2, 4)},
    "rank_centroids_wide": {
        "TILE": (64, 128),
        "BLOCK_K": (32,),
        "warps": (4, 8),
        "stages": (2, 3),
        "programs": (2, 4, 8),
    },
    "choose_centroids": {"TILE": (8, 16, 32), "warps": (2, 4), "programs": (16, 32), "registers": (0, 64)},
    "encode_groups": {"TILE": (16, 32, 64), "warps": (2, 4, 8), "registers": (0, 96, 128, 168)},
    "quantize_coefficients": {"TILE": (64, 128, 256), "warps": (4,)},
    "second_moment": {"TILE": (32, 64, 128), "warps": (4, 8), "stages": (2, 3), "programs": (1, 2)},
}


def launches(name: str) -> Iterator[Launch]:
    """Launch parameters worth a try."""
    entry, choices = launch.LAUNCHES[name], CHOICES[name]
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        blocks = {block: chosen.pop(block) for block in list(chosen) if block.isupper()}
        yield replace(entry, blocks={**entry.blocks, **blocks}, **chosen)


def sweep(subject: Subject, known: dict[str, Any], copier: Copier, only: Sequence[str]) -> None:
    """Time every kernel under other launch parameters, and show the best five."""
    table = cast("dict[str, Launch]", launch.LAUNCHES)
    for name, call in parts_of(subject).items():
        if only and name not in only:
            continue
        stock, tried = table[name], []
        for each in [stock, *launches(name)]:
            table[name] = each
            try:
                tried.append((seconds(call, repeats=5, head_start=copier), each))
            except (OutOfResources, RuntimeError) as error:
                print(f"    {name} {each.options}: {str(error).splitlines()[0][:90]}")
        table[name] = stock
        print(f"{subject.name} {name}: {1e3 * tried[0][0]:.4f} ms as it is launched")
        for took, each in sorted(tried, key=lambda pair: -pair[0])[-5:]:
            print(
                f"    {1e3 * took:8.4f} ms  warps {each.warps} stages {each.stages} programs {each.programs} "
                f"registers {each.registers} {dict(each.blocks)}"
            )
            line = {"warps": each.warps, "stages": each.stages, "programs": each.programs, **each.blocks}
            line["registers"] = each.registers
            report(known | {"shape": subject.name, "kernel": name, "seconds": took, "launch": line})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--iterations", type=int, action="append")
    parser.add_argument("--sweep", action="store_true", help="try other launch parameters, each kernel alone")
    parser.add_argument("--kernel", choices=CHOICES, action="append", help="sweep these kernels only")
    parser.add_argument("--no-parity", action="store_true", help="after a run that held parity")
    arguments = parser.parse_args()
    device = needs.cuda(parser)
    known = environment() | {"benchmark": "seal"}
    copier = Copier(device)
    yardsticks = (COPY_NBYTES / seconds(copier), matrix_rate(device))
    print(f"{known['gpu']}, torch {known['torch']}, triton {known['triton']}: copy {yardsticks[0] / 1e12:.2f} TB/s, "
          f"BF16 product {yardsticks[1] / 1e12:.0f} TFLOP/s")  # fmt: skip
    names = arguments.shape or (["longcat", "causal-forcing-1", "hy"] if arguments.sweep else list(SHAPES))
    for name in names:
        if not arguments.no_parity:
            check_parity(name, device)
        subject = Subject(name, device)
        if arguments.sweep:
            sweep(subject, known, copier, arguments.kernel or ())
            continue
        measure_statistics(subject, known, copier, yardsticks[0])
        for iterations in arguments.iterations or (2, 10):
            measure(subject, iterations, known, copier, yardsticks)
        measure_waits(subject, known)


if __name__ == "__main__":
    main()
