"""What a checkout's host is given, looked at before anything of the host's own is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval.host import check_batch
from quantwm_eval.hosts import Setup
from quantwm_eval.latents import frames_of
from quantwm_eval.suite import Scene, read

POSITIONS = 1024
"""Latent frames that a host's rotation has positions for."""


def given(
    host: str, setup: Setup, *, fits: Sequence[int] = (), file: bool = False
) -> tuple[Path, Path, tuple[Scene, ...]]:
    """Checkout, weights and scenes, looked at as far as that takes nothing of the host's own.

    Args:
        host: Its name; it makes one video at a time.
        setup: What it is made from.
        fits: Lengths that it makes, where they do not depend on its configuration.
        file: Whether its weights are a file of safetensors, and no folder.

    Raises:
        ParameterError: A path is missing or of the wrong kind, or the host has no such scene, batch or length.
        FormatError: The weights are no safetensors, or there is no scene.
    """
    root, weights, inputs = (setup.need(host, part) for part in ("checkout", "weights", "inputs"))
    if weights.is_file() != file:
        told = "is a folder; name the file of safetensors" if file else "is a file; name the folder that was released"
        raise ParameterError(f"--weights {weights}: {told}")
    if file:
        check_weights(weights)
    check_batch(host, setup.batch, makes_batches=False)
    scenes = read(inputs)
    check_numbers(setup.scenes, scenes)
    if fits and setup.frames is not None:
        check_frames(host, setup.frames, fits)
    return root, weights.resolve(), scenes


def check_numbers(scenes: Sequence[int], suite: Sequence[Scene]) -> None:
    """Refuse scenes that a suite has not.

    Raises:
        ParameterError: The message says which it has.
    """
    if not all(0 <= scene < len(suite) for scene in scenes):
        raise ParameterError(f"scenes {min(scenes)} to {max(scenes)}: the suite has prompts 0 to {len(suite) - 1}")


def lengths(chunk: int) -> list[int]:
    """Frames of video that chunks of so many latent frames make, as many as there are positions for.

    >>> lengths(4)[:3]
    [13, 29, 45]
    """
    return [frames_of((1 + number) * chunk) for number in range(POSITIONS // chunk)]


def check_frames(host: str, frames: int, fits: Sequence[int]) -> None:
    """Refuse a length that is none of those that fit, one for each number of chunks.

    Raises:
        ParameterError: The message says what would do.
    """
    if frames not in fits:
        raise ParameterError(
            f"frames {frames}: host {host!r} makes whole chunks, {len(fits)} at most; "
            f"need one of {', '.join(map(str, fits[:8]))}{', ...' if len(fits) > 8 else ''} up to {fits[-1]}"
        )


def check_weights(path: Path) -> None:
    """Read the head of a file of weights, and no more.

    Raises:
        FormatError: It is no safetensors file.
    """
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        raise FormatError(f"{path}: not safetensors: {error}; save the state dict of a pickle once") from error


def part(root: Path, name: str) -> Path:
    """A file or folder of released weights.

    Raises:
        ParameterError: It is not there.
    """
    path = root / name
    if not path.exists():
        raise ParameterError(f"--weights {root}: holds no {name}")
    return path


def check_size(host: str, setup: Setup, sizes: Sequence[str], told: str) -> None:
    """Refuse a size of frames that the host's code does not make.

    Raises:
        ParameterError: The message says what it makes.
    """
    if setup.size and setup.size not in sizes:
        raise ParameterError(f"--size {setup.size}: host {host!r} {told}")


def refuse_config(host: str, setup: Setup) -> None:
    """Refuse a configuration for a host that reads none.

    Raises:
        ParameterError: One was given.
    """
    if setup.config is not None:
        raise ParameterError(f"--config {setup.config}: host {host!r} has its settings in its code")
