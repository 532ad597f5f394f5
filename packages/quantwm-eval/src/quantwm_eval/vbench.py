"""VBench's own scores, by VBench itself in an environment of its own.

VBench pins old versions of NumPy and transformers, so it cannot live beside this package. It is called as its users call it
(``vbench evaluate --mode custom_input``), one dimension after the other, and the JSON that it leaves is read back. Nothing here
computes a score: without VBench there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quantwm_core.errors import FormatError, ParameterError, StateError, lookup
from quantwm_core.tensor_file import replaced
from quantwm_eval import results, schema, summary
from quantwm_eval.estimate import bootstrap
from quantwm_eval.experiment import twice
from quantwm_eval.metric import Quantity
from quantwm_eval.summary import Table

FILE = "vbench.json"
FORMAT, VERSION = "quantwm-vbench", 1
DIMENSIONS = (
    "subject_consistency", "background_consistency", "temporal_flickering", "motion_smoothness", "dynamic_degree",
    "aesthetic_quality", "imaging_quality",
)  # fmt: skip
"""Dimensions that VBench scores on videos of one's own without knowing a prompt."""
SCALE = {"imaging_quality": 0.01}
"""Of single videos, where VBench states them on another scale than their mean."""
HOW_TO = (
    "make an environment for it (python3.10 -m venv vbench && vbench/bin/pip install vbench, see "
    "github.com/Vchitect/VBench) and name its folder with --vbench"
)
SCORES = schema.fields(
    {
        "format": schema.text,
        "version": schema.whole(1),
        "dimensions": schema.by_name(schema.each(schema.row(schema.text, schema.whole(0), schema.text, schema.number))),
    }
)
"""What stands in the file: of every dimension kind, scene, method and score of every video."""

Video: TypeAlias = tuple[str, int, str]
"""Kind, scene and method of a video."""


@dataclass(frozen=True)
class Scores:
    """What VBench found.

    Attributes:
        dimensions: Score of every video, by dimension.
    """

    dimensions: Mapping[str, Mapping[Video, float]]

    def table(self, labels: Sequence[str], kind: str) -> Table:
        """Methods by dimensions, means over scenes, and last the mean over dimensions."""
        columns = [(_quantity(name), found) for name, found in self.dimensions.items()]
        columns.append((Quantity("vbench", "mean of these", "", "higher", 0.0, 1.0, 4), _mean(self.dimensions)))
        rows = []
        for label in labels:
            values = [[x for (of, _, by), x in found.items() if (of, by) == (kind, label)] for _, found in columns]
            shown = zip(columns, values, strict=True)
            rows.append((label, tuple(summary.entry(quantity, bootstrap(x), best=False) for (quantity, _), x in shown)))
        return Table(f"VBench, {kind} scenes", tuple(summary.head(quantity) for quantity, _ in columns), tuple(rows))


def find(environment: Path) -> Path:
    """The command of an environment, or the command itself.

    Raises:
        StateError: There is none; the message says how to get it.
    """
    candidates = [environment, environment / "bin" / "vbench", environment / "Scripts" / "vbench.exe"]
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    raise StateError(f"--vbench {environment}: holds no command vbench; {HOW_TO}")


def check_dimensions(names: Sequence[str]) -> tuple[str, ...]:
    """The names, if VBench scores all of them on videos without a prompt.

    Raises:
        UnknownNameError: It does not.
        ParameterError: There is none, or one twice.
    """
    if not names:
        raise ParameterError("VBench dimensions: got none, need at least one")
    if again := twice(names):
        raise ParameterError(f"VBench dimensions: got {again} twice, need each once")
    return tuple(lookup("VBench dimension", name, DIMENSIONS) for name in names)


def score(
    command: Path,
    videos: Mapping[Video, Path],
    dimensions: Sequence[str],
    progress: Callable[[str], None] = lambda _dimension: None,
) -> Scores:
    """Let VBench score videos.

    Args:
        command: Its executable, see :func:`find`.
        videos: Files.
        dimensions: What to score.
        progress: Called before each dimension.

    Raises:
        StateError: VBench ended without a result; the message holds the end of what it said.
        FormatError: Its result is cut off, or not what VBench 0.1.5 writes.
    """
    names = {f"{number:06d}": video for number, video in enumerate(videos)}
    found: dict[str, Mapping[Video, float]] = {}
    with tempfile.TemporaryDirectory(prefix="vbench-") as folder:
        inputs = Path(folder) / "videos"
        inputs.mkdir()
        for name, video in names.items():
            (inputs / f"{name}.mp4").symlink_to(videos[video].absolute())
        for dimension in dimensions:
            progress(dimension)
            listed = _run(command, inputs, dimension, Path(folder) / dimension)
            found[dimension] = _read(listed, dimension, names)
    return Scores(found)


