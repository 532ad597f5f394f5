"""Live hosts of random weights at their released size: with a cache of ours under them against untouched.

    python -m benchmarks.hosts causal_forcing --checkout PATH
    python -m benchmarks.hosts longcat_video --checkout PATH --case host --case quantwm
    python -m benchmarks.hosts causal_forcing --checkout PATH --small --device cpu

Run from the repository's root, with the host's files at PATH. Every case makes the same video, after a shorter one that warms
up. Held, or the run fails at its end: ``bf16`` gives the untouched host's bits, ``quantwm`` finite and other ones, sealed bytes
are the formula's, and afterwards the host is what it was and makes its video again. A line of JSON per case goes to
``benchmarks/results/hosts.jsonl``: seconds a chunk (a segment of LongCat-Video), the shares of sealing and of reading, peak
bytes of the video, and these over what the byte model allows: the untouched host's without its cache, and ours. (HY-World holds
its cache of before while it makes the next, so the untouched host's peak has two.)
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import needs
from benchmarks.decode import environment, keep
from quantwm_models import Attachment, attach
from quantwm_models.adapters.causal_forcing import CausalForcing
from quantwm_models.adapters.hy_world import HyWorld
from tests.hosts import causal_forcing, hy_world, longcat_video
from tests.hosts.live import Live, changed, footprint, formula_nbytes

RESULTS = Path(__file__).parent / "results" / "hosts.jsonl"


@dataclass(frozen=True)
class Case:
    """A host, and what is put under it.

    Attributes:
        against: The case whose video ``bf16`` must give; the untouched host's, where it can make it.
        chunks: Of the video that is measured, and of the one before it, in which kernels of all its units' sizes are compiled.
        reported: Chunks that a report covers; where a cache is made anew it begins anew.
        attached: What ``attach`` is told; None leaves the host alone.
    """

    name: str
    live: Live
    chunks: tuple[int, int]
    attached: dict[str, Any] | None = None
    against: str = "host"
    reported: int = 1


@dataclass
class Run:
    """What is known of the cases so far, and of the host's memory.

    Attributes:
        caches: Attributes of the host that hold its own cache, the first of them all of it.
        broken: What did not hold, of all cases.
    """

    device: torch.device
    caches: tuple[str, ...]
    videos: dict[str, Tensor] = field(default_factory=dict)
    without_cache: int = 0
    broken: list[str] = field(default_factory=list)

    def measured(self, case: Case) -> dict[str, Any]:
        """Make the case's video, and hold it against what is known."""
        for name in self.caches:
            setattr(case.live.pipeline, name, None)
        before = footprint(case.live)
        with attached(case):
            case.live.video(0, case.chunks[1])
        with attached(case) as attachment:
            line, video = self._timed(case)
            if attachment is not None:
                line |= self._ours(attachment, line["peak_nbytes"], line["seconds_per_chunk"] * case.reported)
                self._hold_units(case, attachment, before)
        if case.attached is None:
            dense = nbytes(getattr(case.live.pipeline, self.caches[0], None), self.device)
            line |= {"cache_nbytes": dense}
            self.without_cache = line["peak_nbytes"] - dense
        else:
            left = changed(before, footprint(case.live))
            self._hold(case, not left, f"the host is not what it was: {left}")
        return line | self._compare(case, video)

    def _timed(self, case: Case) -> tuple[dict[str, Any], Tensor]:
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        made = case.live.video(1, case.chunks[0])
        video = made.cpu()  # waits
        seconds = (time.perf_counter() - begin) / case.chunks[0]
        peak = torch.cuda.max_memory_allocated() if gpu else 0
        return {"seconds_per_chunk": seconds, "chunks": case.chunks[0], "peak_nbytes": peak}, video

    def _ours(self, attachment: Attachment, peak: int, seconds: float) -> dict[str, Any]:
        report = attachment.report()
        ours = report.sealed_nbytes - report.host_nbytes + report.active_nbytes
        ours += report.workspace_nbytes + report.staging_nbytes + report.state_nbytes
        allowed = self.without_cache + ours
        return asdict(report) | {
            "ratio": report.ratio,
            "ratio_with_active": report.ratio_with_active,
            "seal_share": report.seal_seconds / seconds,
            "decode_share": report.decode_seconds / seconds,
            "cache_nbytes": ours,
            "peak_over_allowed": peak / allowed if self.without_cache > 0 else None,
        }

    def _compare(self, case: Case, video: Tensor) -> dict[str, Any]:
        self._hold(case, bool(video.isfinite().all()), "not finite")
        plain = self.videos.setdefault(case.against, video)
        exact = case.attached is None or case.attached["method"] == "bf16"
        same = torch.equal(plain, video)
        self._hold(case, same == exact, f"{'the same' if same else 'other'} bits")
        largest = (plain.float() - video.float()).abs().max()
        return {"same_bits": same, "largest_difference": float(largest), "largest": float(plain.abs().max())}

    def _hold_units(self, case: Case, attachment: Attachment, before: dict[str, Any]) -> None:
        """While the host has our parts, what was sealed has the formula's bytes."""
        units = list(formula_nbytes(attachment))
        self._hold(case, bool(units), "nothing was sealed")
        self._hold(case, all(stated == stored for stated, stored in units), "other bytes than the formula's")
        self._hold(case, footprint(case.live) != before, "the host was not changed")

    def _hold(self, case: Case, fact: bool, otherwise: str) -> None:
        if not fact:
            self.broken.append(f"{case.name}: {otherwise}")


