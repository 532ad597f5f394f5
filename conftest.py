"""What holds for all tests: what can be collected without Triton, and where core's annotations are checked."""

import importlib.util
from collections.abc import Generator
from pathlib import Path

import jaxtyping
import pytest

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob.append("packages/quantwm-kernels/src/quantwm_kernels/triton/*")

OF_CORE = tuple(Path(__file__).parent / each for each in ("tests/core", "packages/quantwm-core"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Check core's annotations in core's own tests and examples alone, where tests/core/conftest.py has made them checkable.

    All others are told of bad input by core's own errors, before which an annotation would speak; and sizes that PyTorch
    traces are no ``int``.
    """
    before = jaxtyping.config.jaxtyping_disable
    elsewhere = not any(item.path.is_relative_to(folder) for folder in OF_CORE)
    jaxtyping.config.update("jaxtyping_disable", before or elsewhere)
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
