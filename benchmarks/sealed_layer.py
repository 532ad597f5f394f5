"""A layer that is sealed on a GPU, and what :mod:`benchmarks.seal` measures of it; needs Triton."""

import itertools
import json
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import peer
from benchmarks.decode import SHAPES, Copier
from quantwm_core import affine as core_affine
from quantwm_core import clustered
from quantwm_core import codebook as core_codebook
from quantwm_core import methods as core_methods
from quantwm_core.method import Method
from quantwm_kernels.bridge import to_numpy
from quantwm_kernels.sealing import Asked
from quantwm_kernels.triton import sealing, statistics

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
