"""Lines of results as tables, and the figures that are derived from a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantwm_core.errors import FormatError
from quantwm_eval.markdown import listed
from quantwm_eval.text_table import grid
from quantwm_eval.true_shapes.measure import AGAIN, HOST, NOT_FOR_IT
from quantwm_eval.true_shapes.shape import Shape
from quantwm_eval.true_shapes.timing import chunk_seconds

GIB = 2**30
HEAD = ("cache", "at rest", "ratio", "peak", "of model", "s a chunk", "to host", "seal", "decode")
CACHE_PARTS = ("own_nbytes", "sealed_nbytes", "active_nbytes", "state_nbytes")
Line = Mapping[str, Any]


def load(path: Path) -> list[dict[str, Any]]:
    """Lines of a results file.

    Raises:
        FormatError: A line is none of this benchmark.
    """
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise FormatError(f"{path}, line {number}: no JSON ({error})") from error
        if not isinstance(line, dict) or line.get("benchmark") != "true-shapes":
            raise FormatError(f"{path}, line {number}: not of quantwm bench true-shapes")
        found.append(line)
    return found


def key(line: Line) -> tuple[Any, ...]:
    """What lines have in common that were measured together."""
    names = ("model", "resolution", "frames", "window", "offload", "once", "layers_run", "steps_run", "tiny")
    return tuple(line[name] for name in names)


def fits(line: Line) -> bool:
    """Whether a video was made; otherwise memory ran out, or the method is none for the shape."""
    return not any(line.get(name) for name in ("does_not_fit", "refused"))  # older lines lack the entries


def at_rest(line: Line) -> float:
    """Bytes of keys and values at the end of the video, statistics included, in all layers of the model."""
    return sum(line[name] for name in CACHE_PARTS) * line["layers"] / line["layers_run"]


def peak(line: Line) -> float:
    """Most bytes that were allocated at once, with weights and cache of all layers of the model; 0 on a CPU.

    By the byte model of :func:`quantwm_eval.true_shapes.measure.modelled`: what is there before the video and what the cache
    holds on the device grow with layers, while a pass, and what reads and seals share, are of one layer. The cache of an
    untouched host is what was there beside its weights and a pass.

    >>> told = {
    ...     "model": "hy_world",
    ...     "offload": False,
    ...     "layers": 30,
    ...     "layers_run": 10,
    ...     "beside_nbytes": 5,
    ...     "method": "qvg",
    ... }
    >>> peak(told | {"before_nbytes": 100, "held_nbytes": 20, "peak_nbytes": 127})  # 3 * (100 + 20) + 7
    367.0
    """
    cache = line["held_nbytes"]
    if line["method"] in (HOST, AGAIN):
        elsewhere = line["offload"] and Shape.load(line["model"]).host == "segments"  # the others cannot
        cache = 0 if elsewhere else max(0, line["peak_nbytes"] - line["before_nbytes"] - line["beside_nbytes"])
    more = line["layers"] / line["layers_run"] - 1
    return line["peak_nbytes"] + more * (line["before_nbytes"] + cache) if line["peak_nbytes"] else 0.0


def seconds(line: Line) -> list[float]:
    """Seconds of each chunk, denoising steps and layers extrapolated to the model's."""
    factor = line["layers"] / line["layers_run"]
    return [factor * chunk_seconds(passes, line["steps"]) for passes in line["chunks"]]


def shares(line: Line) -> tuple[float, float]:
    """Shares of sealing and of reading in the time of a video."""
    clean = Shape.load(line["model"]).clean
    factor, whole = line["layers"] / line["layers_run"], sum(seconds(line))
    reads = (line["steps"] + clean) / (line["steps_run"] + clean)
    return factor * sum(line["seal_seconds"]) / whole, factor * reads * sum(line["decode_seconds"]) / whole


def render(lines: Sequence[Line]) -> str:
    """Tables for a terminal, one for each stack."""
    groups = dict.fromkeys(map(key, lines))
    return "\n\n".join(_one([line for line in lines if key(line) == each]) for each in groups)


def markdown(lines: Sequence[Line]) -> str:
    """The table of one stack for a page, and when and of which commit it was measured."""
    return f"{listed(HEAD, _rows(lines))}\n\n{' '.join(dict.fromkeys(map(measured, lines)))}"


