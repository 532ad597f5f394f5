"""Saving and loading a whole cache, against writing and reading the same bytes.

    python -m benchmarks.snapshot --folder PATH [--device cuda] [--layers 48] [--heads 32] [--tokens 29640]

Run from the repository's root; the defaults are LongCat-Video's history of 19 latents. What is loaded is held against what
was saved first. Writes end when the disk has the bytes (fsync); before reads the system is asked to forget the file. Each
is the fastest of the repeats, both kinds in turn. A line of JSON: GiB, GB/s of each, and what the snapshot makes of the
plain speed.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import needs
from quantwm_models import LayerCache, snapshot

BLOCK = 2**25


def caches(options: argparse.Namespace, path: Path) -> list[LayerCache]:
    """Layers of the same sealed unit, each in memory of its own, and a short active chunk."""
    generator = torch.Generator(options.device).manual_seed(0)
    made = [LayerCache(options.method) for _ in range(options.layers)]
    for tokens in (options.tokens, 16):
        keys, values, queries = torch.randn(
            3, 1, options.heads, tokens, 128, generator=generator, device=options.device, dtype=torch.bfloat16
        )
        made[0].append(keys, values)
        made[0].observe(queries)
    snapshot.save(made[0], path)
    for cache in made[1:]:
        snapshot.load(cache, path)
    return made


def same(one: LayerCache, other: LayerCache) -> bool:
    """Whether two caches read the same."""
    return all(torch.equal(half.clone(), twin) for half, twin in zip(one.read(), other.read(), strict=True))


def plain_write(path: Path, blocks: int) -> None:
    """Write as many bytes as simply as can be."""
    block = memoryview(os.urandom(BLOCK))
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    """Read all bytes as simply as can be."""
    block = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def forgotten(path: Path) -> None:
    """Ask the system not to answer the next read from memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes, work on a GPU included."""
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measured(options: argparse.Namespace) -> dict[str, object]:
    """The line."""
    path, other = options.folder / "snapshot.safetensors", options.folder / "plain.bin"
    made = caches(options, path)
    snapshot.save(made, path)
    size = path.stat().st_size
    blocks = -(-size // BLOCK)
    loaded = [LayerCache(options.method) for _ in made]
    snapshot.load(loaded, path)
    if not all(same(one, twin) for one, twin in zip(made, loaded, strict=True)):
        raise SystemExit("what was loaded is not what was saved; nothing was measured")

    def again() -> None:
        snapshot.load(loaded, path)

    times: dict[str, list[float]] = {"plain_write": [], "save": [], "plain_read": [], "load": []}
    for _ in range(options.repeats):
        times["plain_write"].append(seconds(lambda: plain_write(other, blocks)))
        times["save"].append(seconds(lambda: snapshot.save(made, path)))
        forgotten(other)
        times["plain_read"].append(seconds(lambda: plain_read(other)))
        for cache in loaded:
            cache.clear()
        forgotten(path)
        times["load"].append(seconds(again))
    path.unlink()
    other.unlink()
    speeds = {name: (blocks * BLOCK if "plain" in name else size) / min(each) / 1e9 for name, each in times.items()}
    shares = {
        "save_share": speeds["save"] / speeds["plain_write"],
        "load_share": speeds["load"] / speeds["plain_read"],
    }
    what = {"method": options.method, "device": options.device, "layers": options.layers, "heads": options.heads}
    rounded = {name: round(each, 3) for name, each in (speeds | shares).items()}
    return what | {"tokens": options.tokens, "gib": round(size / 2**30, 3)} | rounded


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=needs.folder, required=True, help="on the disk in question; must be there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", default="quantwm")
    parser.add_argument("--layers", type=needs.positive, default=48)
    parser.add_argument("--heads", type=needs.positive, default=32)
    parser.add_argument("--tokens", type=needs.positive, default=29640)
    parser.add_argument("--repeats", type=needs.positive, default=3)
    arguments = parser.parse_args()
    if torch.device(arguments.device).type == "cuda":
        needs.cuda(parser)
    print(json.dumps(measured(arguments)))


if __name__ == "__main__":
    main()
