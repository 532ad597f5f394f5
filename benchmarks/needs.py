"""What benchmarks are told and cannot do without, refused in a line before anything is measured."""

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: need a whole number of at least 1")
    return number


def folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such folder")
    return path


def cuda(parser: argparse.ArgumentParser) -> torch.device:
    """The GPU; the program ends where there is none."""
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def triton(parser: argparse.ArgumentParser) -> None:
    """End the program where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        parser.error("the package triton is not installed; packages/quantwm-kernels[gpu] brings it")


@contextmanager
def modules_of(path: Path) -> Iterator[None]:
    """End the program where a host's modules are not in its checkout, or what they need is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"--checkout {path}: {error}; name the folder of the host's code, and install what it requires"
        ) from error
