"""The kernels of a seal, each alone under other launch parameters; needs Triton."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.decode import Copier
from benchmarks.sealed_layer import CANDIDATES, CENTROIDS, GROUP, Subject, report, seconds
from quantwm_kernels import launch
from quantwm_kernels.launch import Launch
from quantwm_kernels.triton import affine, codebook, psac, qsac, statistics
from quantwm_kernels.triton.layer import Layer
from quantwm_kernels.triton.projection import Projection
from quantwm_kernels.triton.residual import Residual

Choices = Mapping[str, Sequence[int]]


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


def launches(name: str, choices: Choices) -> Iterator[Launch]:
    """A kernel's launch with each combination of choices."""
    entry = launch.LAUNCHES[name]
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        blocks = {block: chosen.pop(block) for block in list(chosen) if block.isupper()}
        yield replace(entry, blocks={**entry.blocks, **blocks}, **chosen)


def sweep(subject: Subject, known: dict[str, Any], copier: Copier, worth: Mapping[str, Choices]) -> None:
    """Time kernels under other launch parameters, those that are worth a try, and show the best five of each."""
    table = cast("dict[str, Launch]", launch.LAUNCHES)
    for name, call in parts_of(subject).items():
        if name not in worth:
            continue
        stock, tried = table[name], []
        for each in [stock, *launches(name, worth[name])]:
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
