"""Reading a sealed layer: share of the copy bandwidth that reconstruction of keys and values reaches.

    python -m benchmarks.decode                      all shapes, parity first
    python -m benchmarks.decode --shape longcat --method quantwm
    python -m benchmarks.decode --sweep              other launch parameters too; the best of each shape last

Sealed units are made of random bytes, so nothing has to be encoded. Bytes are those of storage, read once, and of BF16
keys and values, written once. Bandwidth of a copy counts bytes read plus bytes written. A line of JSON per
measurement goes to ``benchmarks/results/decode.jsonl``.
"""

import argparse
import itertools
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import needs, peer
from quantwm_core.method import decode_tensor
from quantwm_core.packing import nibble_size, packed_size
from quantwm_kernels.bridge import to_torch
from quantwm_kernels.chunk import SealedChunk, SealedTensor
from quantwm_kernels.description import describe
from quantwm_kernels.launch import Launch
from quantwm_kernels.reading import Piece, ReadPlan
from quantwm_kernels.reading_batches import launch_of
from quantwm_kernels.recipe import Recipe

# Tokens, heads, head dimension of one layer's sealed unit.
SHAPES = {
    "longcat": (29640, 32, 128),
    "lingbot": (6240, 40, 128),
    "hy": (7040, 24, 256),
    "causal-forcing": (9360, 12, 128),
    "causal-forcing-1": (4680, 12, 128),
    "matrix-game": (2640, 12, 128),
}
METHODS = ("quantwm", "sharp", "qvg", "klt", "oscar", "bf16")  # sharp: the preset of quantwm
PRODUCTS = ("klt", "oscar")
CENTROIDS, GROUP, RANK = 256, 64, 8
SHARP_GROUP, SHARP_RANK = 32, 16
RESULTS = Path(__file__).parent / "results" / "decode.jsonl"
REPEATS, CALLS = 15, 10
COPY_NBYTES = 1 << 30


def random_products(method: str, shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Arrays of a transform code of two bits an element, nine of sixteen directions coded, or of a rotation."""
    tokens, heads, channels = shape
    device = generator.device
    counts = [channels // 128, channels // 32, channels // 32] if method == "klt" else [0, 0, channels // 8]
    coded = 8 * sum(counts) * heads

    def integers(*size: int) -> Tensor:
        return torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)

    def steps(*size: int) -> Tensor:
        return torch.rand(size, device=device, generator=generator).bfloat16() / 64

    arrays = {
        "shared_basis": integers(coded, channels).view(torch.int8),
        "shared_basis_scales": steps(coded),
        "shared_basis_blocks": torch.full((1, heads), sum(counts), dtype=torch.uint8, device=device),
    }
    if method == "oscar":
        arrays["shared_fitted"] = torch.ones_like(arrays["shared_basis_blocks"])
        pair = {name: steps(1, heads, tokens, 1) for name in ("scales", "minima")}
        return arrays | pair | {"codes": integers(1, heads, tokens, packed_size(channels))}
    places = torch.arange(8 * sum(counts), dtype=torch.uint8, device=device)
    return arrays | {
        "codes": integers(heads * tokens * packed_size(channels)),
        "blocks": torch.tensor(counts, dtype=torch.uint8, device=device).expand(1, heads, 3).contiguous(),
        "order": places.repeat(heads),
        "steps": steps(coded),
        "means": steps(1, heads, channels),
    }


def random_tensor(kind: str, method: str, shape: tuple[int, int, int], generator: torch.Generator) -> SealedTensor:
    """A sealed tensor of random bytes whose scales, centroids and basis are of ordinary size."""
    tokens, heads, channels = shape
    device, groups = generator.device, channels // (SHARP_GROUP if method == "sharp" else GROUP)

    def integers(low: int, high: int, *size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, (1, heads, *size), dtype=dtype, device=device, generator=generator)

    def normal(*size: int) -> Tensor:
        return torch.randn((1, heads, *size), device=device, generator=generator).bfloat16()

    full = (1, heads, tokens, channels)
    if method == "bf16":
        return SealedTensor(method, {}, full, {"exact": normal(tokens, channels)})
    if method in PRODUCTS:
        return SealedTensor(method, {}, full, random_products(method, shape, generator))
    arrays = {
        "codes": integers(0, 255 if method == "qvg" else 256, tokens, packed_size(channels)),
        "scales": integers(0x30, 0x7F, tokens, groups).view(torch.float8_e4m3fn),
        "index": integers(0, CENTROIDS, tokens),
        "centroids": normal(CENTROIDS, channels),
    }
    if method != "qvg":
        arrays["zero_points"] = integers(0, 256, packed_size(tokens * groups))
        arrays["super_scale"] = torch.full((1, heads), 2.0**-8, device=device)
    if method == "sharp":
        arrays["centroids"] = integers(0, 256, CENTROIDS, nibble_size(channels))
        # A scale has so few significant bits that its products with integers are BF16 numbers.
        arrays["centroid_scales"] = ((normal(channels).abs() / 8).view(torch.int16) & -8).view(torch.bfloat16)
        if kind == "keys":
            arrays["basis"] = normal(channels, SHARP_RANK) / channels**0.5
            arrays["coefficient_scales"] = normal(SHARP_RANK).abs() / 4
            arrays["coefficients"] = integers(0, 256, tokens, nibble_size(SHARP_RANK))[0]
    if method == "quantwm" and kind == "keys":
        arrays["basis"] = normal(channels, RANK) / channels**0.5
        arrays["coefficient_scales"] = normal(RANK).abs() / 64
        arrays["coefficients"] = integers(-127, 128, tokens, RANK, dtype=torch.int8)[0]
    return SealedTensor("quantwm" if method == "sharp" else method, {}, full, arrays)


def random_chunk(method: str, shape: tuple[int, int, int], seed: int, device: torch.device) -> SealedChunk:
    """Keys and values of a unit."""
    generator = torch.Generator(device).manual_seed(seed)
    return SealedChunk(
        random_tensor("keys", method, shape, generator), random_tensor("values", method, shape, generator)
    )


def check_parity(chunk: SealedChunk, keys: Tensor, values: Tensor) -> None:
    """Hold the begin, the middle and the end of what was read against the reference.

    Raises:
        AssertionError: A number lies farther off than the rounding of FP32 sums and of BF16 explains.
    """
    for sealed, out in ((chunk.keys, keys), (chunk.values, values)):
        core, tokens = sealed.to("cpu").to_core(), sealed.shape[2]
        for start in {0, tokens // 2 - 33, max(0, tokens - 100)}:
            stop = min(start + 100, tokens)
            expected = to_torch(decode_tensor(core, start, stop).copy()).float()
            off = (out[:, :, start:stop].cpu().float() - expected).abs()
            # A sum whose terms cancel keeps the rounding of its terms.
            beyond = off - 2.0**-7 * expected.abs() - 2.0**-18 * expected.abs().max()
            worst = beyond.argmax()
            assert beyond.max() <= 0, (
                f"{sealed.method}: {expected.flatten()[worst]} off by {off.flatten()[worst]} in {start}:{stop}"
            )


def seconds(calls: Sequence[Callable[[], object]], head_start: Callable[[], None]) -> float:
    """Median device time of a call. Calls are enqueued behind other work, so that the host's time does not show."""
    for call in calls[:3]:
        call()
    queue = itertools.cycle(calls)
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        head_start()
        begin.record()
        for _ in range(CALLS):
            next(queue)()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS / 1e3)
    return median(times)


