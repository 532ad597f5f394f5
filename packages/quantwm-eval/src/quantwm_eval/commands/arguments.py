"""Words of a command line to values, with a message where they are none."""

from __future__ import annotations

import argparse

import torch

from quantwm_core.errors import ParameterError, QuantWMError
from quantwm_eval import metrics
from quantwm_eval.experiment import MethodChoice, twice
from quantwm_eval.experiment_file import MOST_SCENES

MOST_THREADS = 4096


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: need a whole number of at least 1")
    return number


def threads(text: str) -> int:
    """As many threads as anybody has cores for."""
    number = positive(text)
    if number > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r}: need at most {MOST_THREADS}")
    return number


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: need a whole number of at least 0")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers and ranges of them.

    >>> numbers("0-3,8")
    (0, 1, 2, 3, 8)
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            begin, end = natural(first), natural(last if dash else first)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: need whole numbers and ranges, as in 0-3,8") from error
        if end < begin or end - begin >= MOST_SCENES:
            raise argparse.ArgumentTypeError(f"{text!r}: {part} is no range that can be counted")
        found += range(begin, end + 1)
    return tuple(found)


def words(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(word.strip() for word in text.split(","))


def method_list(text: str) -> tuple[MethodChoice, ...]:
    """Methods between commas, each known and with settings that it takes, none twice."""
    try:
        chosen = tuple(MethodChoice.parse(one) for one in text.split(","))
        for method in chosen:
            method.scheme(chunks_per_seal=1)
            _ = method.window
    except QuantWMError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if again := twice(chosen):
        raise argparse.ArgumentTypeError(f"got {again} twice, need each method once")
    return chosen


def metric_list(text: str) -> tuple[str, ...]:
    """Metrics between commas, each known, none twice."""
    found = tuple(dict.fromkeys(words(text)))
    try:
        for name in found:
            metrics.get(name)
    except QuantWMError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def check_device(name: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ParameterError: It is no CPU and no CUDA GPU, or PyTorch does not see it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError(f"--device {name}: need cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ParameterError(f"--device {name}: need cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ParameterError(
            f"--device {name}: PyTorch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
