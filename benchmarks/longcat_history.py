"""LongCat-Video's history: units within the first segment, and the frame in which its keys are weighed.

    python -m benchmarks.longcat_history --checkout PATH

Run from the repository's root, with the host's files at PATH, on a CPU in some minutes. The host's own pipeline makes two
segments with a small model of random weights: 2 layers of 2 heads x 128, 19 latent frames of 432 tokens. Errors are of the
logits, root mean square over all layers and queries of a segment against the exact keys, as a share of the logits'
deviation. With random weights they rank the choices, and say nothing of a released model. A line of JSON per choice.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import needs
from quantwm_kernels.statistics import QueryMoment
from quantwm_models import LayerCache, attach
from quantwm_models.adapters.longcat_video import LongCatVideo
from quantwm_models.rotary import before_rotation, turned
from tests.hosts import longcat_video
from tests.hosts.live import Live

SIZE = replace(longcat_video.SMALL, heads=2, head_dim=128, height=288, width=384, history=19, new=5)
TOKENS = SIZE.history * SIZE.frame
EVERY = 16  # of the queries, one is looked at


@dataclass
class Segment:
    """What a layer made and asked in one segment.

    Attributes:
        keys: Of the history before RoPE, ``[1, H, N, D]``.
        built: Queries of the pass that made it, after RoPE.
        asked: Queries of each step, after RoPE.
    """

    keys: Tensor
    built: Tensor
    asked: list[Tensor] = field(default_factory=list)

    def error(self, read: Tensor, angles: Tensor, *, rotated: bool = False) -> float:
        """Of the logits by what a cache gives for the keys, over their deviation."""
        exact = turned(self.keys, angles)
        given = read.float() if rotated else turned(read, angles)
        queries = torch.cat(self.asked)[:, :, ::EVERY].float()
        wrong = queries @ (given - exact).mT
        return float(wrong.square().mean().sqrt() / (queries @ exact.mT).std())


def recorded(live: Live, count: int) -> tuple[Tensor, list[list[Segment]]]:
    """A video of so many segments, and what each layer made and asked in each."""
    segments: list[list[Segment]] = [[] for _ in live.pipeline.dit.blocks]

    def watch(made: list[Segment]) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            if args[1].shape[2] == TOKENS:
                made.append(Segment(args[1].clone(), output[0].clone()))
            else:
                made[-1].asked.append(output[0][:, :, TOKENS:].clone())

        return hook

    blocks = zip(live.pipeline.dit.blocks, segments, strict=True)
    handles = [block.attn.rope_3d.register_forward_hook(watch(made)) for block, made in blocks]
    try:
        video = live.video(0, count)
    finally:
        for handle in handles:
            handle.remove()
    return video, segments


def units(live: Live, count: int, plain: Tensor) -> dict[str, Any]:
    """A segment in so many units; then the same once more, as one unit by the statistics of what came before."""
    line: dict[str, Any] = {"first_units": count}
    angles = positions(live)
    with attach(live.pipeline, "quantwm", adapter=LongCatVideo(first_units=count)) as attachment:
        for number in range(2):
            video, segments = recorded(live, 1)
            report, reads = attachment.report(), [cache.read()[0].clone() for cache in attachment.caches]
            errors = [each[-1].error(read, angles) for each, read in zip(segments, reads, strict=True)]
            line[("first", "again")[number]] = {
                "nbytes": report.sealed_nbytes,
                "ratio": report.ratio,
                "logit_error": sum(errors) / len(errors),
                "output_error": float((video - plain).square().mean().sqrt() / plain.std()),
            }
    return line


def positions(live: Live) -> Tensor:
    """Angles of rotation of the history's tokens, ``[N, D / 2]``."""
    grid = (SIZE.history, SIZE.height // 16, SIZE.width // 16)
    angles: Tensor = live.pipeline.dit.blocks[0].attn.rope_3d.freqs_dict[grid].float()[:, ::2]
    return angles


def frames(live: Live) -> list[dict[str, Any]]:
    """Ways to weigh the keys of the second segment by the queries of the first."""
    _, segments = recorded(live, 2)
    angles = positions(live)

    def energies(moment: QueryMoment, _: Any) -> QueryMoment:
        pairs = moment.mean.diagonal(dim1=-2, dim2=-1).unflatten(-1, (-1, 2))
        equal = pairs.mean(-1, keepdim=True).expand_as(pairs).flatten(-2)
        return QueryMoment(torch.diag_embed(equal), moment.queries)

    def turned_back(moment: QueryMoment, span: Any) -> QueryMoment:
        return before_rotation(moment, angles[slice(*span)])

    ways: dict[str, tuple[Any, bool, bool]] = {
        "no statistics": (None, False, False),
        "before RoPE, moment turned back": (turned_back, False, True),
        "before RoPE, energies of pairs": (energies, False, True),
        "after RoPE": (None, True, True),
    }
    lines = []
    for name, (frame, rotated, asks) in ways.items():
        errors = []
        for first, second in segments:
            cache = LayerCache("quantwm")
            cache.key_frame = frame
            if asks:
                for queries in (first.built, *first.asked):
                    for prompt in queries.split(1):
                        cache.foresee(prompt)
            keys = turned(second.keys, angles).bfloat16() if rotated else second.keys
            cache.append(keys, keys)
            cache.seal()
            errors.append(second.error(cache.read()[0], angles, rotated=rotated))
        lines.append({"keys": name, "logit_error": sum(errors) / len(errors)})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=needs.folder, required=True, metavar="PATH")
    arguments = parser.parse_args()
    with needs.modules_of(arguments.checkout), longcat_video.importing(arguments.checkout.resolve()) as load:
        live = longcat_video.lived(load, longcat_video.built(load, SIZE), SIZE)
        plain = live.video(0, 1)
        for line in (*frames(live), *(units(live, count, plain) for count in (1, 2, 4))):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
