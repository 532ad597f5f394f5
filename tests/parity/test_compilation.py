"""Every kernel compiles for every architecture that is promised, and fits its shared memory; no GPU is needed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

ROOT = Path(__file__).parents[2]


def run(arguments: Sequence[str], cache: Path, expected: int = 0, **further: str) -> str:
    """Output of a Python process that exits as ``expected``; Triton compiles in it unless ``further`` variables say otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path} | further
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == expected, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_every_kernel_compiles_and_fits(tmp_path: Path) -> None:
    from tests.parity.compile_ahead import CASES
    from tests.parity.specialization import DEVICES

    lines = [json.loads(line) for line in run(["-m", "tests.parity.compile_ahead"], tmp_path).splitlines()]
    assert len(lines) == sum(len(case.architectures) for case in CASES)
    for kernel in {case.kernel for case in CASES}:
        assert {line["architecture"] for line in lines if line["kernel"] == kernel} == set(DEVICES)
    over = [line for line in lines if line["shared"] > DEVICES[line["architecture"]].shared_nbytes]
    assert over == []
    assert [line for line in lines if line["crowded"]] == []


def test_every_kernel_has_a_case(tmp_path: Path) -> None:
    listing = """
import importlib, pkgutil, quantwm_kernels.triton as package
for info in pkgutil.iter_modules(package.__path__):
    module = importlib.import_module(f"{package.__name__}.{info.name}")
    for name, value in vars(module).items():
        if name.endswith("_kernel") and getattr(value, "__module__", "") == module.__name__:
            constants = [each.is_constexpr for each in value.function.params]
            assert constants == sorted(constants), f"{name}: a constant stands before a run-time argument"
            print(f"{info.name}.{name}")
"""
    from tests.parity.compile_ahead import CASES

    kernels = set(run(["-c", listing], tmp_path).split())
    assert kernels
    assert kernels == {case.kernel for case in CASES}