def save(path: Path, scores: Scores) -> None:
    """Write scores as strict JSON; a file that is there is replaced only when the new one is whole."""
    plain = {name: [[*video, value] for video, value in found.items()] for name, found in scores.dimensions.items()}
    with replaced(path) as file:
        file.write(results.dump({"format": FORMAT, "version": VERSION, "dimensions": plain}).encode())


def load(path: Path) -> Scores | None:
    """Read what :func:`save` wrote; None where there is no such file.

    Raises:
        FormatError: It is another file, or dimensions score other videos than the first does.
        OSError: It cannot be read.
    """
    if not path.exists():
        return None
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: no scores of VBench: {error}") from error
    try:
        schema.hold(plain, SCORES)
    except FormatError as error:
        raise FormatError(f"{path}: no scores of VBench: {error}") from error
    if (plain["format"], plain["version"]) != (FORMAT, VERSION):
        raise FormatError(f"{path}: format {plain['format']!r} {plain['version']}, need {FORMAT!r} {VERSION}")
    dimensions = {
        name: {(kind, scene, label): float(x) for kind, scene, label, x in found}
        for name, found in plain["dimensions"].items()
    }
    first = next(iter(dimensions.values()), {})
    for name, found in dimensions.items():
        if unlike := found.keys() ^ first.keys():
            raise FormatError(f"{path}: {name}: of other videos than the first dimension, such as {min(unlike)}")
    return Scores(dimensions)


def _run(command: Path, videos: Path, dimension: str, out: Path) -> dict[str, Any]:
    """The JSON that one call leaves."""
    # VBench starts "python" by name: that of its own environment must come first.
    environment = os.environ | {"PATH": f"{command.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    environment.pop("PYTHONPATH", None)
    arguments = ["evaluate", "--videos_path", videos, "--dimension", dimension, "--mode", "custom_input"]
    ended = subprocess.run(  # noqa: S603  # the user names the program
        [str(word) for word in (command, *arguments, "--output_path", out)],
        capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    written = sorted(out.glob("*_eval_results.json"))
    if not written:  # its exit status says nothing: the command ends with 0 whatever happened inside
        said = (ended.stderr or ended.stdout).strip()[-800:] or f"nothing, exit status {ended.returncode}"
        raise StateError(f"VBench left no result for {dimension}; it said: {said}")
    content = written[-1].read_bytes()
    try:
        plain: dict[str, Any] = json.loads(content)
    except ValueError as error:
        raise FormatError(
            f"VBench's result for {dimension}, {len(content)} bytes, is no whole JSON: {error}; if the disk is not full, run the "
            "same command again: only VBench is repeated"
        ) from error
    return plain


def _read(plain: Mapping[str, Any], dimension: str, names: Mapping[str, Video]) -> dict[Video, float]:
    try:
        _, listed = plain[dimension]
        found = {
            names[Path(one["video_path"]).stem]: SCALE.get(dimension, 1.0) * float(one["video_results"])
            for one in listed
        }
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"VBench's result for {dimension} is not of the form of version 0.1.5: {error!r}") from error
    lacking = [video for video in names.values() if video not in found]
    if lacking:
        raise FormatError(f"VBench's result for {dimension} lacks {len(lacking)} of {len(names)} videos: {lacking[0]}")
    return found


def _mean(dimensions: Mapping[str, Mapping[Video, float]]) -> dict[Video, float]:
    """Of each video, over the dimensions."""
    first = next(iter(dimensions.values()), {})
    return {video: sum(found[video] for found in dimensions.values()) / len(dimensions) for video in first}


def _quantity(dimension: str) -> Quantity:
    return Quantity(f"vbench:{dimension}", dimension.replace("_", " "), "", "higher", 0.0, 1.0, 4)