def attached(case: Case) -> AbstractContextManager[Attachment | None]:
    """The case's cache under its host."""
    return nullcontext() if case.attached is None else attach(case.live.pipeline, **case.attached)


def nbytes(cache: Any, device: torch.device) -> int:
    """Bytes of all tensors on a device in a host's own cache."""
    if isinstance(cache, Tensor):
        return cache.nbytes if cache.device.type == device.type else 0
    entries = cache.values() if isinstance(cache, dict) else cache if isinstance(cache, list | tuple) else ()
    return sum(nbytes(each, device) for each in entries)


def ours(**more: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of the cases with a cache of ours, and what ``attach`` is told."""
    yield "bf16", {"method": "bf16", **more}
    yield "quantwm", {"method": "quantwm", **more}
    yield "quantwm, offloaded", {"method": "quantwm", "offload": True, **more}


def of_causal_forcing(load: Callable[[str], Any], device: str, *, small: bool) -> Iterator[Case]:
    """Chunks of three frames, as many as stock code allows; then 93 frames of video, for which it has no room."""
    size = causal_forcing.Size(slots=21 * causal_forcing.FRAME) if small else causal_forcing.RELEASED
    size = replace(size, device=device)
    live = causal_forcing.lived(load, causal_forcing.built(load, *causal_forcing.FEW_STEPS, size), size)
    yield Case("host", live, (7, 2))
    for name, told in ours():
        yield Case(name, live, (7, 4), told, reported=7)
    for name, told in ours(adapter=CausalForcing(frames=24)):
        yield Case(f"{name}, 24 frames", live, (8, 4), told, against="24 frames", reported=8)
    yield Case("host again", live, (7, 2))


def of_longcat_video(load: Callable[[str], Any], device: str, *, small: bool) -> Iterator[Case]:
    """Two segments of five new latent frames after 19 given ones, of two prompts; two of the stock 50 steps."""
    size = replace(longcat_video.SMALL if small else longcat_video.RELEASED, device=device)
    pipeline = longcat_video.built(load, size)
    live = longcat_video.lived(load, pipeline, size)
    moving = longcat_video.lived(load, pipeline, size, offload_kv_cache=True)
    yield Case("host", live, (2, 1))
    for name, told in ours():
        yield Case(name, live, (2, 2), told)
    yield Case("quantwm, offloaded by the host", moving, (2, 2), {"method": "quantwm"})
    yield Case("host, offloaded", moving, (2, 1))
    yield Case("host again", live, (2, 1))


def of_hy_world(load: Callable[[str], Any], device: str, *, small: bool) -> Iterator[Case]:
    """Five chunks of the 5B model, the last of which sees 16 latent frames, four of them from memory; four steps a chunk."""
    size = replace(hy_world.SMALL if small else hy_world.RELEASED, device=device)
    live = hy_world.lived_wan(load, size)
    yield Case("host", live, (5, 2))
    for name, told in ours():
        yield Case(name, live, (5, 5), told)
    for name, told in ours(adapter=HyWorld(once=True)):
        yield Case(f"{name}, stored once", live, (5, 5), told)
    yield Case("host again", live, (5, 2))


HOSTS = {
    "hy_world": (hy_world.importing_wan, of_hy_world, ("_kv_cache", "ctx")),
    "causal_forcing": (causal_forcing.importing, of_causal_forcing, ("kv_cache1",)),
    "longcat_video": (longcat_video.importing, of_longcat_video, ("kv_cache_dict",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=HOSTS)
    parser.add_argument("--checkout", type=needs.folder, required=True, metavar="PATH")
    parser.add_argument("--case", action="append", help="only these; what they are held against comes first")
    parser.add_argument("--small", action="store_true", help="a small model and small frames")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        needs.cuda(parser)
    importing, cases, caches = HOSTS[arguments.host]
    known = environment() | {"benchmark": "hosts", "host": arguments.host, "small": arguments.small}
    with needs.modules_of(arguments.checkout), importing(arguments.checkout.resolve()) as load:
        run = Run(device, caches)
        for case in cases(load, arguments.device, small=arguments.small):
            if arguments.case and case.name not in arguments.case:
                continue
            line = known | {"case": case.name} | run.measured(case)
            keep(line, arguments.results)
            print(json.dumps(line), flush=True)
    if run.broken:
        raise SystemExit("\n".join(["did not hold:", *run.broken]))


if __name__ == "__main__":
    main()