def measured(line: Line) -> str:
    """When, and of which commit, as far as a line says so.

    >>> measured({"provenance": {"date": "2026-12-01T03:59:50+00:00", "commit": "6c609c0"}})
    'Measured on 2026-12-01, commit `6c609c0`.'
    """
    source = line["provenance"]
    said = f", commit `{source['commit']}`" if source.get("commit") else ""
    return f"Measured on {source['date'][:10]}{said}."


def title(line: Line) -> str:
    """What was run.

    >>> told = {"model": "hy_world", "resolution": "704p", "frames": 93, "window": 16, "offload": False, "once": False}
    >>> title(told | {"tiny": False, "layers": 30, "layers_run": 2, "steps": 4, "steps_run": 4})
    'HY-World 1.5, 5B, 704p, 93 frames, window 16 latent frames, extrapolated from 2 of 30 layers'
    """
    parts = [Shape.load(line["model"]).title, line["resolution"], f"{line['frames']} frames"]
    if line["window"] is not None:
        parts.append(f"window {line['window']} latent frames")
    parts += [said for name, said in (("offload", "offloaded"), ("once", "stored once")) if line[name]]
    of = [
        (f"{line[f'{what}_run']} of {line[what]} {what}")
        for what in ("layers", "steps")
        if line[f"{what}_run"] < line[what]
    ]
    if of:
        parts.append(f"extrapolated from {' and '.join(of)}")
    return ", ".join([*parts, *(["in small: no figure of the model"] if line["tiny"] else [])])


def _one(lines: Sequence[Line]) -> str:
    return f"{title(lines[0])}\n\n{grid([HEAD, *_rows(lines)])}"


def _rows(lines: Iterable[Line]) -> list[tuple[str, ...]]:
    every = list(lines)
    hosts = [line for line in every if line["method"] in (HOST, AGAIN) and fits(line)]
    return [_row(line, hosts) if fits(line) else _without(line) for line in every]


def _without(line: Line) -> tuple[str, ...]:
    return line["method"], NOT_FOR_IT if line.get("refused") else "does not fit", *["-"] * (len(HEAD) - 2)


def size(nbytes: float, digits: int) -> str:
    """Bytes in GiB, and those of a stack in small in the largest unit that there is one of.

    >>> [size(each, digits=2) for each in (71.44 * 2**30, 2**28, 3 * 2**20, 12_345)]
    ['71.44 GiB', '0.25 GiB', '3.00 MiB', '12.06 KiB']
    """
    if nbytes >= GIB / 100:
        return f"{nbytes / GIB:.{digits}f} GiB"
    unit, name = (2**20, "MiB") if nbytes >= 2**20 else (2**10, "KiB")
    return f"{nbytes / unit:.{digits}f} {name}"


def slowdown(line: Line, hosts: Sequence[Line]) -> float:
    """How much longer a video takes than under the untouched host, as a share: 0.02 is 2 %.

    Args:
        line: Of a method, or of the host.
        hosts: The host's, which the mean is taken of.
    """
    return len(hosts) * sum(seconds(line)) / sum(sum(seconds(host)) for host in hosts) - 1


def _row(line: Line, hosts: Sequence[Line]) -> tuple[str, ...]:
    each, (seal, decode) = seconds(line), shares(line)
    rest, whole = at_rest(line), at_rest(hosts[0]) if hosts else 0
    ratio = whole / rest if rest and whole else None  # a video of one chunk may leave no history
    slower = slowdown(line, hosts) if hosts else None
    measured, ours = line["peak_nbytes"] > 0, line not in hosts
    return (
        line["method"],
        size(rest, digits=3),
        "-" if ratio is None else f"{ratio:.2f}x",
        size(peak(line), digits=2) if measured else "-",
        f"{line['peak_nbytes'] / line['model_nbytes']:.3f}" if measured and ours else "-",
        f"{sorted(each)[len(each) // 2]:.3f}",
        "-" if slower is None else f"{round(100 * slower, 1) + 0.0:+.1f} %",
        f"{100 * seal:.1f} %" if ours else "-",
        f"{100 * decode:.1f} %" if ours else "-",
    )