def host_seconds(calls: Sequence[Callable[[], None]]) -> float:
    """Median time per call of calls one after the other, the host's part included."""
    queue, times = itertools.cycle(calls), []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(4 * CALLS):
            next(queue)()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / (4 * CALLS))
    return median(times)


class Copier:
    """Copies between large buffers: the yardstick, and the head start of what is measured."""

    def __init__(self, device: torch.device) -> None:
        self.buffers = [torch.empty(COPY_NBYTES // 2, dtype=torch.uint8, device=device) for _ in range(2)]

    def __call__(self) -> None:
        self.buffers[1].copy_(self.buffers[0])

    def bandwidth(self) -> float:
        """Bytes read plus written per second."""
        return COPY_NBYTES / seconds([self], self)


def recipe_of(sealed: SealedTensor) -> Recipe:
    """What a kernel must know of a tensor."""
    return describe(sealed.method, sealed.parameters, sealed.shape, sealed.arrays).recipe


class Subject:
    """A shape and a method with enough copies of input and output that none is found in the L2 cache."""

    def __init__(self, method: str, shape: tuple[int, int, int], device: torch.device) -> None:
        tokens, heads, channels = shape
        self.tokens = tokens
        first = random_chunk(method, shape, 0, device)
        self.nbytes = first.nbytes + first.bf16_nbytes
        count = 1 + 2 * torch.cuda.get_device_properties(device).L2_cache_size // self.nbytes
        self.chunks = [first, *(random_chunk(method, shape, seed, device) for seed in range(1, count))]
        sizes = (1, tokens, heads, channels)
        self.launch = launch_of(*(recipe_of(each) for each in (first.keys, first.values)))
        self.outputs = [
            tuple(torch.empty(sizes, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(2))
            for _ in range(count)
        ]

    def calls(self, launch: Launch | None = None) -> list[Callable[[], None]]:
        """A read of each copy; the first has been held against the reference."""
        plans = [ReadPlan([Piece(chunk, 0, self.tokens, 0)], launch) for chunk in self.chunks]
        calls: list[Callable[[], None]] = [
            partial(plan.into, *out) for plan, out in zip(plans, self.outputs, strict=True)
        ]
        for out in self.outputs[0]:
            out.fill_(float("nan"))
        calls[0]()
        check_parity(self.chunks[0], *self.outputs[0])
        return calls


def peer_seconds(shape: tuple[int, int, int], copies: int, copier: Copier) -> float | None:
    """Time in which the peer reconstructs keys and values of a shape once, or None without it."""
    if not peer.available():
        return None
    tokens, heads, channels = shape
    generator = torch.Generator(copier.buffers[0].device).manual_seed(0)

    def normal() -> Tensor:
        size = (1, heads, tokens, channels)
        return torch.randn(size, device=generator.device, generator=generator).bfloat16()

    sealed = [peer.sealer(normal(), normal(), iterations=2)() for _ in range(copies)]
    return seconds([peer.reader(each) for each in sealed], copier)


def launches(method: str, usual: Launch) -> Iterator[Launch]:
    """Launch parameters worth a try; few sizes, because each takes seconds to compile, and several lengths of a program."""
    sizes: tuple[tuple[int, int, int], ...]
    lengths: tuple[tuple[int, int], ...]
    if method in PRODUCTS:
        sizes, lengths = ((64, 4, 0), (64, 4, 128), (128, 8, 0)), ((2, 32), (4, 8), (4, 16), (4, 32), (8, 16))
    elif method == "bf16":
        sizes, lengths = ((16, 2, 0), (16, 2, 96), (32, 4, 0)), ((4, 8), (16, 8), (16, 32))
    else:  # a warp has 16 tokens, or numbers are exchanged
        sizes, lengths = ((64, 4, 0), (64, 4, 128), (64, 4, 168), (128, 8, 128)), ((3, 4), (3, 8), (4, 8), (4, 16))
    for (tokens, warps, registers), (programs, most) in itertools.product(sizes, lengths):
        yield replace(
            usual, warps=warps, blocks={"BLOCK_TOKENS": tokens}, programs=programs, most_tiles=most, registers=registers
        )


def described(launch: Launch) -> dict[str, int]:
    return {
        "warps": launch.warps,
        **launch.blocks,
        "programs": launch.programs,
        "most_tiles": launch.most_tiles,
        "registers": launch.registers,
    }


def environment() -> dict[str, Any]:
    """What a figure belongs to."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603 - a fixed command
    return {
        "benchmark": "decode",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else "none",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit or "unknown",
    }


def keep(line: dict[str, Any], results: Path) -> None:
    """Add a measurement to a file of results."""
    results.parent.mkdir(exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def report(line: dict[str, Any]) -> None:
    """Show a measurement and keep it."""
    keep(line, RESULTS)
    launch = " ".join(f"{name}={value}" for name, value in line["launch"].items())
    theirs = line["peer_seconds"]
    ratio = "" if theirs is None else f"{theirs / line['seconds']:.1f} times as fast as the peer  "
    print(
        f"{line['shape']:17} {line['method']:8} {1e3 * line['seconds']:8.4f} ms  {line['nbytes'] / 2**20:7.1f} MiB  "
        f"{100 * line['share_of_copy']:5.1f} % of copy  call {1e3 * line['host_seconds']:7.4f} ms  {ratio}{launch}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument(
        "--sweep", action="store_true", help="try other launch parameters (quantwm unless --method says otherwise)"
    )
    arguments = parser.parse_args()
    device = needs.cuda(parser)
    copier, known = Copier(device), environment()
    bandwidth = copier.bandwidth()
    print(f"{known['gpu']}, torch {known['torch']}, triton {known['triton']}: copy {bandwidth / 1e12:.2f} TB/s")
    peers: dict[str, float | None] = {}
    methods = arguments.method or (("quantwm",) if arguments.sweep else METHODS)
    for name, method in itertools.product(arguments.shape or SHAPES, methods):
        subject = Subject(method, SHAPES[name], device)
        tried = []
        for launch in launches(method, subject.launch) if arguments.sweep else (subject.launch,):
            calls = subject.calls(launch)
            took = seconds(calls, copier)
            share = subject.nbytes / took / bandwidth
            if not arguments.sweep and name not in peers:
                peers[name] = peer_seconds(SHAPES[name], len(subject.chunks), copier)
            tried.append(
                known
                | {"shape": name, "method": method, "nbytes": subject.nbytes, "copy_bandwidth": bandwidth}
                | {"seconds": took, "host_seconds": host_seconds(calls), "share_of_copy": share}
                | {"peer_seconds": peers.get(name)}
                | {"launch": described(launch)}
            )
        for line in sorted(tried, key=lambda each: -each["seconds"])[-5:]:  # the best is shown last
            report(line)


if __name__ == "__main__":
    main()
